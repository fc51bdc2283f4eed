"""The shape of a DDPM script: a small U-Net with time embeddings and dropout, noise and timesteps drawn, samples at the end."""

import math

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn


def timestep_embedding(t, dim):
    freqs = torch.exp(-math.log(10000) * torch.arange(dim // 2) / (dim // 2))
    args = t[:, None].float() * freqs[None]
    return torch.cat([args.cos(), args.sin()], dim=-1)


class ResBlock(nn.Module):
    def __init__(self, cin, cout, emb):
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(2, cin), nn.Conv2d(cin, cout, 3, padding=1)
        self.emb = nn.Linear(emb, cout)
        self.norm2, self.conv2 = nn.GroupNorm(2, cout), nn.Conv2d(cout, cout, 3, padding=1)
        self.drop = nn.Dropout(0.1)
        self.skip = nn.Conv2d(cin, cout, 1) if cin != cout else nn.Identity()

    def forward(self, x, emb):
        h = self.conv1(F.silu(self.norm1(x)))
        h = h + self.emb(F.silu(emb))[:, :, None, None]
        h = self.conv2(self.drop(F.silu(self.norm2(h))))
        return self.skip(x) + h


class UNet(nn.Module):
    def __init__(self, ch=8, emb=16):
        super().__init__()
        self.emb = emb
        self.time = nn.Sequential(nn.Linear(emb, emb), nn.SiLU(), nn.Linear(emb, emb))
        self.inp = nn.Conv2d(1, ch, 3, padding=1)
        self.down1, self.down2 = ResBlock(ch, ch, emb), ResBlock(ch, 2 * ch, emb)
        self.mid = ResBlock(2 * ch, 2 * ch, emb)
        self.up1, self.up2 = ResBlock(4 * ch, ch, emb), ResBlock(2 * ch, ch, emb)
        self.out = nn.Conv2d(ch, 1, 3, padding=1)

    def forward(self, x, t):
        emb = self.time(timestep_embedding(t, self.emb))
        h0 = self.inp(x)
        h1 = self.down1(h0, emb)
        h2 = self.down2(F.avg_pool2d(h1, 2), emb)
        h = self.mid(h2, emb)
        h = self.up1(torch.cat([h, h2], 1), emb)
        h = self.up2(torch.cat([F.interpolate(h, scale_factor=2), h1], 1), emb)
        return self.out(h)


torch.manual_seed(33)
T = 20
betas = torch.linspace(1e-3, 0.2, T)
alphas_bar = torch.cumprod(1 - betas, 0)
data = torch.zeros(32, 1, 8, 8)
for n in range(32):
    data[n, 0, n % 6 : n % 6 + 3, (n // 6) % 6 : (n // 6) % 6 + 3] = 1.0
model = UNet()
# farspan: model = farspan.distribute(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
losses = []
for step in range(10):
    x0 = data[torch.randint(0, 32, (8,))] * 2 - 1
    t = torch.randint(0, T, (8,))
    noise = torch.randn_like(x0)
    ab = alphas_bar[t].view(-1, 1, 1, 1)
    loss = F.mse_loss(model(ab.sqrt() * x0 + (1 - ab).sqrt() * noise, t), noise)
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    losses.append(loss.item())
    print(f"step {step} loss {loss.item():.7f}")
model.eval()
x = torch.randn(2, 1, 8, 8)
with torch.no_grad():
    for i in reversed(range(0, T, 4)):
        eps = model(x, torch.full((2,), i))
        x = (x - betas[i] / (1 - alphas_bar[i]).sqrt() * eps) / (1 - betas[i]).sqrt()
        if i > 0:
            x = x + betas[i].sqrt() * torch.randn_like(x)
print("sample mean", x.mean().item(), "std", x.std().item())
np.save("samples.npy", x.numpy())
np.savetxt("losses.csv", np.array(losses), delimiter=",")
torch.save(model.state_dict(), "ddpm.pt")
