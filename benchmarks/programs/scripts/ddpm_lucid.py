"""lucidrains' DDPM in small: schedules in buffers, an EMA class with its own modules, cosine schedule, self-conditioning."""

import copy
import math
from random import random

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def cosine_beta_schedule(timesteps, s=0.008):
    x = torch.linspace(0, timesteps, timesteps + 1, dtype=torch.float64)
    ac = torch.cos(((x / timesteps) + s) / (1 + s) * math.pi * 0.5) ** 2
    ac = ac / ac[0]
    return torch.clip(1 - (ac[1:] / ac[:-1]), 0, 0.999)


def extract(a, t, x_shape):
    return a.gather(-1, t).reshape(t.shape[0], *((1,) * (len(x_shape) - 1)))


class SinusoidalPosEmb(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.dim = dim

    def forward(self, x):
        emb = torch.exp(torch.arange(self.dim // 2, device=x.device) * -(math.log(10000) / (self.dim // 2 - 1)))
        emb = x[:, None] * emb[None, :]
        return torch.cat((emb.sin(), emb.cos()), dim=-1)


class Block(nn.Module):
    def __init__(self, i, o):
        super().__init__()
        self.proj, self.norm, self.mlp = nn.Conv2d(i, o, 3, padding=1), nn.GroupNorm(2, o), nn.Linear(16, o * 2)

    def forward(self, x, t):
        scale, shift = self.mlp(F.silu(t))[:, :, None, None].chunk(2, dim=1)
        return F.silu(self.norm(self.proj(x)) * (scale + 1) + shift)


class Unet(nn.Module):
    def __init__(self):
        super().__init__()
        self.time_mlp = nn.Sequential(SinusoidalPosEmb(8), nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 16))
        self.init_conv = nn.Conv2d(2, 8, 3, padding=1)
        self.downs = nn.ModuleList(
            [nn.ModuleList([Block(8, 8), nn.AvgPool2d(2)]), nn.ModuleList([Block(8, 12), nn.Identity()])]
        )
        self.ups = nn.ModuleList(
            [nn.ModuleList([Block(24, 8), nn.Upsample(scale_factor=2)]), nn.ModuleList([Block(16, 8), nn.Identity()])]
        )
        self.final = nn.Conv2d(16, 1, 1)

    def forward(self, x, time, x_self_cond=None):
        x_self_cond = x_self_cond if x_self_cond is not None else torch.zeros_like(x)
        x = self.init_conv(torch.cat((x_self_cond, x), dim=1))
        r, t, h = x.clone(), self.time_mlp(time), []
        for block, down in self.downs:
            x = block(x, t)
            h.append(x)
            x = down(x)
        for block, up in self.ups:
            s = h.pop()
            x = up(block(torch.cat((x, s), dim=1), t))
            if len(h):
                x = F.interpolate(x, size=h[-1].shape[-2:])
        return self.final(torch.cat((x, r), dim=1))


class GaussianDiffusion(nn.Module):
    def __init__(self, model, T=20):
        super().__init__()
        self.model, self.T = model, T
        betas = cosine_beta_schedule(T)
        alphas = 1.0 - betas
        ac = torch.cumprod(alphas, dim=0)
        reg = lambda name, val: self.register_buffer(name, val.to(torch.float32))
        reg("betas", betas)
        reg("alphas_cumprod", ac)
        reg("sqrt_ac", torch.sqrt(ac))
        reg("sqrt_1mac", torch.sqrt(1.0 - ac))
        snr = ac / (1 - ac)
        reg("loss_weight", snr.clamp(max=5) / snr)

    @property
    def device(self):
        return self.betas.device

    @torch.inference_mode()
    def sample(self, n):
        x, x_start = torch.randn(n, 1, 8, 8, device=self.device), None
        for t in reversed(range(self.T)):
            bt = torch.full((n,), t, device=self.device, dtype=torch.long)
            eps = self.model(x, bt, x_start)
            x_start = ((x - extract(self.sqrt_1mac, bt, x.shape) * eps) / extract(self.sqrt_ac, bt, x.shape)).clamp_(
                -1.0, 1.0
            )
            x = extract(self.sqrt_ac, bt, x.shape) * x_start + (0.1 * torch.randn_like(x) if t > 0 else 0.0)
        return (x + 1) * 0.5

    def forward(self, img):
        b = img.shape[0]
        t = torch.randint(0, self.T, (b,), device=img.device).long()
        img = img * 2 - 1
        noise = torch.randn_like(img)
        x = extract(self.sqrt_ac, t, img.shape) * img + extract(self.sqrt_1mac, t, img.shape) * noise
        x_self_cond = None
        if random() < 0.5:
            with torch.no_grad():
                x_self_cond = self.model(x, t)
                x_self_cond.detach_()
        loss = F.mse_loss(self.model(x, t, x_self_cond), noise, reduction="none").flatten(1).mean(1)
        return (loss * extract(self.loss_weight, t, loss.shape)).mean()


class EMA(nn.Module):
    def __init__(self, model, beta=0.9, update_after_step=2, update_every=2):
        super().__init__()
        self.online_model = [model]
        self.ema_model = copy.deepcopy(model)
        self.ema_model.requires_grad_(False)
        self.beta, self.after, self.every = beta, update_after_step, update_every
        self.register_buffer("initted", torch.tensor(False))
        self.register_buffer("step", torch.tensor(0))

    def copy_params(self):
        for (_, a), (_, b) in zip(self.ema_model.named_parameters(), self.online_model[0].named_parameters()):
            a.data.copy_(b.data)

    def update(self):
        step = self.step.item()
        self.step += 1
        if (step % self.every) != 0:
            return
        if step <= self.after:
            return self.copy_params()
        if not self.initted.item():
            self.copy_params()
            self.initted.data.copy_(torch.tensor(True))
        for (_, cur), (_, ma) in zip(self.online_model[0].named_parameters(), self.ema_model.named_parameters()):
            ma.data.lerp_(cur.data, 1.0 - self.beta)
        for (n, cur), (_, ma) in zip(self.online_model[0].named_buffers(), self.ema_model.named_buffers()):
            if ma.is_floating_point():
                ma.data.lerp_(cur.data, 1.0 - self.beta)


torch.manual_seed(0)
diffusion = GaussianDiffusion(Unet())
# farspan: diffusion = farspan.distribute(diffusion)
ema = EMA(diffusion)
opt = torch.optim.Adam(diffusion.parameters(), lr=1e-3, betas=(0.9, 0.99))
data = torch.rand(32, 1, 8, 8)


def cycle(dl):
    while True:
        for d in dl:
            yield d[0]


dl = cycle(DataLoader(TensorDataset(data), batch_size=4, shuffle=True))
for step in range(6):
    total_loss = 0.0
    for _ in range(2):
        loss = diffusion(next(dl)) / 2
        total_loss += loss.item()
        loss.backward()
    nn.utils.clip_grad_norm_(diffusion.parameters(), 1.0)
    opt.step()
    opt.zero_grad()
    ema.update()
    print(f"loss: {total_loss:.8f}", ema.step.item(), ema.initted.item())
    if step % 3 == 2:
        ema.ema_model.eval()
        imgs = ema.ema_model.sample(2)
        print("sample", imgs.mean().item(), imgs.std().item())
        torch.save(
            {"step": step, "model": diffusion.state_dict(), "opt": opt.state_dict(), "ema": ema.state_dict()},
            f"model-{step}.pt",
        )
