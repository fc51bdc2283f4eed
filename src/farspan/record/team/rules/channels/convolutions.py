"""Convolutions, split by channels over the members of a split stage.

    column   every member has x              conv(x, W[part])                each has its channels of the result
    row      each has some channels of x     conv(x[:, part], W[:, part])    the sum of what they give is the result
    groups   each has those of some groups   conv(x[:, part], W[part])       each has these groups' channels

Which of them follows from what a member has of x, as with products. Strides, padding and dilation are along other
dimensions, so they are each part's too. A transposed convolution has the two dimensions of W exchanged.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from farspan.call.infer.entry import intern
from farspan.record.team.parts.shares import extent_of
from farspan.record.team.rules.protocol import Rules
from farspan.record.team.team_tensor import SplitStage, TeamTensor, used
from farspan.record.tensor import LazyTensor

if TYPE_CHECKING:
    from farspan.graph import Meta
    from farspan.record.team.parameter_views import ParameterView

__all__ = ["RULES", "whole_meta"]

_NAMES = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
_NAMES_TRANSPOSED = ("input", "weight", "bias", "stride", "padding", "output_padding", "groups", "dilation")
_DEFAULTS: dict[str, Any] = {"bias": None, "groups": 1}


@dataclass(frozen=True, slots=True)
class _Kind:
    """One of torch's convolutions.

    Attributes:
        function: Which.
        num_behind: How many dimensions lie behind the channels.
        is_transposed: Whether the first dimension of its weight is that of x's channels, not of the result's.
    """

    function: Any
    num_behind: int
    is_transposed: bool

    @property
    def names(self) -> tuple[str, ...]:
        """Returns the names of its arguments, in order."""
        return _NAMES_TRANSPOSED if self.is_transposed else _NAMES


@dataclass(frozen=True, slots=True)
class _Call:
    """A convolution that is split.

    Attributes:
        kind: Which of them.
        splitting: Records it.
        split: The stage.
        weight: The parameter.
        bias: The same; None if it adds none.
        settings: Its other arguments, by name.
        dim: The dimension of x along which channels lie.
    """

    kind: _Kind
    splitting: Rules
    split: SplitStage
    weight: ParameterView
    bias: ParameterView | None
    settings: dict[str, Any]
    dim: int

    @property
    def name(self) -> str:
        """Returns the weight's name."""
        return self.weight.placed.name

    @property
    def groups(self) -> int:
        """Returns into how many groups its channels fall."""
        groups: int = self.settings["groups"]
        return groups

    @property
    def num_in(self) -> int:
        """Returns how many channels x has."""
        shape = self.weight.placed.meta.shape
        return shape[0] if self.kind.is_transposed else shape[1] * self.groups

    @property
    def num_out(self) -> int:
        """Returns how many channels the result has."""
        shape = self.weight.placed.meta.shape
        return shape[1] * self.groups if self.kind.is_transposed else shape[0]

    def record(self, x: Any, weight: Any, bias: Any, stage: int, **other: Any) -> Any:
        """Record it for a member."""
        return self.splitting.record(self.kind.function, (x, weight, bias), stage, {**self.settings, **other})

    def share_of(self, dim: int, member: int, sections: int = 1) -> Any:
        """Returns a member's part of the weight."""
        return self.splitting.matrices.share_of(self.weight, dim, member, self.split, sections)

    def share_of_bias(self, member: int, sections: int = 1) -> Any:
        """Returns a member's part of the bias."""
        if self.bias is None:
            return None
        return self.splitting.matrices.share_of(self.bias, 0, member, self.split, sections)

    def result(self, parts: Sequence[Any], weights: frozenset[str], sections: int) -> TeamTensor:
        """Returns the tensor of which the members have `parts`."""
        meta = whole_meta(parts[0]._value.meta, self.dim, self.num_out)
        return TeamTensor.of(self.splitting, self.split, parts, self.dim, weights, meta, sections)


def convolution(kind: _Kind, splitting: Rules, *args: Any, **kwargs: Any) -> Any:
    """Record a convolution with one of the model's parameters; NotImplemented if it is none that can be split."""
    given = _given(kind, args, kwargs)
    if given is None:
        return NotImplemented
    x, weight, bias = given.pop("input"), given.pop("weight"), given.pop("bias")
    call = _call_of(kind, splitting, x, weight, bias, given)
    if call is None:
        return NotImplemented
    matrices, name, num_parts = splitting.matrices, call.name, len(call.split.members)
    matrices.note_hooks(name, [item for item in (call.weight, call.bias) if item is not None])
    asked, is_whole = matrices.asked.get(name), name in matrices.kept_whole
    near: Any = x
    if type(x) is TeamTensor and x._dim is not None:
        if x._dim == call.dim and not is_whole:
            if call.groups > 1 and _divides_groups(call, x._sections):
                return _by_groups(call, used(x)._parts, x._weights, x._sections)
            if call.groups == 1 and asked in (None, "row"):
                return _row(call, used(x)._parts, x._sections, bias)
        near = splitting.join(x, f"{name} takes it as a whole")
    reason = _too_few(call, is_asked=asked is not None)
    if reason and near is x and not is_whole:
        matrices.cannot(name, reason)
    elif not reason and not is_whole and (asked or near is x):
        parts = [near] * num_parts if type(near) is torch.Tensor else splitting.operand(near, None, call.split, 1)
        if type(near) is TeamTensor:
            used(near)
        if call.groups > 1:
            return _by_groups(call, _narrowed(call, parts), frozenset(), 1)
        return _row(call, _narrowed(call, parts), 1, bias) if asked == "row" else _column(call, parts)
    if type(near) is TeamTensor:  # the copy of the member that owns the weight, if one of them does
        owners, stage = call.split.owners, call.weight.placed.stage
        near = used(near)._parts[owners.index(stage) if stage in owners else 0]
    return splitting.recorder.dispatch(kind.function, (near, weight, bias), call.settings)


def whole_meta(part: Meta, dim: int, size: int) -> Meta:
    """Returns the metadata of the whole of which `part` is one along `dim`, where it has `size`, with its dimensions in
    the same order in memory."""
    shape, stride, step = [*part.shape], [0] * len(part.shape), 1
    shape[dim] = size
    for number in sorted(range(len(shape)), key=lambda number: (part.stride[number], -number)):
        stride[number] = step
        step *= max(shape[number], 1)
    return intern(replace(part, shape=tuple(shape), stride=tuple(stride)))


def _given(kind: _Kind, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any] | None:
    """Returns a call's arguments by name; None where torch would raise."""
    given = dict(zip(kind.names, args, strict=False))
    if len(args) > len(kind.names) or not kwargs.keys() <= set(kind.names) - given.keys():
        return None
    given = {**_DEFAULTS, **given, **kwargs}
    has_tensors = all(isinstance(given.get(name), torch.Tensor) for name in ("input", "weight"))
    return given if has_tensors and type(given["groups"]) is int and given["groups"] > 0 else None


def _call_of(kind: _Kind, splitting: Rules, x: Any, weight: Any, bias: Any, settings: dict[str, Any]) -> _Call | None:
    """Returns the convolution, if it may be split."""
    matrices = splitting.matrices
    split = x._split if type(x) is TeamTensor else splitting.current
    view = matrices.view_of(weight)
    offset = None if bias is None else matrices.view_of(bias)
    is_plain = type(x) is torch.Tensor
    if split is None or view is None or not view.is_all or view.is_transposed:
        return None
    if bias is not None and (offset is None or bias.dim() != 1):
        return None
    if not (is_plain or isinstance(x, LazyTensor)) or not x.dtype.is_floating_point or (is_plain and x.requires_grad):
        return None
    dim = x.dim() - 1 - kind.num_behind
    if weight.dim() != kind.num_behind + 2 or dim not in (0, 1):
        return None
    call = _Call(kind, splitting, split, view, offset, settings, dim)
    if x.shape[dim] != call.num_in or (offset is not None and offset.size != call.num_out):
        return None
    return call if call.num_in % call.groups == call.num_out % call.groups == 0 else None


def _too_few(call: _Call, *, is_asked: bool) -> str:
    """Returns why the channels of the result cannot be divided, or would not be worth it; "" if they can."""
    number, num_parts = call.num_out, len(call.split.members)
    if call.groups > 1:
        return "" if _divides_groups(call, 1) else f"{call.groups} groups for {num_parts} ranks"
    is_few = number < 2 * num_parts or (number % num_parts and number < call.num_in)
    return f"{number} channels for {num_parts} ranks" if number < num_parts or (is_few and not is_asked) else ""


def _divides_groups(call: _Call, sections: int) -> bool:
    """Returns whether the members' channels are those of whole groups."""
    if call.groups % (sections * len(call.split.members)) == 0:
        return True
    is_single = sections == 1 and call.groups == call.num_in == call.num_out
    return is_single and call.groups >= len(call.split.members)


def _narrowed(call: _Call, parts: Sequence[Any]) -> list[Any]:
    """Returns each member's channels of what it has as a whole."""
    return [
        call.splitting.record(torch.narrow, (part, call.dim, *extent_of(call.num_in, member, len(parts))), stage)
        for member, (part, stage) in enumerate(zip(parts, call.split.members, strict=True))
    ]


def _column(call: _Call, parts: Sequence[Any]) -> TeamTensor:
    sections = call.splitting.matrices.note_columns(call.name, call.num_out, has_channels=True)
    out_dim = int(call.kind.is_transposed)
    found = [
        call.record(part, call.share_of(out_dim, member, sections), call.share_of_bias(member, sections), stage)
        for member, (part, stage) in enumerate(zip(parts, call.split.members, strict=True))
    ]
    return call.result(found, frozenset([call.name]), sections)


def _row(call: _Call, parts: Sequence[Any], sections: int, bias: Any) -> TeamTensor:
    matrices, in_dim = call.splitting.matrices, int(not call.kind.is_transposed)
    matrices.split[call.name] = "row"
    terms = [
        call.record(part, call.share_of(in_dim, member, sections), None, stage)
        for member, (part, stage) in enumerate(zip(parts, call.split.members, strict=True))
    ]
    return matrices.added_up(terms, call.split, bias, num_behind=call.kind.num_behind)


def _by_groups(call: _Call, parts: Sequence[Any], weights: frozenset[str], sections: int) -> TeamTensor:
    call.splitting.matrices.split[call.name] = "column"
    found: list[Any] = []
    for member, (part, stage) in enumerate(zip(parts, call.split.members, strict=True)):
        groups = part.shape[call.dim] * call.groups // call.num_in
        own, own_bias = call.share_of(0, member, sections), call.share_of_bias(member, sections)
        found.append(call.record(part, own, own_bias, stage, groups=groups))
    return call.result(found, weights | {call.name}, sections)


RULES: dict[Any, Any] = {
    kind.function: functools.partial(convolution, kind)
    for kind in (
        _Kind(F.conv1d, 1, is_transposed=False),
        _Kind(F.conv2d, 2, is_transposed=False),
        _Kind(F.conv3d, 3, is_transposed=False),
        _Kind(F.conv_transpose1d, 1, is_transposed=True),
        _Kind(F.conv_transpose2d, 2, is_transposed=True),
        _Kind(F.conv_transpose3d, 3, is_transposed=True),
    )
}
"""By function what records it."""
