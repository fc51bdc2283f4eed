"""Stochastic Polyak steps (SPS): the step size is the loss over the squared norm of all gradients, from a closure."""

import torch
import torch.nn.functional as F
from torch import nn


class Sps(torch.optim.Optimizer):
    def __init__(self, params, c=0.5, eta_max=1.0, eps=1e-8):
        params = list(params)
        super().__init__(params, {})
        self.params, self.c, self.eta_max, self.eps = params, c, eta_max, eps
        self.state["step"] = 0
        self.state["step_size"] = 1.0

    def step(self, closure=None):
        loss = closure()
        grad_norm = 0.0
        for p in self.params:
            if p.grad is not None:
                grad_norm = grad_norm + torch.sum(p.grad * p.grad)
        grad_norm = torch.sqrt(grad_norm)
        step_size = (loss / (self.c * grad_norm**2 + self.eps)).detach()
        step_size = min(float(step_size), self.eta_max)
        with torch.no_grad():
            for p in self.params:
                if p.grad is not None:
                    p -= step_size * p.grad
        self.state["step"] += 1
        self.state["step_size"] = step_size
        return loss


torch.manual_seed(21)
x = torch.randn(90, 12)
w = torch.randn(12, 3)
y = (x @ w).argmax(1)
model = nn.Sequential(nn.Linear(12, 30), nn.ReLU(), nn.Dropout(0.1), nn.Linear(30, 30), nn.ReLU(), nn.Linear(30, 3))
# farspan: model = farspan.distribute(model)
opt = Sps(model.parameters())
for epoch in range(4):
    for i in torch.randperm(90).split(30):

        def closure():
            opt.zero_grad()
            loss = F.cross_entropy(model(x[i]), y[i])  # noqa: B023
            loss.backward()
            return loss

        loss = opt.step(closure)
        print(f"epoch {epoch} step {opt.state['step']} loss {loss.item():.7f} eta {opt.state['step_size']:.7f}")
torch.save(model.state_dict(), "sps.pt")
