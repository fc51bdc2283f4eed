"""Quantisation-aware training: LSQ step sizes initialised by the first batch, straight-through rounding, EMA observers, torch's fake_quantize."""

import math

import torch
import torch.nn as nn
import torch.nn.functional as F


class RoundSTE(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.round()

    @staticmethod
    def backward(ctx, g):
        return g


def grad_scale(x, scale):
    y, yg = x, x * scale
    return (y - yg).detach() + yg


class LSQ(nn.Module):
    def __init__(self, bits=4):
        super().__init__()
        self.qn, self.qp = -(2 ** (bits - 1)), 2 ** (bits - 1) - 1
        self.s = nn.Parameter(torch.ones(1))
        self.init = False

    def forward(self, x):
        if not self.init:
            self.s.data.copy_(2 * x.detach().abs().mean() / math.sqrt(self.qp))
            self.init = True
        s = grad_scale(self.s, 1.0 / math.sqrt(self.qp * x.numel()))
        return RoundSTE.apply((x / s).clamp(self.qn, self.qp)) * s


class Observer(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("lo", torch.tensor(0.0))
        self.register_buffer("hi", torch.tensor(0.0))
        self.register_buffer("enabled", torch.tensor(1, dtype=torch.uint8))
        self.first = True

    def forward(self, x):
        if self.training and self.enabled[0 if self.enabled.dim() else ...] == 1:
            lo, hi = x.detach().min(), x.detach().max()
            if self.first:
                self.lo, self.hi, self.first = lo, hi, False
            else:
                self.lo.mul_(0.9).add_(0.1 * lo)
                self.hi.mul_(0.9).add_(0.1 * hi)
        scale = torch.clamp((self.hi - self.lo) / 255, min=1e-6)
        zp = torch.clamp(-torch.round(self.lo / scale), 0, 255).to(torch.int32)
        return torch.fake_quantize_per_tensor_affine(x, scale, zp, 0, 255)


class QLinear(nn.Linear):
    def __init__(self, i, o):
        super().__init__(i, o)
        self.wq, self.aq = LSQ(), Observer()

    def forward(self, x):
        return F.linear(self.aq(x), self.wq(self.weight), self.bias)


torch.manual_seed(7)
model = nn.Sequential(QLinear(6, 12), nn.BatchNorm1d(12), nn.ReLU(), QLinear(12, 12), nn.ReLU(), QLinear(12, 3))
# farspan: model = farspan.distribute(model)
steps = [p for n, p in model.named_parameters() if n.endswith(".s")]
rest = [p for n, p in model.named_parameters() if not n.endswith(".s")]
opt = torch.optim.SGD([{"params": rest}, {"params": steps, "lr": 1e-3}], lr=0.05, momentum=0.9)
for it in range(8):
    if it == 5:
        for m in model.modules():
            if isinstance(m, Observer):
                m.enabled.fill_(0)
            if isinstance(m, nn.BatchNorm1d):
                m.eval()
    x, y = torch.randn(10, 6), torch.randint(3, (10,))
    loss = F.cross_entropy(model(x), y)
    opt.zero_grad()
    loss.backward()
    opt.step()
    print(it, loss.item(), [m.hi.item() for m in model.modules() if isinstance(m, Observer)], [s.item() for s in steps])
model.eval()
with torch.no_grad():
    ints = {
        n: torch.clamp((m.weight / m.wq.s).round(), m.wq.qn, m.wq.qp).to(torch.int8)
        for n, m in model.named_modules()
        if isinstance(m, QLinear)
    }
    print(model(x).argmax(1).tolist())
torch.save(ints, "int8.pt")
