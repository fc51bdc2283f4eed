"""facebookresearch/barlowtwins in small: off-diagonal by views, addcdiv LARS with groups, learning rate written to groups, amp scaler."""

import math

import torch
from torch import nn, optim


def off_diagonal(x):
    n, m = x.shape
    assert n == m
    return x.flatten()[:-1].view(n - 1, n + 1)[:, 1:].flatten()


class BarlowTwins(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(12, 16), nn.BatchNorm1d(16), nn.ReLU(inplace=True))
        self.backbone.fc = nn.Identity()
        sizes = [16, 12, 12]
        layers = []
        for i in range(len(sizes) - 2):
            layers += [
                nn.Linear(sizes[i], sizes[i + 1], bias=False),
                nn.BatchNorm1d(sizes[i + 1]),
                nn.ReLU(inplace=True),
            ]
        layers.append(nn.Linear(sizes[-2], sizes[-1], bias=False))
        self.projector = nn.Sequential(*layers)
        self.bn = nn.BatchNorm1d(12, affine=False)

    def forward(self, y1, y2):
        z1, z2 = self.projector(self.backbone(y1)), self.projector(self.backbone(y2))
        c = self.bn(z1).T @ self.bn(z2)
        c.div_(8)
        on_diag = torch.diagonal(c).add_(-1).pow_(2).sum()
        return on_diag + 0.0051 * off_diagonal(c).pow_(2).sum()


class LARS(optim.Optimizer):
    def __init__(self, params, lr, weight_decay=0, momentum=0.9, eta=0.001):
        super().__init__(
            params, dict(lr=lr, weight_decay=weight_decay, momentum=momentum, eta=eta, filtered=lambda p: p.ndim == 1)
        )

    @torch.no_grad()
    def step(self):
        for g in self.param_groups:
            for p in g["params"]:
                dp = p.grad
                if dp is None:
                    continue
                if not g["filtered"](p):
                    dp = dp.add(p, alpha=g["weight_decay"])
                    pn, un, one = torch.norm(p), torch.norm(dp), torch.ones_like(torch.norm(p))
                    q = torch.where(pn > 0.0, torch.where(un > 0, (g["eta"] * pn / un), one), one)
                    dp = dp.mul(q)
                st = self.state[p]
                if "mu" not in st:
                    st["mu"] = torch.zeros_like(p)
                mu = st["mu"]
                mu.mul_(g["momentum"]).add_(dp)
                p.add_(mu, alpha=-g["lr"])


torch.manual_seed(8)
model = BarlowTwins()
# farspan: model = farspan.distribute(model)
pw, pb = [], []
for p in model.parameters():
    (pb if p.ndim == 1 else pw).append(p)
optimizer = LARS([{"params": pw}, {"params": pb}], lr=0, weight_decay=1e-6)
scaler = torch.amp.GradScaler("cpu", enabled=False)
for step in range(8):
    lr = step / 3 if step < 3 else 0.5 * (1 + math.cos(math.pi * (step - 3) / 5)) + 1e-3
    optimizer.param_groups[0]["lr"], optimizer.param_groups[1]["lr"] = lr * 0.2, lr * 0.0048
    y = torch.randn(8, 12)
    optimizer.zero_grad()
    with torch.amp.autocast("cpu", enabled=False):
        loss = model.forward(y + 0.1 * torch.randn(8, 12), y + 0.1 * torch.randn(8, 12))
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    print(step, loss.item(), lr)
torch.save(dict(epoch=1, model=model.state_dict()), "checkpoint.pth")
