"""The shape of timm fine-tuning: create_optimizer_v2 with layer-wise learning rates and Lookahead around AdamW."""

import torch
import torch.nn.functional as F
from timm.optim import create_optimizer_v2
from torch import nn


def conv(cin, cout):
    return nn.Sequential(nn.Conv2d(cin, cout, 3, padding=1, bias=False), nn.BatchNorm2d(cout), nn.SiLU())


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = conv(1, 8)
        self.stage1 = nn.Sequential(conv(8, 8), nn.MaxPool2d(2))
        self.stage2 = nn.Sequential(conv(8, 16), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.2))
        self.head = nn.Linear(16, 4)

    def forward(self, x):
        return self.head(self.stage2(self.stage1(self.stem(x))))


torch.manual_seed(7)
x = torch.rand(64, 1, 12, 12)
y = (x[:, 0, :6].mean((1, 2)) > 0.5).long() * 2 + (x[:, 0, :, :6].mean((1, 2)) > 0.5).long()
model = Net()
# farspan: model = farspan.distribute(model)
groups = [
    {"params": list(model.stem.parameters()), "lr": 1e-3, "weight_decay": 0.0},
    {"params": list(model.stage1.parameters()) + list(model.stage2.parameters()), "lr": 3e-3},
    {"params": list(model.head.parameters()), "lr": 1e-2},
]
optimizer = create_optimizer_v2(groups, opt="lookahead_adamw", lr=3e-3, weight_decay=0.05)
print(type(optimizer).__name__, [group["lr"] for group in optimizer.param_groups])

for step in range(18):
    pick = torch.randint(0, 64, (16,))
    loss = F.cross_entropy(model(x[pick]), y[pick])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 3 == 0:
        print(f"{step:3d} {loss.item():.7f}")
if hasattr(optimizer, "sync_lookahead"):
    optimizer.sync_lookahead()
model.eval()
with torch.no_grad():
    print("accuracy", (model(x).argmax(1) == y).float().mean().item())
torch.save(model.state_dict(), "model.pt")
