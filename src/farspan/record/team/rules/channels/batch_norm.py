"""Batch norms of tensors with channels: each member of a split stage normalises its own, and the running statistics
are written where the buffers are.

    members      y_part, mean_part, var_part = its part, normalised, and the batch's statistics of it
    first        running_mean, running_var, num_batches_tracked are moved on, once a call, by all members' statistics

A channel is normalised by itself, so a member's numbers are the whole's. The buffers are written by a module of their
own, called in the place of the batch norm: in order, and as often.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from farspan.call.leaf import Leaf
from farspan.record.team.rules.channels.convolutions import whole_meta
from farspan.record.team.rules.protocol import Rules
from farspan.record.team.team_tensor import TeamTensor, used

__all__ = ["batch_norm"]

_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


class _Running(nn.Module):
    """Holds the running statistics of a batch norm: moves them on by those of a batch, or says what they are."""

    running_mean: torch.Tensor
    running_var: torch.Tensor
    num_batches_tracked: torch.Tensor

    def __init__(self, leaf: Leaf) -> None:
        super().__init__()
        for name, buffer in leaf.module.named_buffers():
            self.register_buffer(name, buffer)

    def forward(self, mean: Any = None, var: Any = None, momentum: float | None = None) -> Any:
        if mean is None:
            return self.running_mean.clone(), self.running_var.clone()
        self.num_batches_tracked.add_(1)
        factor: Any = 1.0 / self.num_batches_tracked.double() if momentum is None else momentum
        for running, found in ((self.running_mean, mean), (self.running_var, var)):
            new = factor * found.double() + (1 - factor) * running.double()
            running.data.copy_(new)  # autograd does not count it as a write, nor one by torch's own batch norm
        return None


def batch_norm(splitting: Rules, leaf: Leaf, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Record a call of a batch norm on a tensor of a split stage; NotImplemented for any other module or tensor.

    Args:
        splitting: Records it.
        leaf: The module.
        args: As the program gives them.
        kwargs: By name.
    """
    module: Any = leaf.module
    if kwargs or len(args) != 1 or type(args[0]) is not TeamTensor or not _is_plain(splitting, leaf):
        return NotImplemented
    if id(module) not in splitting.stages:
        return NotImplemented  # one rank runs it
    x = args[0]
    if x._dim not in (None, 1) or x.dim() < 2 or x.shape[1] != module.num_features:
        return NotImplemented
    module._check_input_dim(x)
    if module.training and (x.numel() == x.shape[1] or module.num_batches_tracked is None):
        return NotImplemented  # torch says what is wrong
    x = splitting.crossings.moved(x, splitting.stages[id(module)])
    running = functools.partial(splitting.recorder.call_leaf, _running_of(splitting, leaf))
    given = () if module.training else running((), {})
    split, sections, dim = x._split, x._sections, None if x._dim is None else 0
    factors = [
        [None] * len(split.members) if item is None else splitting.operand(item, dim, split, sections)
        for item in (module.weight, module.bias, *given)
    ]
    function = _normalised if module.training else _normalised_as_ever
    settings = (module.eps, module.running_mean.dtype) if module.training else (module.eps,)
    made = [
        splitting.record(function, (part, *own, *settings), stage)
        for part, stage, *own in zip(used(x)._parts, split.members, *factors, strict=True)
    ]
    if module.training:
        made, *found = zip(*made, strict=True)
        wholes = [TeamTensor.of(splitting, split, each, dim, sections=sections).join() for each in found]
        running((*wholes, module.momentum), {})
    meta = made[0]._value.meta
    meta = meta if dim is None else whole_meta(meta, 1, x.shape[1])
    return TeamTensor.of(splitting, split, made, x._dim, x._weights, meta, sections)


def _is_plain(splitting: Rules, leaf: Leaf) -> bool:
    """Returns whether a module is a batch norm as torch has it, with all that belongs to one."""
    module: Any = leaf.module
    if not isinstance(module, _BATCH_NORMS) or type(module).forward is not nn.BatchNorm2d.forward:
        return False
    placed = splitting.recorder.placed
    has_all = all(item is None or id(item) in placed for item in (module.weight, module.bias))
    has_buffers = module.running_mean is not None and module.running_var is not None and module.track_running_stats
    is_at_home = all(item.stage == leaf.stage for item in leaf.buffers)
    return has_all and has_buffers and is_at_home and len(leaf.modules) == 1 and not leaf.tables.slots


def _running_of(splitting: Rules, leaf: Leaf) -> Leaf:
    """Returns the module that writes a batch norm's buffers."""
    variants = splitting.recorder.variants
    key = (id(leaf.module), "running", tuple([id(item.tensor) for item in leaf.buffers]), leaf.stage)
    found = variants.get(key)
    if found is None:
        found = variants[key] = Leaf(leaf.name, _Running(leaf), leaf.stage, list(leaf.buffers))
    return found


def _normalised_as_ever(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    mean: torch.Tensor,
    var: torch.Tensor,
    eps: float,
) -> torch.Tensor:
    """Returns some channels, normalised by the running statistics of them."""
    return F.batch_norm(x, mean, var, weight, bias, False, 0.0, eps)


def _normalised(
    x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns some channels, normalised by the batch, with their mean and their unbiased variance."""
    mean, var = [torch.zeros(x.shape[1], dtype=dtype, device=x.device) for _ in range(2)]
    normalised = F.batch_norm(x, mean, var, weight, bias, True, 1.0, eps)
    return normalised, mean.clone(), var.clone()
