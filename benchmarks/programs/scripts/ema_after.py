"""The shape of facebookresearch/DiT: an average deep-copied from the wrapped model, mul_ and add_, both in the checkpoint."""

from collections import OrderedDict
from copy import deepcopy

import torch
from torch import nn


@torch.no_grad()
def update_ema(ema_model, model, decay=0.9):
    ema_params = OrderedDict(ema_model.named_parameters())
    model_params = OrderedDict(model.named_parameters())
    for name, param in model_params.items():
        ema_params[name].mul_(decay).add_(param.data, alpha=1 - decay)


def requires_grad(model, flag=True):
    for p in model.parameters():
        p.requires_grad = flag


class DiTBlock(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.norm1 = nn.LayerNorm(dim, elementwise_affine=False)
        self.attn = nn.MultiheadAttention(dim, 2, batch_first=True)
        self.norm2 = nn.LayerNorm(dim, elementwise_affine=False)
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(approximate="tanh"), nn.Linear(2 * dim, dim))
        self.ada = nn.Sequential(nn.SiLU(), nn.Linear(dim, 6 * dim))

    def forward(self, x, c):
        s1, b1, g1, s2, b2, g2 = self.ada(c)[:, None].chunk(6, dim=-1)
        h = self.norm1(x) * (1 + s1) + b1
        x = x + g1 * self.attn(h, h, h, need_weights=False)[0]
        return x + g2 * self.mlp(self.norm2(x) * (1 + s2) + b2)


class DiT(nn.Module):
    def __init__(self, dim=16, depth=3, classes=3):
        super().__init__()
        self.x_embedder = nn.Linear(2, dim)
        self.t_embedder = nn.Sequential(nn.Linear(1, dim), nn.SiLU(), nn.Linear(dim, dim))
        self.y_embedder = nn.Embedding(classes + 1, dim)
        self.blocks = nn.ModuleList(DiTBlock(dim) for _ in range(depth))
        self.final = nn.Linear(dim, 2)
        self.classes = classes
        for block in self.blocks:
            nn.init.constant_(block.ada[-1].weight, 0)
            nn.init.constant_(block.ada[-1].bias, 0)

    def forward(self, x, t, y):
        if self.training:
            drop = torch.rand(y.shape[0]) < 0.1
            y = torch.where(drop, self.classes, y)
        c = self.t_embedder(t[:, None]) + self.y_embedder(y)
        x = self.x_embedder(x)
        for block in self.blocks:
            x = block(x, c)
        return self.final(x)


torch.manual_seed(0)
model = DiT()
# farspan: model = farspan.distribute(model)
ema = deepcopy(model)
requires_grad(ema, False)
opt = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0)
update_ema(ema, model, decay=0)
model.train()
ema.eval()
running_loss, log_steps = 0.0, 0
for step in range(1, 13):
    y = torch.randint(0, 3, (8,))
    x = torch.randn(8, 5, 2) * 0.1 + y[:, None, None]
    t = torch.rand(8)
    noise = torch.randn_like(x)
    x_t = (1 - t[:, None, None]) * x + t[:, None, None] * noise
    loss = (model(x_t, t, y) - (noise - x)).pow(2).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
    update_ema(ema, model)
    running_loss += loss.item()
    log_steps += 1
    if step % 4 == 0:
        print(f"(step={step:07d}) Train Loss: {running_loss / log_steps:.6f}")
        running_loss, log_steps = 0.0, 0
        torch.save({"model": model.state_dict(), "ema": ema.state_dict(), "opt": opt.state_dict()}, f"{step:07d}.pt")
with torch.no_grad():
    x = torch.randn(3, 5, 2)
    for i in range(4, 0, -1):
        x = x - ema(x, torch.full((3,), i / 4), torch.arange(3)) / 4
print("samples", x.mean((1, 2)).tolist())
