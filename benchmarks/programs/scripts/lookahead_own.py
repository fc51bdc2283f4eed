"""The shape of alphadl/lookahead.pytorch: slow weights in the state, kept beside those of the inner optimizer."""

from collections import defaultdict

import torch
from torch import nn
from torch.optim import Optimizer


class Lookahead(Optimizer):
    def __init__(self, optimizer, k=5, alpha=0.5):
        self.optimizer = optimizer
        self.k = k
        self.alpha = alpha
        self.param_groups = self.optimizer.param_groups
        self.state = defaultdict(dict)
        self.fast_state = self.optimizer.state
        for group in self.param_groups:
            group["counter"] = 0

    def update(self, group):
        for fast in group["params"]:
            param_state = self.state[fast]
            if "slow_param" not in param_state:
                param_state["slow_param"] = torch.zeros_like(fast.data)
                param_state["slow_param"].copy_(fast.data)
            slow = param_state["slow_param"]
            slow += (fast.data - slow) * self.alpha
            fast.data.copy_(slow)

    def update_lookahead(self):
        for group in self.param_groups:
            self.update(group)

    def step(self, closure=None):
        loss = self.optimizer.step(closure)
        for group in self.param_groups:
            if group["counter"] == 0:
                self.update(group)
            group["counter"] += 1
            if group["counter"] >= self.k:
                group["counter"] = 0
        return loss

    def zero_grad(self, set_to_none=True):
        self.optimizer.zero_grad(set_to_none)


class Regressor(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(5, 32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 16), nn.ReLU())
        self.mean = nn.Linear(16, 1)
        self.logvar = nn.Linear(16, 1)

    def forward(self, x):
        h = self.net(x)
        return self.mean(h), self.logvar(h)


torch.manual_seed(8)
x = torch.rand(100, 5) * 2 - 1
y = (x**2).sum(1, keepdim=True) + 0.1 * torch.randn(100, 1)
model = Regressor()
# farspan: model = farspan.distribute(model)
base_opt = torch.optim.Adam(model.parameters(), lr=1e-2, betas=(0.9, 0.999))
opt = Lookahead(base_opt, k=5, alpha=0.5)
nll = nn.GaussianNLLLoss()
for epoch in range(5):
    running = 0.0
    for i in torch.randperm(100).split(25):
        opt.zero_grad()
        mean, logvar = model(x[i])
        loss = nll(mean, y[i], logvar.exp())
        loss.backward()
        opt.step()
        running += loss.item()
    gap = sum((p.data - opt.state[p]["slow_param"]).norm().item() for p in model.parameters())
    print(f"epoch {epoch} nll {running / 4:.6f} fast-slow {gap:.6f} state {len(opt.state)}/{len(opt.fast_state)}")
opt.update_lookahead()
torch.save({"model": model.state_dict(), "inner": base_opt.state_dict()}, "lookahead.pt")
