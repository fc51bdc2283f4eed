"""SimCLR: two views concatenated, masked NT-Xent with in-place fill, LARS written by hand with exclusion by name, kNN check."""

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.optim.optimizer import Optimizer


class LARS(Optimizer):
    def __init__(self, named, lr, momentum=0.9, weight_decay=1e-4, eta=1e-2, exclude=("bn", "bias")):
        named = list(named)
        self.names = {id(p): n for n, p in named}
        self.exclude = exclude
        super().__init__([p for _, p in named], dict(lr=lr, momentum=momentum, weight_decay=weight_decay, eta=eta))

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                g = p.grad
                skip = any(e in self.names[id(p)] for e in self.exclude)
                trust = 1.0
                if not skip:
                    g = g.add(p, alpha=group["weight_decay"])
                    w_norm, g_norm = torch.norm(p), torch.norm(g)
                    trust = torch.where(
                        w_norm > 0, torch.where(g_norm > 0, group["eta"] * w_norm / g_norm, 1.0), 1.0
                    ).item()
                st = self.state[p]
                if "momentum_buffer" not in st:
                    st["momentum_buffer"] = torch.zeros_like(p)
                st["momentum_buffer"].mul_(group["momentum"]).add_(g, alpha=trust * group["lr"])
                p.sub_(st["momentum_buffer"])


class SimCLR(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential()
        self.encoder.add_module("conv1", nn.Conv2d(1, 8, 3, padding=1, bias=False))
        self.encoder.add_module("bn1", nn.BatchNorm2d(8))
        self.encoder.add_module("relu", nn.ReLU(inplace=True))
        self.encoder.add_module("pool", nn.AdaptiveAvgPool2d(2))
        self.encoder.add_module("flat", nn.Flatten())
        self.projector = nn.Sequential(nn.Linear(32, 16, bias=False), nn.ReLU(), nn.Linear(16, 8, bias=False))

    def forward(self, x_i, x_j):
        h_i, h_j = self.encoder(x_i), self.encoder(x_j)
        return h_i, h_j, self.projector(h_i), self.projector(h_j)


class NT_Xent(nn.Module):
    def __init__(self, n, temperature):
        super().__init__()
        self.n, self.t = n, temperature
        mask = torch.ones((2 * n, 2 * n), dtype=bool).fill_diagonal_(0)
        for i in range(n):
            mask[i, n + i] = 0
            mask[n + i, i] = 0
        self.mask = mask
        self.criterion, self.sim = nn.CrossEntropyLoss(reduction="sum"), nn.CosineSimilarity(dim=2)

    def forward(self, z_i, z_j):
        N = 2 * self.n
        z = torch.cat((z_i, z_j), dim=0)
        sim = self.sim(z.unsqueeze(1), z.unsqueeze(0)) / self.t
        pos = torch.cat((torch.diag(sim, self.n), torch.diag(sim, -self.n)), dim=0).reshape(N, 1)
        neg = sim[self.mask].reshape(N, -1)
        return self.criterion(torch.cat((pos, neg), dim=1), torch.zeros(N).long()) / N


torch.manual_seed(9)
model = SimCLR()
# farspan: model = farspan.distribute(model)
criterion = NT_Xent(8, 0.5)
opt = LARS(model.named_parameters(), lr=0.3)
sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, 6, eta_min=0)
base, labels = torch.rand(24, 1, 8, 8), torch.arange(24) % 3
base += labels.view(-1, 1, 1, 1) * 0.3
aug = lambda x: (x + 0.1 * torch.randn_like(x)).flip(-1) if torch.rand(()) < 0.5 else x + 0.1 * torch.randn_like(x)
for epoch in range(2):
    total = 0
    for i in range(0, 24, 8):
        x = base[i : i + 8]
        opt.zero_grad()
        h_i, h_j, z_i, z_j = model(aug(x), aug(x))
        loss = criterion(z_i, z_j)
        loss.backward()
        opt.step()
        total += loss.item()
    sched.step()
    print(epoch, total / 3, sched.get_last_lr())
model.eval()
with torch.no_grad():
    h, *_ = model(base, base)
    f = F.normalize(h, dim=1)
    d, ind = torch.mm(f, f.t()).fill_diagonal_(-1).topk(3, dim=-1, largest=True, sorted=True)
    votes = torch.zeros(24, 3).scatter_add_(1, labels[ind], (d / 0.1).exp())
    print("knn", (votes.argmax(1) == labels).float().mean().item(), d.sum().item())
torch.save(model.encoder.state_dict(), "encoder.pth")
