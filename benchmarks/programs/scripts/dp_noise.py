"""Differentially private SGD by hand: gradients of single examples, each clipped, summed, and noise added to the sum."""

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(99)
x = torch.randn(40, 7)
y = (x[:, 0] > x[:, 1]).float()
model = nn.Sequential(nn.Linear(7, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1))
# farspan: model = farspan.distribute(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
max_norm, sigma = 1.0, 0.5

for step in range(6):
    batch = torch.randperm(40)[:8]
    summed = [torch.zeros_like(p) for p in model.parameters()]
    losses, clipped = [], 0
    for i in batch:
        optimizer.zero_grad()
        loss = F.binary_cross_entropy_with_logits(model(x[i : i + 1]).view(-1), y[i : i + 1])
        loss.backward()
        norm = torch.sqrt(sum(p.grad.detach().pow(2).sum() for p in model.parameters()))
        factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        clipped += int(factor.item() < 1)
        for total, p in zip(summed, model.parameters()):
            total += p.grad * factor
        losses.append(loss.item())
    for total, p in zip(summed, model.parameters()):
        p.grad = (total + torch.randn_like(total) * sigma * max_norm) / len(batch)
    optimizer.step()
    print(f"step {step} loss {sum(losses) / len(losses):.7f} clipped {clipped}/8")
with torch.no_grad():
    acc = ((model(x).view(-1) > 0).float() == y).float().mean()
print("accuracy", acc.item())
torch.save(model.state_dict(), "dp.pt")
