"""An energy-based model: Langevin sampling by input gradients with frozen weights, a replay buffer, clipped noise, contrastive divergence; then VAT."""

import random

import numpy as np
import torch
import torch.nn as nn


class Swish(nn.Module):
    def forward(self, x):
        return x * torch.sigmoid(x)


class Sampler:
    def __init__(self, model, shape, n):
        self.model, self.shape, self.n = model, shape, n
        self.examples = [torch.rand((1,) + shape) * 2 - 1 for _ in range(n)]

    def sample_new(self, steps=4, step_size=1.0):
        n_new = np.random.binomial(self.n, 0.1)
        rand = torch.rand((n_new,) + self.shape) * 2 - 1
        old = torch.cat(random.choices(self.examples, k=self.n - n_new), dim=0)
        inp = torch.cat([rand, old], dim=0).detach()
        out = self.generate(self.model, inp, steps, step_size)
        self.examples = (list(out.chunk(self.n, dim=0)) + self.examples)[: 4 * self.n]
        return out

    @staticmethod
    def generate(model, inp, steps, step_size, return_each=False):
        was = model.training
        model.eval()
        for p in model.parameters():
            p.requires_grad = False
        inp.requires_grad = True
        had = torch.is_grad_enabled()
        torch.set_grad_enabled(True)
        noise, each = torch.randn(inp.shape), []
        for _ in range(steps):
            noise.normal_(0, 0.005)
            inp.data.add_(noise.data)
            inp.data.clamp_(min=-1.0, max=1.0)
            out = -model(inp)
            out.sum().backward()
            inp.grad.data.clamp_(-0.03, 0.03)
            inp.data.add_(-step_size * inp.grad.data)
            inp.grad.detach_()
            inp.grad.zero_()
            inp.data.clamp_(min=-1.0, max=1.0)
            if return_each:
                each.append(inp.clone().detach())
        for p in model.parameters():
            p.requires_grad = True
        model.train(was)
        torch.set_grad_enabled(had)
        return torch.stack(each, dim=0) if return_each else inp.detach()


random.seed(0), np.random.seed(0), torch.manual_seed(0)
cnn = nn.Sequential(
    nn.Conv2d(1, 6, 5, 2, 4),
    Swish(),
    nn.Conv2d(6, 8, 3, 2, 1),
    Swish(),
    nn.Flatten(),
    nn.Linear(72, 8),
    Swish(),
    nn.Linear(8, 1),
)
# farspan: cnn = farspan.distribute(cnn)
sampler = Sampler(cnn, (1, 6, 6), 6)
opt = torch.optim.Adam(cnn.parameters(), lr=1e-3, betas=(0.0, 0.999))
for it in range(4):
    real = (torch.rand(6, 1, 6, 6) > 0.5).float() * 2 - 1
    real.add_(torch.randn_like(real) * 0.005).clamp_(min=-1.0, max=1.0)
    fake = sampler.sample_new()
    opt.zero_grad()
    real_out, fake_out = cnn(torch.cat([real, fake], dim=0)).chunk(2, dim=0)
    reg = 0.1 * (real_out**2 + fake_out**2).mean()
    cdiv = fake_out.mean() - real_out.mean()
    (reg + cdiv).backward()
    torch.nn.utils.clip_grad_norm_(cnn.parameters(), 0.1)
    opt.step()
    print(it, reg.item(), cdiv.item(), fake.abs().mean().item(), len(sampler.examples))
traj = Sampler.generate(cnn, torch.rand(2, 1, 6, 6) * 2 - 1, 3, 1.0, return_each=True)
np.save("traj.npy", traj.numpy())
x = torch.rand(4, 1, 6, 6)
d = torch.randn_like(x)
for _ in range(2):
    d = d / (d.flatten(1).norm(dim=1).view(-1, 1, 1, 1) + 1e-8)
    d.requires_grad_()
    with torch.no_grad():
        ref = cnn(x).sigmoid()
    dist = nn.functional.binary_cross_entropy(cnn(x + 0.1 * d).sigmoid(), ref)
    (g,) = torch.autograd.grad(dist, d)
    d = g.detach()
print(dist.item(), d.abs().sum().item())
