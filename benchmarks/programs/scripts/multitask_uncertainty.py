"""Several tasks with learned weights (Kendall et al.): log variances outside the model, a shared trunk, several metrics."""

import torch
import torch.nn as nn
import torch.nn.functional as F


class MultiTaskNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 32), nn.ReLU())
        self.depth = nn.Linear(32, 1)
        self.segment = nn.Sequential(nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 4))
        self.normal = nn.Linear(32, 3)

    def forward(self, x):
        h = self.trunk(x)
        return {"depth": self.depth(h), "segment": self.segment(h), "normal": F.normalize(self.normal(h), dim=1)}


class MultiTaskLoss(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.log_vars = nn.Parameter(torch.zeros(n))

    def forward(self, losses):
        return sum(torch.exp(-v) * loss + v for v, loss in zip(self.log_vars, losses))


torch.manual_seed(60)
x = torch.randn(80, 10)
depth = x[:, :1] ** 2
segment = x[:, :4].argmax(1)
normal = F.normalize(x[:, 4:7], dim=1)
model = MultiTaskNet()
criterion = MultiTaskLoss(3)
# farspan: model, criterion = farspan.distribute(nn.ModuleList([model, criterion]))
optimizer = torch.optim.Adam(
    [
        {"params": model.parameters(), "lr": 5e-3},
        {"params": criterion.parameters(), "lr": 2e-2, "weight_decay": 0.0},
    ]
)
for epoch in range(4):
    sums = [0.0, 0.0, 0.0]
    for i in torch.randperm(80).split(16):
        out = model(x[i])
        losses = [
            F.smooth_l1_loss(out["depth"], depth[i]),
            F.cross_entropy(out["segment"], segment[i]),
            1 - (out["normal"] * normal[i]).sum(1).mean(),
        ]
        total = criterion(losses)
        optimizer.zero_grad()
        total.backward()
        optimizer.step()
        for k, loss in enumerate(losses):
            sums[k] += loss.item() / 5
    weights = torch.exp(-criterion.log_vars).tolist()
    print(
        f"epoch {epoch} depth {sums[0]:.6f} segment {sums[1]:.6f} normal {sums[2]:.6f} weights",
        *(f"{w:.6f}" for w in weights),
    )
torch.save({"model": model.state_dict(), "log_vars": criterion.log_vars.data}, "multitask.pt")
