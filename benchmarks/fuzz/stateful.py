"""Blocks that keep something from call to call: numbers, lists, dictionaries, tensors, buffers, a context variable."""

from __future__ import annotations

import collections
import contextvars
import queue

import torch
from torch import nn

W = 8
CALLS = contextvars.ContextVar("CALLS", default=0)
COUNTS: list[int] = []


class Counted(nn.Module):
    def __init__(self):
        super().__init__()
        self.f, self.seen = nn.Linear(W, W), 0

    def forward(self, x):
        self.seen += 1
        return torch.tanh(self.f(x)) / self.seen


class PlainCount(nn.Module):
    """Counts in a plain tensor, in place."""

    def __init__(self):
        super().__init__()
        self.f, self.calls = nn.Linear(W, W), torch.zeros(2)

    def forward(self, x):
        self.calls += 1
        return torch.tanh(self.f(x)) / self.calls[0]


class PlainScale(nn.Module):
    """Reads a plain tensor."""

    def __init__(self):
        super().__init__()
        self.f, self.scale = nn.Linear(W, W), torch.ones(W)

    def forward(self, x):
        return torch.tanh(self.f(x)) * self.scale


class Noted(nn.Module):
    """Its part is called twice, and keeps something in the second call."""

    def __init__(self):
        super().__init__()
        self.part = Notes()

    def forward(self, x):
        return self.part(self.part(x), note=True)


class Notes(nn.Module):
    def __init__(self):
        super().__init__()
        self.f, self.mean = nn.Linear(W, W), 0.0

    def forward(self, x, note=False):
        h = torch.tanh(self.f(x)) - self.mean
        if note:
            self.mean = h.detach().mean()
        return h


class PlainMean(nn.Module):
    """A running mean in a plain tensor, written anew."""

    def __init__(self):
        super().__init__()
        self.f, self.mean = nn.Linear(W, W), torch.zeros(W)

    def forward(self, x):
        h = self.f(x)
        self.mean = 0.9 * self.mean + 0.1 * h.detach().mean((0, 1))
        return h - self.mean


class BufferMean(nn.Module):
    mean: torch.Tensor

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(W))
        self.f = nn.Linear(W, W)

    def forward(self, x):
        h = self.f(x)
        if self.training:
            with torch.no_grad():
                self.mean.mul_(0.9).add_(h.mean((0, 1)), alpha=0.1)
        return h - self.mean


class BufferScale(nn.Module):
    """Each call writes into a buffer, of which its gradient is made."""

    scale: torch.Tensor

    def __init__(self):
        super().__init__()
        self.register_buffer("scale", torch.ones(W))
        self.f = nn.Linear(W, W)

    def forward(self, x):
        self.scale.mul_(0.95)
        return torch.tanh(self.f(x)) * self.scale


class Centered(nn.Module):
    """Uses a buffer of a part before it calls that."""

    def __init__(self, inner):
        super().__init__()
        self.inner, self.norm = inner, nn.BatchNorm1d(W)

    def forward(self, x):
        h = self.inner(x) - self.norm.running_mean
        return self.norm(h.flatten(0, 1)).view_as(h)


class Freezing(nn.Module):
    """Freezes a weight in its third call."""

    def __init__(self):
        super().__init__()
        self.f, self.calls = nn.Linear(W, W), 0

    def forward(self, x):
        self.calls += 1
        if self.calls == 3:
            self.f.weight.requires_grad_(False)
        return torch.tanh(self.f(x))


class BufferSet(nn.Module):
    """A buffer that is another tensor after each call."""

    mean: torch.Tensor

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(W))
        self.f = nn.Linear(W, W)

    def forward(self, x):
        h = self.f(x)
        self.mean = self.mean * 0.9 + h.detach().mean((0, 1)) * 0.1
        return h - self.mean


class Queue(nn.Module):
    """A ring of the last means, at a place that a Python number holds."""

    queue: torch.Tensor

    def __init__(self):
        super().__init__()
        self.register_buffer("queue", torch.zeros(4, W))
        self.f, self.at = nn.Linear(W, W), 0

    def forward(self, x):
        h = self.f(x)
        out = h + self.queue.mean(0)
        self.queue[self.at] = h.detach().mean((0, 1))
        self.at = (self.at + 1) % 4
        return out


class KeptNumbers(nn.Module):
    """A list of numbers that depend on data."""

    def __init__(self):
        super().__init__()
        self.f, self.kept = nn.Linear(W, W), []

    def forward(self, x):
        h = torch.tanh(self.f(x))
        self.kept.append(h.mean().item())
        return h


class KeptSizes(nn.Module):
    def __init__(self):
        super().__init__()
        self.f, self.kept = nn.Linear(W, W), []

    def forward(self, x):
        self.kept.append(x.shape[0])
        return torch.tanh(self.f(x)) / len(self.kept)


class BoundAppend(nn.Module):
    """A list that is written through a bound method."""

    def __init__(self):
        super().__init__()
        self.f, self.kept = nn.Linear(W, W), []
        self.note = self.kept.append

    def forward(self, x):
        self.note(len(self.kept))
        return torch.tanh(self.f(x)) / len(self.kept)


class Recency(nn.Module):
    """An OrderedDict whose order is state."""

    def __init__(self):
        super().__init__()
        self.f = nn.ModuleList([nn.Linear(W, W), nn.Linear(W, W)])
        self.order = collections.OrderedDict(a=0, b=1)

    def forward(self, x):
        name = next(iter(self.order))
        self.order.move_to_end(name)
        return torch.tanh(self.f[self.order[name]](x))


class Remembers(nn.Module):
    """What it has made is part of its next call."""

    def __init__(self):
        super().__init__()
        self.f, self.last = nn.Linear(W, W), None

    def forward(self, x):
        h = torch.tanh(self.f(x))
        if self.last is not None:
            h = h + 0.5 * self.last
        self.last = h.detach().mean(0)
        return h


class RemembersInPlace(nn.Module):
    """The same, cut by detach_() when it is used."""

    def __init__(self):
        super().__init__()
        self.f, self.last = nn.Linear(W, W), None

    def forward(self, x):
        h = torch.tanh(self.f(x))
        if self.last is not None:
            self.last.detach_()
            h = h + 0.5 * self.last
        self.last = h.mean(0)
        return h


class Table(nn.Module):
    """Keeps what it made last in a dictionary."""

    def __init__(self):
        super().__init__()
        self.f, self.table = nn.Linear(W, W), {}

    def forward(self, x):
        h = torch.tanh(self.f(x))
        if "mean" in self.table:
            h = h - 0.1 * self.table["mean"]
        self.table["mean"] = h.detach().mean()
        return h


class CellState(nn.Module):
    """A cell whose state is an attribute, cut between calls."""

    def __init__(self):
        super().__init__()
        self.cell, self.state = nn.GRUCell(W, W), None

    def forward(self, x):
        h = x.mean((0, 1)).unsqueeze(0)
        state = torch.zeros_like(h) if self.state is None else self.state.detach()
        self.state = self.cell(h, state)
        return x + self.state.unsqueeze(1)


class GrowingTable(nn.Module):
    """Keeps a table that grows with the longest input."""

    def __init__(self):
        super().__init__()
        self.f, self.cos = nn.Linear(W, W), None

    def forward(self, x):
        rows = x.shape[0] * x.shape[1]
        if self.cos is None or self.cos.shape[0] < rows:
            self.cos = torch.arange(rows).float().cos().unsqueeze(-1)
        return torch.tanh(self.f(x)) * self.cos[:rows].to(x.dtype).view(*x.shape[:2], 1)


class Auxiliary(nn.Module):
    """Leaves a loss on itself, which the loop adds."""

    def __init__(self):
        super().__init__()
        self.f, self.aux = nn.Linear(W, W), None

    def forward(self, x):
        h = self.f(x)
        self.aux = h.square().mean()
        return torch.tanh(h)


class ContextCount(nn.Module):
    def __init__(self):
        super().__init__()
        self.f = nn.Linear(W, W)

    def forward(self, x):
        CALLS.set(CALLS.get() + 1)
        return torch.tanh(self.f(x)) / CALLS.get()


class Printing(nn.Module):
    def __init__(self):
        super().__init__()
        self.f = nn.Linear(W, W)

    def forward(self, x):
        print("forward", tuple(x.shape))
        return torch.tanh(self.f(x))


class ClassCount(nn.Module):
    """Counts on its class."""

    total = 0

    def __init__(self):
        super().__init__()
        self.f = nn.Linear(W, W)

    def forward(self, x):
        type(self).total += 1
        return torch.tanh(self.f(x)) / self.total


class LastTwo(nn.Module):
    """A list of what it made in the last two calls."""

    def __init__(self):
        super().__init__()
        self.f, self.kept = nn.Linear(W, W), []

    def forward(self, x):
        h = torch.tanh(self.f(x))
        self.kept = [*self.kept[-1:], h.detach().mean((0, 1))]
        return h + sum(self.kept) / len(self.kept)


class StateTable(nn.Module):
    """A cell whose state is in a dictionary, cut by detach_() before it is used."""

    def __init__(self):
        super().__init__()
        self.cell, self.table = nn.GRUCell(W, W), {}

    def forward(self, x):
        h = x.mean((0, 1)).unsqueeze(0)
        state = self.table["state"].detach_() if "state" in self.table else torch.zeros_like(h)
        self.table["state"] = self.cell(h, state)
        return x + self.table["state"].unsqueeze(1)


class Enclosed(nn.Module):
    """Counts in a variable around a function."""

    def __init__(self):
        super().__init__()
        self.f, count = nn.Linear(W, W), 0

        def counted():
            nonlocal count
            count += 1
            return count

        self.counted = counted

    def forward(self, x):
        return torch.tanh(self.f(x)) / self.counted()


class GlobalCount(nn.Module):
    """Counts in a list of the program's."""

    def __init__(self):
        super().__init__()
        self.f = nn.Linear(W, W)

    def forward(self, x):
        COUNTS.append(len(COUNTS))
        return torch.tanh(self.f(x)) / len(COUNTS)


class OwnGenerator(nn.Module):
    def __init__(self):
        super().__init__()
        self.f, self.generator = nn.Linear(W, W), torch.Generator().manual_seed(3)

    def forward(self, x):
        return torch.tanh(self.f(x)) + 0.1 * torch.rand(W, generator=self.generator)


class Logged(nn.Module):
    """Its part appends to a list that it is given."""

    def __init__(self):
        super().__init__()
        self.part, self.log = Logs(), []

    def forward(self, x):
        h = self.part(x, self.log)
        return h / len(self.log)


class Logs(nn.Module):
    """Takes a list beside its input."""

    def __init__(self):
        super().__init__()
        self.f = nn.Linear(W, W)

    def forward(self, x, log=None):
        h = torch.tanh(self.f(x))
        if log is not None:
            log.append(h.detach().mean())
        return h


class Clamped(nn.Module):
    """Writes into its weight in its forward."""

    def __init__(self):
        super().__init__()
        self.f = nn.Linear(W, W)

    def forward(self, x):
        with torch.no_grad():
            self.f.weight.clamp_(-0.3, 0.3)
        return torch.tanh(self.f(x))


class FirstScale(nn.Module):
    """Sets itself up from its first data."""

    def __init__(self):
        super().__init__()
        self.f, self.scale = nn.Linear(W, W), None

    def forward(self, x):
        h = self.f(x)
        if self.scale is None:
            self.scale = 1.0 / (h.detach().std() + 1.0)
        return h * self.scale


class Warmup(nn.Module):
    """Does something else after its third call."""

    def __init__(self):
        super().__init__()
        self.f, self.g = nn.Linear(W, W), nn.Linear(W, W)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x):
        self.calls += 1
        return torch.tanh(self.f(x) if self.calls < 4 else self.g(x))


class Replaced(nn.Module):
    """Its plain tensor takes what `.data` holds."""

    def __init__(self):
        super().__init__()
        self.f, self.mean = nn.Linear(W, W), torch.zeros(W)

    def forward(self, x):
        h = torch.tanh(self.f(x))
        self.mean.data.lerp_(h.data.mean((0, 1)), 0.5)
        return h - self.mean


class LongerTable(nn.Module):
    """Keeps a table that grows with its calls, row by row."""

    def __init__(self):
        super().__init__()
        self.f, self.rows = nn.Linear(W, W), torch.zeros(0, W)

    def forward(self, x):
        h = torch.tanh(self.f(x))
        self.rows = torch.cat([self.rows, h.detach().mean((0, 1)).unsqueeze(0)])
        return h - self.rows.mean(0)


class LateAttribute(nn.Module):
    """Sets an attribute first in its third call."""

    def __init__(self):
        super().__init__()
        self.f, self.calls = nn.Linear(W, W), 0

    def forward(self, x):
        h = torch.tanh(self.f(x))
        self.calls += 1
        if self.calls == 3:
            self.late = h.detach().mean((0, 1))
        return h + getattr(self, "late", 0.0)


class Waiting(nn.Module):
    """Puts what it makes into a queue, and takes what was put two calls before."""

    def __init__(self):
        super().__init__()
        self.f, self.line = nn.Linear(W, W), queue.Queue()

    def forward(self, x):
        h = torch.tanh(self.f(x))
        self.line.put(h.detach().mean((0, 1)))
        return h + 0.5 * self.line.get() if self.line.qsize() > 2 else h


class Adjoint(torch.autograd.Function):
    """Counts its backwards on the module that called it."""

    @staticmethod
    def forward(ctx, x, module):
        ctx.module = module
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        ctx.module.evaluations += 1
        return grad / ctx.module.evaluations, None


class Solver(nn.Module):
    def __init__(self):
        super().__init__()
        self.f, self.evaluations = nn.Linear(W, W), 0

    def forward(self, x):
        return Adjoint.apply(torch.tanh(self.f(x)), self)


class BufferSolver(nn.Module):
    """Counts its backwards in a buffer."""

    def __init__(self):
        super().__init__()
        self.f = nn.Linear(W, W)
        self.register_buffer("evaluations", torch.zeros(()))

    def forward(self, x):
        return Adjoint.apply(torch.tanh(self.f(x)), self)


class PlainCall(nn.Module):
    """Counts in a plain tensor of one element, which data decide by."""

    def __init__(self):
        super().__init__()
        self.f, self.calls = nn.Linear(W, W), torch.tensor(0)

    def forward(self, x):
        self.calls.add_(1)
        return torch.tanh(self.f(x)) if self.calls % 2 else torch.sin(self.f(x))
