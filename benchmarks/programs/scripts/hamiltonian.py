"""The shape of greydanus/hamiltonian-nn: a module that differentiates its own output by autograd.grad inside its forward."""

import numpy as np
import torch
import torch.nn as nn


class MLP(nn.Module):
    def __init__(self, input_dim, hidden_dim, output_dim):
        super().__init__()
        self.linear1 = nn.Linear(input_dim, hidden_dim)
        self.linear2 = nn.Linear(hidden_dim, hidden_dim)
        self.linear3 = nn.Linear(hidden_dim, output_dim, bias=False)
        for layer in (self.linear1, self.linear2, self.linear3):
            nn.init.orthogonal_(layer.weight)

    def forward(self, x):
        h = torch.tanh(self.linear1(x))
        h = torch.tanh(self.linear2(h))
        return self.linear3(h)


class HNN(nn.Module):
    def __init__(self, differentiable_model):
        super().__init__()
        self.differentiable_model = differentiable_model
        self.M = torch.tensor([[0.0, -1.0], [1.0, 0.0]])

    def forward(self, x):
        return self.differentiable_model(x)

    def time_derivative(self, x):
        x = x.detach().requires_grad_()
        energy = self.forward(x)
        (dH,) = torch.autograd.grad(energy.sum(), x, create_graph=True)
        return dH @ self.M


class Wrapped(nn.Module):
    """Both the field and the energy, so that a loop can call it."""

    def __init__(self):
        super().__init__()
        self.hnn = HNN(MLP(2, 24, 1))

    def forward(self, x):
        return self.hnn.time_derivative(x), self.hnn(x)


torch.manual_seed(0)
np.random.seed(0)
t = np.linspace(0, 6, 30)
coords = np.concatenate([np.stack([r * np.cos(t), -r * np.sin(t)], 1) for r in (0.5, 1.0)]).astype(np.float32)
field = np.stack([coords[:, 1], -coords[:, 0]], 1) + np.random.randn(60, 2).astype(np.float32) * 0.05
x, dxdt = torch.tensor(coords), torch.tensor(field, dtype=torch.float32)
model = Wrapped()
# farspan: model = farspan.distribute(model)
optim = torch.optim.Adam(model.parameters(), 5e-3, weight_decay=1e-4)
stats = {"train_loss": [], "energy": []}
for step in range(12):
    ix = torch.randperm(60)[:20]
    dxdt_hat, energy = model(x[ix])
    loss = ((dxdt[ix] - dxdt_hat) ** 2).mean()
    loss.backward()
    optim.step()
    optim.zero_grad()
    stats["train_loss"].append(loss.item())
    stats["energy"].append(energy.std().item())
    if step % 4 == 0:
        print(f"step {step}, train_loss {loss.item():.4e}, energy {stats['energy'][-1]:.6f}")
np.save("stats.npy", np.array([stats["train_loss"], stats["energy"]]))
torch.save(model.state_dict(), "hnn.tar")
