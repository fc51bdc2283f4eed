"""First-order MAML on sine waves: torch.func.functional_call with a dictionary of fast weights, as in many rewrites."""

import math

import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call

torch.manual_seed(30)


class SineModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.hidden1 = nn.Linear(1, 24)
        self.hidden2 = nn.Linear(24, 24)
        self.out = nn.Linear(24, 1)

    def forward(self, x):
        return self.out(F.relu(self.hidden2(F.relu(self.hidden1(x)))))


def sample_task(k=8):
    amplitude, phase = 0.1 + 4.9 * torch.rand(()), math.pi * torch.rand(())
    x = torch.rand(2 * k, 1) * 10 - 5
    y = amplitude * torch.sin(x + phase)
    return (x[:k], y[:k]), (x[k:], y[k:])


def adapt(model, params, x, y, inner_lr=0.01, steps=2):
    for _ in range(steps):
        loss = F.mse_loss(functional_call(model, params, (x,)), y)
        grads = torch.autograd.grad(loss, list(params.values()))  # first order: no create_graph
        params = {name: p - inner_lr * g for (name, p), g in zip(params.items(), grads)}
    return params


model = SineModel()
# farspan: model = farspan.distribute(model)
meta_optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
for iteration in range(6):
    meta_loss = 0.0
    meta_optimizer.zero_grad()
    for _ in range(3):
        (xs, ys), (xq, yq) = sample_task()
        fast = adapt(model, dict(model.named_parameters()), xs, ys)
        loss = F.mse_loss(functional_call(model, fast, (xq,)), yq) / 3
        loss.backward()
        meta_loss += loss.item()
    meta_optimizer.step()
    print(f"iteration {iteration} meta loss {meta_loss:.7f}")
(xs, ys), (xq, yq) = sample_task()
before = F.mse_loss(model(xq), yq).item()
fast = adapt(model, dict(model.named_parameters()), xs, ys, steps=4)
after = F.mse_loss(functional_call(model, fast, (xq,)), yq).item()
print(f"a new task: before {before:.7f} after {after:.7f}")
torch.save(model.state_dict(), "maml.pt")
