"""The blocks that a drawn model is made of: each takes and gives [batch, time, width].

A program's text holds the classes that it uses, as they stand here. What a class takes in its constructor are blocks:
none, one (a wrapper), or two. To add a kind, write a class.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

W = 8
SETTINGS = {"gain": 1.0}


def rounded(item):
    return item.float().round(decimals=2).to(item.dtype) if item.is_floating_point() else item


class Affine(nn.Linear):
    def __init__(self):
        super().__init__(W, W)


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.f = nn.Linear(W, W)

    def forward(self, x):
        return torch.tanh(self.f(x))


class Scaled(nn.Module):
    """Computes in the precision of its weights, in autocast too."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.randn(W))

    def forward(self, x):
        return x.to(self.scale.dtype) * self.scale


class GatedUnit(nn.Module):
    """What it is given goes into two products."""

    def __init__(self):
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(W, W), nn.Linear(W, W), nn.Linear(W, W)

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Perceptron(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(W, 2 * W), nn.GELU(), nn.Linear(2 * W, W))


class Activation(nn.SiLU):
    pass


class Norm(nn.LayerNorm):
    def __init__(self):
        super().__init__(W)


class RootNorm(nn.RMSNorm):
    def __init__(self):
        super().__init__(W)


class BatchNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(W)

    def forward(self, x):
        return self.norm(x.transpose(1, 2)).transpose(1, 2)


class Groups(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.GroupNorm(2, W)

    def forward(self, x):
        return self.norm(x.transpose(1, 2)).transpose(1, 2)


class Convolution(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(W, W, 3, padding=1)

    def forward(self, x):
        return self.conv(x.transpose(1, 2)).transpose(1, 2)


class Dropped(nn.Dropout):
    def __init__(self):
        super().__init__(0.2)


class Noise(nn.Module):
    def forward(self, x):
        return x + 0.1 * torch.randn_like(x) if self.training else x


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.attend = nn.MultiheadAttention(W, 2, batch_first=True)

    def forward(self, x):
        return x + self.attend(x, x, x, need_weights=False)[0]


class OwnAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(W, 3 * W), nn.Linear(W, W)

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (2, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        return x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class Encoder(nn.TransformerEncoderLayer):
    def __init__(self):
        super().__init__(W, 2, 2 * W, dropout=0.0, batch_first=True)


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn = nn.GRU(W, W, batch_first=True)

    def forward(self, x):
        return self.rnn(x)[0]


class LongShort(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn = nn.LSTM(W, W, batch_first=True)

    def forward(self, x):
        out, (hidden, _) = self.rnn(x)
        return out + hidden[-1].unsqueeze(1)


class Unrolled(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell = nn.RNNCell(W, W)

    def forward(self, x):
        state, states = torch.zeros_like(x[:, 0]), []
        for item in x.unbind(1):
            state = self.cell(item, state)
            states.append(state)
        return torch.stack(states, 1)


class Direct(nn.Module):
    """Parameters that a forward uses itself."""

    def __init__(self):
        super().__init__()
        self.scale, self.table = nn.Parameter(torch.ones(W)), nn.Parameter(torch.zeros(16, W))

    def forward(self, x):
        return x * self.scale + self.table[: x.shape[1]]


class Unused(nn.Module):
    def __init__(self):
        super().__init__()
        self.f, self.unused = nn.Linear(W, W), nn.Linear(W, W)

    def forward(self, x):
        return x + self.f(x)


class Frozen(nn.Module):
    def __init__(self):
        super().__init__()
        self.f = nn.Linear(W, W).requires_grad_(False)

    def forward(self, x):
        return torch.sin(self.f(x))


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.f = nn.utils.parametrizations.weight_norm(nn.Linear(W, W))

    def forward(self, x):
        return torch.tanh(self.f(x))


class Spectral(nn.Module):
    def __init__(self):
        super().__init__()
        self.f = nn.utils.parametrizations.spectral_norm(nn.Linear(W, W))

    def forward(self, x):
        return self.f(x)


class Experts(nn.Module):
    """Rows go to one of two experts, by their data."""

    def __init__(self):
        super().__init__()
        self.gate, self.experts = nn.Linear(W, 2), nn.ModuleList([nn.Linear(W, W), nn.Linear(W, W)])

    def forward(self, x):
        flat = x.flatten(0, 1)
        weight, index = self.gate(flat).softmax(-1).max(-1)
        out = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            rows = (index == number).nonzero().squeeze(-1)
            out = out.index_add(0, rows, expert(flat[rows]) * weight[rows].unsqueeze(-1))
        return x + out.view_as(x)


class Slow(nn.Module):
    """Takes longer than a plan by parameters expects, so that the model moves after the measured step."""

    def forward(self, x):
        for _ in range(300):
            x = torch.sin(x)
        return x * 4


# -- writes in place, views, cuts


class InPlace(nn.Module):
    def __init__(self):
        super().__init__()
        self.f = nn.Linear(W, W)

    def forward(self, x):
        return self.f(x).add_(x).relu_().mul(1.5)


class ViewWrite(nn.Module):
    def __init__(self):
        super().__init__()
        self.f = nn.Linear(W, W)

    def forward(self, x):
        h = self.f(x).clone()
        h[:, 0] = h[:, -1] * 0.5
        h.view(-1, W)[:, 0].mul_(0.5)
        return torch.tanh(h)


class Cut(nn.Module):
    def __init__(self):
        super().__init__()
        self.f, self.g = nn.Linear(W, W), nn.Linear(W, W)

    def forward(self, x):
        return torch.tanh(self.g(x)) * torch.sigmoid(self.f(x)).detach()


class CutInPlace(nn.Module):
    def __init__(self):
        super().__init__()
        self.f, self.g = nn.Linear(W, W), nn.Linear(W, W)

    def forward(self, x):
        gate = torch.sigmoid(self.f(x))
        gate.detach_()
        return torch.tanh(self.g(x)) * gate


class WrittenAfter(nn.Module):
    """Its block's input is written when that has been called."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        h = x * 1.0
        out = self.inner(h)
        return out + h.add_(1.0)


class StraightThrough(nn.Module):
    def __init__(self):
        super().__init__()
        self.f = nn.Linear(W, W)

    def forward(self, x):
        h = torch.tanh(self.f(x)) * 4
        return h + (h.round() - h).detach()


class NoGradient(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        with torch.no_grad():
            extra = self.inner(x)
        return x + 0.5 * extra


class Branch(nn.Module):
    """Which block is called depends on the data."""

    def __init__(self, a, b):
        super().__init__()
        self.a, self.b = a, b

    def forward(self, x):
        if x.mean() > 0:
            return self.a(x)
        return self.b(x) * 0.5


class Checkpointed(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return checkpoint(self.inner, x, use_reentrant=False)


class Reentrant(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return checkpoint(self.inner, x, use_reentrant=True)


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, scale):
        ctx.save_for_backward(x, scale)
        return x * scale

    @staticmethod
    def backward(ctx, grad):
        x, scale = ctx.saved_tensors
        return 2 * grad * scale, (grad * x).sum((0, 1))


class Gain(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * SETTINGS["gain"]

    @staticmethod
    def backward(ctx, grad):
        return grad * SETTINGS["gain"]


class Configured(nn.Module):
    """Reads a dictionary of the program's, also in its backward."""

    def __init__(self):
        super().__init__()
        self.f = nn.Linear(W, W)

    def forward(self, x):
        return Gain.apply(torch.tanh(self.f(x)))


class Switched(nn.Module):
    """What it gives has a gradient, or none: a flag says so."""

    def __init__(self):
        super().__init__()
        self.f, self.is_cut = nn.Linear(W, W), False

    def forward(self, x):
        h = torch.tanh(self.f(x))
        return x + (h.detach() if self.is_cut else h)


class Packed(nn.Module):
    """What autograd saves of its block is rounded."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        with torch.autograd.graph.saved_tensors_hooks(rounded, lambda item: item):
            return self.inner(x)


class OwnFunction(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(W))

    def forward(self, x):
        return Doubled.apply(x, self.scale)


class TensorHook(nn.Module):
    def __init__(self):
        super().__init__()
        self.f = nn.Linear(W, W)

    def forward(self, x):
        h = self.f(x)
        if h.requires_grad:
            h.register_hook(lambda grad: grad * 0.5)
        return torch.tanh(h)


class HookedMean(nn.Module):
    """A forward hook keeps a running mean of what the inner block gives."""

    def __init__(self, inner):
        super().__init__()
        self.inner, self.means = inner, {"mean": 0.0}
        self.inner.register_forward_hook(self.keep)

    def keep(self, module, args, out):
        self.means["mean"] = 0.9 * self.means["mean"] + 0.1 * out.detach().mean()

    def forward(self, x):
        return self.inner(x)


class BackwardHooked(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner, self.backwards = inner, 0
        self.inner.register_full_backward_hook(self.keep)

    def keep(self, module, grads_in, grads_out):
        self.backwards += 1
        return tuple(None if grad is None else grad * 0.5 for grad in grads_in)

    def forward(self, x):
        return self.inner(x)


# -- containers


class Residual(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return x + self.inner(x)


class Twice(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(self.inner(x))


class Gated(nn.Module):
    def __init__(self, a, b):
        super().__init__()
        self.parts = nn.ModuleDict({"a": a, "b": b})

    def forward(self, x):
        return self.parts["a"](x) * torch.sigmoid(self.parts["b"](x))


class Tied(nn.Module):
    """Two layers with one weight."""

    def __init__(self):
        super().__init__()
        self.f, self.g = nn.Linear(W, W), nn.Linear(W, W)
        self.g.weight = self.f.weight

    def forward(self, x):
        return self.g(torch.tanh(self.f(x)))


class Chain(nn.Sequential):
    def __init__(self, a, b):
        super().__init__(a, b)


class Maxed(nn.Module):
    def __init__(self):
        super().__init__()
        self.f = nn.Linear(W, W)

    def forward(self, x):
        values, _ = self.f(x).topk(2, -1)
        return x + values.sum(-1, keepdim=True)


class Selected(nn.Module):
    """Where a mask of the data says so."""

    def __init__(self):
        super().__init__()
        self.f = nn.Linear(W, W)

    def forward(self, x):
        h = self.f(x)
        h = h.masked_fill(x > 1.0, 0.5)
        return h + h[h > 0].mean()


class WiderInside(nn.Module):
    def __init__(self):
        super().__init__()
        self.f = nn.Linear(W, W)

    def forward(self, x):
        return torch.softmax(self.f(x).double(), -1).to(x.dtype) * 2


class Evaluated(nn.Module):
    """Its block is in eval mode whatever the model is in."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        self.inner.eval()
        return self.inner(x)


class Crossed(nn.Module):
    """Two blocks that take each other's results, some cut."""

    def __init__(self, a, b):
        super().__init__()
        self.a, self.b = a, b

    def forward(self, x):
        left, right = self.a(x), self.b(x)
        return self.b(left.detach()) + self.a(right) * 0.5


class ByName(nn.Module):
    """Passes a dictionary on."""

    def __init__(self, inner):
        super().__init__()
        self.inner, self.out = inner, nn.Linear(W, W)

    def forward(self, x):
        values = {"x": x}
        values["h"] = self.inner(values.pop("x"))
        return self.out(input=values["h"]) + values["h"]
