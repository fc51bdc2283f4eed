"""SAM of pytorch_optimizer around SGD, in its form with two backwards, and once with a closure."""

import torch
import torch.nn.functional as F
from pytorch_optimizer import SAM
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(5)
x = torch.randn(64, 10)
y = (x[:, 0] * x[:, 1] > 0).long()
loader = DataLoader(TensorDataset(x, y), batch_size=16, shuffle=True, drop_last=True)
model = nn.Sequential(
    nn.Linear(10, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 2)
)
# farspan: model = farspan.distribute(model)
optimizer = SAM(model.parameters(), torch.optim.SGD, rho=0.05, lr=0.1, momentum=0.9)

for epoch in range(3):
    for xb, yb in loader:
        loss = F.cross_entropy(model(xb), yb)
        loss.backward()
        optimizer.first_step(zero_grad=True)
        F.cross_entropy(model(xb), yb).backward()
        optimizer.second_step(zero_grad=True)
    print(f"epoch {epoch} loss {loss.item():.7f}")

for xb, yb in loader:

    def closure():
        loss = F.cross_entropy(model(xb), yb)  # noqa: B023
        loss.backward()
        return loss

    loss = F.cross_entropy(model(xb), yb)
    loss.backward()
    optimizer.step(closure)
    optimizer.zero_grad()
print(f"closure loss {loss.item():.7f}")
model.eval()
with torch.no_grad():
    print("accuracy", (model(x).argmax(1) == y).float().mean().item())
torch.save(model.state_dict(), "sam.pt")
