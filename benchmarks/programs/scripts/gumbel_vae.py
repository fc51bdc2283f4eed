"""A categorical VAE with gumbel softmax: an annealed temperature, hard samples, code usage counted."""

import math

import torch
import torch.nn.functional as F
from torch import nn


class GumbelVAE(nn.Module):
    def __init__(self, n=4, k=5):
        super().__init__()
        self.n, self.k = n, k
        self.enc = nn.Sequential(nn.Linear(36, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, n * k))
        self.dec = nn.Sequential(nn.Linear(n * k, 32), nn.ReLU(), nn.Linear(32, 36))

    def forward(self, x, temperature, hard=False):
        logits = self.enc(x.view(-1, 36)).view(-1, self.n, self.k)
        z = F.gumbel_softmax(logits, tau=temperature, hard=hard, dim=-1)
        return self.dec(z.view(-1, self.n * self.k)), logits, z


torch.manual_seed(81)
x = (torch.rand(96, 6, 6) < torch.rand(96, 1, 1)).float()
model = GumbelVAE()
# farspan: model = farspan.distribute(model)
optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
temp, step = 1.0, 0
usage = torch.zeros(4, 5)
for epoch in range(3):
    for batch in x[torch.randperm(96)].split(24):
        recon, logits, z = model(batch, temp, hard=step % 2 == 1)
        bce = F.binary_cross_entropy_with_logits(recon, batch.view(-1, 36), reduction="sum") / len(batch)
        q = logits.softmax(-1)
        kl = (q * (q.clamp_min(1e-12).log() - math.log(1 / 5))).sum((1, 2)).mean()
        loss = bce + kl
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        usage += F.one_hot(z.detach().argmax(-1), 5).sum(0)
        step += 1
        if step % 3 == 0:
            temp = max(temp * math.exp(-0.03 * step), 0.5)
    print(f"epoch {epoch} loss {loss.item():.6f} bce {bce.item():.6f} kl {kl.item():.7f} temp {temp:.4f}")
print("usage", usage.long().tolist())
torch.save({"model": model.state_dict(), "usage": usage, "temp": temp}, "gumbel.pt")
