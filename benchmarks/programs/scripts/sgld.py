"""Stochastic gradient Langevin dynamics: the optimizer draws noise in its step; an ensemble of samples predicts."""

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.optimizer import Optimizer


class SGLD(Optimizer):
    def __init__(self, params, lr=1e-3, weight_decay=0.0):
        super().__init__(params, dict(lr=lr, weight_decay=weight_decay))

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                d_p = p.grad
                if group["weight_decay"] != 0:
                    d_p = d_p.add(p, alpha=group["weight_decay"])
                noise = torch.randn_like(p) * (2 * group["lr"]) ** 0.5 * 0.1
                p.add_(d_p, alpha=-group["lr"]).add_(noise)


torch.manual_seed(0)
np.random.seed(0)
x = np.linspace(-2, 2, 80).astype(np.float32)[:, None]
y = np.sin(2 * x) + np.random.normal(0, 0.1, x.shape).astype(np.float32)
X, Y = torch.from_numpy(x), torch.from_numpy(y)
model = nn.Sequential(nn.Linear(1, 24), nn.Tanh(), nn.Linear(24, 24), nn.Tanh(), nn.Linear(24, 1))
# farspan: model = farspan.distribute(model)
optimizer = SGLD(model.parameters(), lr=5e-3, weight_decay=1e-3)
samples = []
for it in range(40):
    idx = torch.from_numpy(np.random.choice(80, 20, replace=False))
    loss = F.mse_loss(model(X[idx]), Y[idx])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if it % 8 == 0:
        print(f"it {it} loss {loss.item():.6f}")
    if it >= 20 and it % 5 == 0:
        with torch.no_grad():
            samples.append(model(X).numpy())
ensemble = np.stack(samples)
print("predictive std", float(ensemble.std(0).mean()), "rmse", float(np.sqrt(((ensemble.mean(0) - y) ** 2).mean())))
np.save("samples.npy", ensemble)
torch.save(model.state_dict(), "sgld.pt")
