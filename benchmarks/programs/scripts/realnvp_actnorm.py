"""RealNVP/Glow on two moons: ActNorm initialised by the first batch, LU-decomposed mixing, logdet, inverse sampling."""

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F


class ActNorm(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.loc, self.scale = nn.Parameter(torch.zeros(1, n)), nn.Parameter(torch.ones(1, n))
        self.register_buffer("initialized", torch.tensor(0, dtype=torch.uint8))

    def initialize(self, x):
        with torch.no_grad():
            mean, std = x.mean(0, keepdim=True), x.std(0, keepdim=True)
            self.loc.data.copy_(-mean)
            self.scale.data.copy_(1 / (std + 1e-6))

    def forward(self, x):
        if self.initialized.item() == 0:
            self.initialize(x)
            self.initialized.fill_(1)
        return self.scale * (x + self.loc), torch.sum(torch.log(torch.abs(self.scale)))

    def reverse(self, y):
        return y / self.scale - self.loc


class InvLU(nn.Module):
    def __init__(self, n):
        super().__init__()
        q, _ = np.linalg.qr(np.random.randn(n, n))
        p, lower, u = torch.linalg.lu(torch.from_numpy(q.astype(np.float32)))
        s = torch.diag(u)
        self.register_buffer("w_p", p)
        self.register_buffer("u_mask", torch.triu(torch.ones(n, n), 1))
        self.register_buffer("s_sign", torch.sign(s))
        self.register_buffer("l_eye", torch.eye(n))
        self.w_l, self.w_s, self.w_u = nn.Parameter(lower), nn.Parameter(s.abs().log()), nn.Parameter(torch.triu(u, 1))

    def weight(self):
        return (
            self.w_p
            @ (self.w_l * self.u_mask.t() + self.l_eye)
            @ (self.w_u * self.u_mask + torch.diag(self.s_sign * self.w_s.exp()))
        )

    def forward(self, x):
        return F.linear(x, self.weight()), self.w_s.sum()

    def reverse(self, y):
        return F.linear(y, self.weight().inverse())


class Coupling(nn.Module):
    def __init__(self, mask):
        super().__init__()
        self.register_buffer("mask", torch.tensor(mask, dtype=torch.float32))
        self.s = nn.Sequential(nn.Linear(2, 16), nn.LeakyReLU(), nn.Linear(16, 2), nn.Tanh())
        self.t = nn.Sequential(nn.Linear(2, 16), nn.LeakyReLU(), nn.Linear(16, 2))

    def forward(self, x):
        x_ = x * self.mask
        s, t = self.s(x_) * (1 - self.mask), self.t(x_) * (1 - self.mask)
        return x_ + (1 - self.mask) * (x * torch.exp(s) + t), s.sum(1)

    def reverse(self, y):
        y_ = y * self.mask
        s, t = self.s(y_) * (1 - self.mask), self.t(y_) * (1 - self.mask)
        return y_ + (1 - self.mask) * (y - t) * torch.exp(-s)


class Flow(nn.Module):
    def __init__(self):
        super().__init__()
        self.flows = nn.ModuleList()
        for i in range(3):
            self.flows.extend([ActNorm(2), InvLU(2), Coupling([i % 2, 1 - i % 2])])
        self.prior = torch.distributions.MultivariateNormal(torch.zeros(2), torch.eye(2))

    def forward(self, x):
        logdet = x.new_zeros(x.shape[0])
        for f in self.flows:
            x, ld = f(x)
            logdet = logdet + ld
        return x, logdet

    def log_prob(self, x):
        z, logdet = self(x)
        return self.prior.log_prob(z) + logdet

    def sample(self, n):
        z = self.prior.sample((n,))
        for f in reversed(self.flows):
            z = f.reverse(z)
        return z


np.random.seed(1), torch.manual_seed(1)
flow = Flow()
# farspan: flow = farspan.distribute(flow)
opt = torch.optim.Adam([p for p in flow.parameters() if p.requires_grad], lr=1e-3)
for step in range(6):
    th = np.random.rand(64) * np.pi
    x = torch.tensor(np.c_[np.cos(th), np.sin(th)] + 0.1 * np.random.randn(64, 2), dtype=torch.float32)
    loss = -flow.log_prob(x).mean()
    opt.zero_grad()
    loss.backward(retain_graph=True)
    opt.step()
    print(step, loss.item())
with torch.no_grad():
    s = flow.sample(16)
    z, _ = flow(s)
    back = z
    for f in reversed(flow.flows):
        back = f.reverse(back)
    print("round trip", (back - s).abs().max().item(), s.mean(0).tolist())
np.savetxt("samples.csv", s.detach().numpy(), delimiter=",")
