"""rosinality's stylegan2 in small: mapping network, modulated convolutions, noise, w_avg buffer, accumulate, lazy parts."""

import copy
import math
import random

import torch
from torch import nn
from torch.nn import functional as F


class EqualLinear(nn.Module):
    def __init__(self, i, o, lr_mul=1.0, bias_init=0.0):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(o, i).div_(lr_mul))
        self.bias = nn.Parameter(torch.zeros(o).fill_(bias_init))
        self.scale, self.lr_mul = (1 / math.sqrt(i)) * lr_mul, lr_mul

    def forward(self, x):
        return F.linear(x, self.weight * self.scale, self.bias * self.lr_mul)


class ModConv(nn.Module):
    def __init__(self, i, o, style):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(1, o, i, 3, 3))
        self.modulation = EqualLinear(style, i, bias_init=1)
        self.noise = nn.Parameter(torch.zeros(1))

    def forward(self, x, s, noise=None):
        b, c, h, w = x.shape
        weight = self.weight * self.modulation(s).view(b, 1, c, 1, 1) / math.sqrt(c * 9)
        weight = weight * torch.rsqrt(weight.pow(2).sum([2, 3, 4]) + 1e-8).view(b, -1, 1, 1, 1)
        out = F.conv2d(x.view(1, b * c, h, w), weight.view(-1, c, 3, 3), padding=1, groups=b).view(b, -1, h, w)
        if noise is None:
            noise = out.new_empty(b, 1, h, w).normal_()
        return F.leaky_relu(out + self.noise * noise, 0.2)


class Generator(nn.Module):
    def __init__(self):
        super().__init__()
        self.style = nn.Sequential(EqualLinear(8, 8, 0.01), nn.LeakyReLU(0.2), EqualLinear(8, 8, 0.01))
        self.input = nn.Parameter(torch.randn(1, 8, 4, 4))
        self.convs = nn.ModuleList([ModConv(8, 8, 8), ModConv(8, 6, 8)])
        self.to_rgb = nn.Conv2d(6, 1, 1)
        self.noises = nn.Module()
        self.noises.register_buffer("noise_0", torch.randn(1, 1, 4, 4))
        self.noises.register_buffer("noise_1", torch.randn(1, 1, 8, 8))
        self.register_buffer("w_avg", torch.zeros(8))

    def forward(self, styles, randomize_noise=True, truncation=1.0, inject_index=None):
        styles = [self.style(F.normalize(s)) for s in styles]
        if self.training:
            self.w_avg.copy_(styles[0].detach().mean(0).lerp(self.w_avg, 0.995))
        if truncation < 1:
            styles = [self.w_avg + truncation * (s - self.w_avg) for s in styles]
        if len(styles) < 2:
            latent = styles[0].unsqueeze(1).repeat(1, 2, 1)
        else:
            inject_index = inject_index or random.randint(1, 1)
            latent = torch.stack([styles[0], styles[1]], 1)
        noise = [None] * 2 if randomize_noise else [getattr(self.noises, f"noise_{i}") for i in range(2)]
        out = self.input.repeat(latent.shape[0], 1, 1, 1)
        for i, conv in enumerate(self.convs):
            out = conv(out, latent[:, i], noise[i])
            if i == 0:
                out = F.interpolate(out, scale_factor=2)
        return self.to_rgb(out), latent


class Discriminator(nn.Module):
    def __init__(self):
        super().__init__()
        self.convs = nn.Sequential(nn.Conv2d(1, 6, 3, padding=1), nn.LeakyReLU(0.2), nn.AvgPool2d(2))
        self.final_conv = nn.Conv2d(7, 6, 3, padding=1)
        self.final_linear = nn.Sequential(EqualLinear(6 * 16, 8), nn.LeakyReLU(0.2), EqualLinear(8, 1))

    def forward(self, x):
        out = self.convs(x)
        b, c, h, w = out.shape
        g = min(b, 4)
        std = torch.sqrt(out.view(g, -1, 1, c, h, w).var(0, unbiased=False) + 1e-8)
        std = std.mean([2, 3, 4], keepdim=True).squeeze(2).repeat(g, 1, h, w)
        out = self.final_conv(torch.cat([out, std], 1))
        return self.final_linear(F.leaky_relu(out, 0.2).view(b, -1))


def accumulate(model1, model2, decay=0.9):
    par1, par2 = dict(model1.named_parameters()), dict(model2.named_parameters())
    for k in par1.keys():
        par1[k].data.mul_(decay).add_(par2[k].data, alpha=1 - decay)


def requires_grad(model, flag=True):
    for p in model.parameters():
        p.requires_grad = flag


torch.manual_seed(5), random.seed(5)
generator, discriminator = Generator(), Discriminator()
g_ema = copy.deepcopy(generator)
g_ema.eval()
accumulate(g_ema, generator, 0)
# farspan: generator, discriminator = farspan.distribute(nn.ModuleList([generator, discriminator]))
g_optim = torch.optim.Adam(generator.parameters(), lr=2e-3, betas=(0.0, 0.99))
d_optim = torch.optim.Adam(discriminator.parameters(), lr=2e-3, betas=(0.0, 0.99))
sample_z = torch.randn(2, 8)
for i in range(5):
    real = torch.rand(4, 1, 8, 8)
    requires_grad(generator, False)
    requires_grad(discriminator, True)
    noise = list(torch.randn(2, 4, 8).unbind(0)) if random.random() < 0.9 else [torch.randn(4, 8)]
    fake, _ = generator(noise)
    real_pred, fake_pred = discriminator(real), discriminator(fake)
    d_loss = F.softplus(-real_pred).mean() + F.softplus(fake_pred).mean()
    discriminator.zero_grad()
    d_loss.backward()
    d_optim.step()
    requires_grad(generator, True)
    requires_grad(discriminator, False)
    noise = list(torch.randn(2, 4, 8).unbind(0)) if random.random() < 0.9 else [torch.randn(4, 8)]
    fake, latent = generator(noise)
    g_loss = F.softplus(-discriminator(fake)).mean()
    generator.zero_grad()
    g_loss.backward()
    g_optim.step()
    accumulate(g_ema, generator)
    with torch.no_grad():
        sample, _ = g_ema([sample_z], randomize_noise=False, truncation=0.7)
    print(i, d_loss.item(), g_loss.item(), real_pred.mean().item(), latent.std().item(), sample.sum().item())
torch.save(
    {
        "g": generator.state_dict(),
        "d": discriminator.state_dict(),
        "g_ema": g_ema.state_dict(),
        "g_optim": g_optim.state_dict(),
    },
    "ckpt.pt",
)
