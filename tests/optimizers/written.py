"""Optimizers as people write them, whose step looks past one parameter."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

__all__ = ["WRITTEN", "Langevin", "OneForAll", "SharpnessAware"]


class _Written(Optimizer):
    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})
        self.num_steps = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        self.num_steps += 1
        return self.change(self.param_groups[0]["params"], self.param_groups[0]["lr"])

    def change(self, params: Any, lr: float) -> Any:
        raise NotImplementedError


class GlobalNorm(_Written):
    """Clips by the norm of all gradients, and keeps it."""

    def change(self, params: Any, lr: float) -> None:
        self.norm = torch.stack([p.grad.norm() for p in params if p.grad is not None]).norm()
        factor = (0.05 / (self.norm + 1e-6)).clamp(max=1.0)
        for p in params:
            p.add_(p.grad * factor, alpha=-lr)


class StockClipping(_Written):
    def change(self, params: Any, lr: float) -> None:
        nn.utils.clip_grad_norm_(params, 0.01)
        for p in params:
            p.data.add_(p.grad.data, alpha=-lr)


class NormInPython(_Written):
    def change(self, params: Any, lr: float) -> None:
        total = sum(p.grad.data.norm(2).item() ** 2 for p in params) ** 0.5
        for p in params:
            p.data.add_(p.grad.data, alpha=-lr / (1.0 + total))


class IndexAmongLive(_Written):
    """A factor for each layer that has a gradient; something only for the first, in the second step."""

    def change(self, params: Any, lr: float) -> None:
        for index, p in enumerate([p for p in params if p.grad is not None]):
            p.add_(p.grad, alpha=-lr * 0.8**index)
            if index == 0 and self.num_steps == 2:
                p.mul_(0.5)


class LayerRatio(_Written):
    """LARS: a ratio for each layer, which Python reads."""

    def change(self, params: Any, lr: float) -> None:
        for p in params:
            weight, gradient = p.norm(), p.grad.norm()
            ratio = 0.1 * weight / gradient if weight != 0 and gradient != 0 else 1.0
            state = self.state[p]
            if "momentum" not in state:
                state["momentum"] = torch.zeros_like(p)
            state["momentum"].mul_(0.9).add_(p.grad * ratio)
            p.add_(state["momentum"], alpha=-lr)


class SumsInPlace(_Written):
    """A ratio over all layers, added up in tensors."""

    def change(self, params: Any, lr: float) -> None:
        weights = sum(p.pow(2).sum() for p in params)
        gradients = torch.zeros(())
        for p in params:
            gradients += p.grad.pow(2).sum()
        for p in params:
            p.sub_(0.01 * lr * (weights / gradients).sqrt() * p.grad)


class Threshold(_Written):
    """The smallest of the five largest gradients of all; indexing by masks, counts kept as numbers."""

    def change(self, params: Any, lr: float) -> None:
        flat = torch.cat([p.grad.reshape(-1) for p in params])
        threshold = flat.abs().topk(5).values.min()
        begin = 0
        for p in params:
            part = flat[begin : begin + p.numel()].view_as(p)
            begin += p.numel()
            is_small = part.abs() < threshold
            p[is_small] -= part[is_small]
            p.data -= lr * torch.where(is_small, part, torch.zeros_like(part))
            self.state[p]["count"] = self.state[p].get("count", 0) + int(is_small.sum())


class NowAndThen(_Written):
    """Looks past one parameter in every third step only."""

    def change(self, params: Any, lr: float) -> None:
        for p in params:
            p.add_(p.grad, alpha=-lr)
        if self.num_steps % 3 == 0:
            mean = torch.stack([p.mean() for p in params]).mean()
            torch._foreach_sub_(params, mean)  # pyright: ignore[reportCallIssue, reportArgumentType]


class Langevin(_Written):
    """Draws noise for each parameter, in all the ways that there are."""

    def change(self, params: Any, lr: float) -> None:
        for p in params:
            noise = torch.randn_like(p) + torch.empty_like(p).normal_() + torch.randn(p.shape)
            p.add_(p.grad, alpha=-lr).add_(noise * p.new_empty(p.size()).uniform_(), alpha=math.sqrt(lr) * 1e-2)


class OneBuffer(_Written):
    """Keeps its momentum in parts of one buffer, also by lists, and looks at all of it."""

    def change(self, params: Any, lr: float) -> None:
        if self.num_steps == 1:
            self.buffer = torch.zeros(sum(p.numel() for p in params))
            parts = self.buffer.split([p.numel() for p in params])
            self.parts = [part.view_as(p) for part, p in zip(parts, params, strict=True)]
        self.buffer.mul_(0.9)
        for p, part in zip(params[:2], self.parts[:2], strict=True):
            part.add_(p.grad)
        torch._foreach_add_(self.parts[2:], [p.grad for p in params[2:]])
        self.norm = self.buffer.norm()
        for p, part in zip(params, self.parts, strict=True):
            p.sub_(part * (lr / (1 + self.norm)))


class OneForAll(_Written):
    """Keeps one tensor for all parameters, the next one's, and parts of tensors."""

    def change(self, params: Any, lr: float) -> None:
        if self.num_steps == 1:
            total = torch.zeros(2)
            for p in params:
                average = torch.zeros_like(p)
                self.state[p].update(total=total, average=average, again=average, first=average[:1], next=None)
            for p, other in zip(params, [*params[1:], params[0]], strict=True):
                self.state[p]["next"] = self.state[other]["average"]
        first = self.state[params[0]]
        first["total"][0] += sum(p.grad.norm() for p in params)
        for p in params:
            state = self.state[p]
            state["average"].mul_(0.9).add_(p.grad)
            state["first"].clamp_(-0.01, 0.01)
            p.sub_(state["again"] * lr / (1 + state["total"][0] + state["next"].norm()))


class SharpnessAware(Optimizer):
    """The well-known SAM, in both its forms."""

    def __init__(self, params: Any, base: Any, rho: float = 0.05, **options: Any) -> None:
        super().__init__(params, {"rho": rho, **options})
        self.base_optimizer = base(self.param_groups, **options)
        self.param_groups = self.base_optimizer.param_groups

    @torch.no_grad()
    def first_step(self, zero_grad: bool = False) -> None:
        norms = [p.grad.norm(p=2) for group in self.param_groups for p in group["params"]]
        for group in self.param_groups:
            scale = group["rho"] / (torch.norm(torch.stack(norms), p=2) + 1e-12)
            for p in group["params"]:
                self.state[p]["old_p"] = p.data.clone()
                p.add_(p.grad * scale.to(p))
        if zero_grad:
            self.zero_grad()

    @torch.no_grad()
    def second_step(self, zero_grad: bool = False) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.data = self.state[p]["old_p"]
        self.base_optimizer.step()
        if zero_grad:
            self.zero_grad()

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        closure = torch.enable_grad()(closure)
        self.first_step(zero_grad=True)
        closure()
        self.second_step()


WRITTEN: dict[str, Callable[[Any], Optimizer]] = {
    kind.__name__: kind
    for kind in (
        GlobalNorm, StockClipping, NormInPython, IndexAmongLive, LayerRatio, SumsInPlace, Threshold, NowAndThen,
        OneBuffer, OneForAll,
    )
}  # fmt: skip
