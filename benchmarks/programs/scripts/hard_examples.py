"""Hard examples: a sampler weighted by losses of the last epoch, the top of a batch kept, anomaly detection on."""

import json

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler

torch.autograd.set_detect_anomaly(True)
torch.manual_seed(27)
x = torch.randn(64, 7)
y = (x.prod(1) > 0).long()
dataset = TensorDataset(x, y, torch.arange(64))
model = nn.Sequential(
    nn.Linear(7, 32), nn.SiLU(), nn.Dropout(0.1), nn.Linear(32, 32), nn.SiLU(), nn.AlphaDropout(0.1), nn.Linear(32, 2)
)
# farspan: model = farspan.distribute(model)
optimizer = torch.optim.RAdam(model.parameters(), lr=1e-2)
criterion = nn.CrossEntropyLoss(reduction="none")
difficulty = torch.ones(64)
history = []
for epoch in range(3):
    sampler = WeightedRandomSampler(difficulty.tolist(), num_samples=48)
    kept_losses = []
    for xb, yb, index in DataLoader(dataset, batch_size=16, sampler=sampler):
        losses = criterion(model(xb), yb)
        difficulty[index] = losses.detach()
        hardest, where = losses.topk(10)
        loss = hardest.mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        kept_losses += hardest.detach().tolist()
        history.append({"kept": sorted(index[where].tolist()), "loss": loss.item()})
    order = difficulty.argsort(descending=True)
    print(
        f"epoch {epoch} kept {sum(kept_losses) / len(kept_losses):.7f} hardest {order[:4].tolist()} {difficulty.max():.6f}"
    )
with open("history.json", "w") as f:
    json.dump(history, f)
model.eval()
print("accuracy", (model(x).argmax(1) == y).float().mean().item())
torch.save({"model": model.state_dict(), "difficulty": difficulty}, "hard.pt")
