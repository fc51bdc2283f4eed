"""Finds out whether an operation can be done part by part, by numbers: on tensors of the same shapes it is done as a
whole and part by part, and results and gradients are compared.

    softmax(x, -1)   x split along 1 (heads)     the parts of the result, along 1         part by part
    softmax(x, -1)   x split along 2 (the last)  other numbers                            as a whole
    x + mask         mask [1, heads, t, t]       with the part of the mask, along 1       part by part

A result without the split dimension (a sum over it, `x.isinf().any()`) is never taken for the members' own, whatever
the numbers; and only indices are those of the call, for zeros that are added anywhere, or a mask without a place, give
the same in each way: so nothing depends on which numbers were tried.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from farspan.call.pytree.template import flatten, rebuild
from farspan.devices import device_types
from farspan.graph import Meta
from farspan.record.team.parts.shares import share_of

if TYPE_CHECKING:
    from farspan.graph import Template

__all__ = ["Operand", "Trial", "has_indices", "tried"]

_TOLERANCE = 1e-5
"""Of differences, relative to the largest number, in single precision."""
_LOW = (torch.float16, torch.bfloat16)


@dataclass(frozen=True, slots=True, kw_only=True)
class Operand:
    """A tensor among the arguments.

    Attributes:
        whole: Metadata of the whole.
        dim: Along which each member has a part; None where it has all.
        sections: Into how many equal ones it falls along that, of each of which a member has its share.
        parts: Metadata of each member's part.
        data: The tensor itself, if it is known here and has indices, of which not all fit.
        is_fixed: Whether it is none that the model computes: a parameter, or a tensor from outside.
    """

    whole: Meta
    dim: int | None
    parts: tuple[Meta, ...]
    data: torch.Tensor | None = None
    is_fixed: bool = False
    sections: int = 1


@dataclass(frozen=True, slots=True)
class Trial:
    """How an operation is done part by part.

    Attributes:
        dims: Along which each member takes its part of an operand, by number; None for all of it.
        results: Along which the results are split, and into how many sections; then those operands that it writes into.
        metas: Metadata of the whole results; nothing where each member has all of them.
    """

    dims: tuple[int | None, ...]
    results: tuple[tuple[int, int], ...]
    metas: tuple[Meta, ...] = ()


def has_indices(meta: Meta) -> bool:
    """Returns whether a tensor has integers: an operation may take them for places, which must be there."""
    return not (meta.dtype.is_floating_point or meta.dtype.is_complex or meta.dtype is torch.bool)


def tried(
    function: Any,
    template: Template,
    part_templates: Sequence[Template],
    operands: Sequence[Operand],
    dims: Sequence[int | None],
    written: Sequence[int],
    num_parts: int,
) -> Trial | None:
    """Returns how the operation is done part by part with these `dims`; None where that gives something else.

    Args:
        function: Which.
        template: Of its arguments.
        part_templates: For each member, of its arguments with the sizes of its part.
        operands: Its tensors, in template order.
        dims: Along which each operand is cut.
        written: The operands that it writes into.
        num_parts: How many members there are.
    """
    generator = torch.Generator().manual_seed(0)
    try:
        with _plainly():
            wholes = [_numbers(operand, generator) for operand in operands]
            structure, outputs = _forward(function, template, wholes, written)
            seeds = [torch.randn(one.shape, generator=generator).to(one.device, one.dtype) for one in outputs]
            gradients = _gradients(outputs, seeds, wholes)
            sums: list[torch.Tensor | None] = [None] * len(operands)
            results: tuple[tuple[int, int], ...] | None = None
            numbers = _sections_of(operands, dims)
            for member in range(num_parts):

                def cut(tensor: torch.Tensor, dim: int, sections: int = 1, member: int = member) -> torch.Tensor:
                    return share_of(tensor, dim, sections, member, num_parts)

                leaves = [
                    _like(one if dim is None else cut(one, dim, operand.sections), one, operand, dim, member)
                    for one, dim, operand in zip(wholes, dims, operands, strict=True)
                ]
                found, parts = _forward(function, part_templates[member], leaves, written)
                split = tuple(
                    [_split_of(one, part, member, num_parts, numbers) for one, part in zip(outputs, parts, strict=True)]
                )
                if found != structure or (-1, 1) in split or results not in (None, split):
                    return None
                results = split
                own = _gradients(parts, [cut(seed, *axis) for seed, axis in zip(seeds, split, strict=True)], leaves)
                pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
                for number, (one, part) in enumerate(zip(gradients, own, strict=True)):
                    dim = dims[number]
                    if one is None or part is None:
                        if one is not part:
                            return None
                    elif dim is not None:
                        pairs.append((cut(one, dim, operands[number].sections), part))
                    else:
                        before = sums[number]
                        sums[number] = part if before is None else before + part
                if not all(_are_close(one, part) for one, part in pairs):
                    return None
            totals = [(one, total) for one, total in zip(gradients, sums, strict=True) if total is not None]
            if not all(one is not None and _are_close(one, total) for one, total in totals):
                return None
    except (RuntimeError, TypeError, ValueError, IndexError):  # shapes that do not fit: it is done as a whole
        return None
    assert results is not None
    behind = len(results) - len(written)
    axes = [(operands[number].dim, operands[number].sections) for number in written]
    if axes != list(results[behind:]):
        return None
    return Trial(tuple(dims), results)


def _sections_of(operands: Sequence[Operand], dims: Sequence[int | None]) -> list[int]:
    """Returns into how many sections a result may fall along what is split: as an operand does, or into those of all
    (joined along it), or into one for each place before that in an operand, where both become one dimension (batch and
    heads)."""
    split = [operand.sections for operand, dim in zip(operands, dims, strict=True) if dim is not None]
    found = {1: None, max(operand.sections for operand in operands): None, sum(split): None}
    for operand in operands:
        if operand.dim is not None:
            shape = operand.whole.shape
            found.update(dict.fromkeys(math.prod(shape[begin : operand.dim]) for begin in range(operand.dim)))
    return [number for number in found if number > 0]


@contextlib.contextmanager
def _plainly() -> Iterator[None]:
    """Computes in single precision, without what would round otherwise, and without the program's hooks on what is
    saved (a checkpoint's)."""
    own = torch.autograd.graph.saved_tensors_hooks(_itself, _itself)
    with torch.inference_mode(False), torch.enable_grad(), own, contextlib.ExitStack() as stack:
        for kind in device_types():
            if torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        yield


def _itself(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _forward(
    function: Any, template: Template, leaves: Sequence[torch.Tensor], written: Sequence[int]
) -> tuple[Any, list[torch.Tensor]]:
    """Returns the structure of the result, its tensors, and the tensors that have been written into."""
    inputs = [leaf.clone() if number in written else leaf for number, leaf in enumerate(leaves)]
    args, kwargs = rebuild(template, inputs)
    structure, outputs = flatten(function(*args, **kwargs))
    return structure, [*outputs, *(inputs[number] for number in written)]


def _gradients(
    outputs: Sequence[torch.Tensor], seeds: Sequence[torch.Tensor], leaves: Sequence[torch.Tensor]
) -> list[torch.Tensor | None]:
    trained = [(output, seed) for output, seed in zip(outputs, seeds, strict=True) if output.requires_grad]
    wanted = [leaf for leaf in leaves if leaf.requires_grad]
    if not trained or not wanted:
        return [None] * len(leaves)
    given = [output for output, _ in trained], wanted, [seed for _, seed in trained]
    found = iter(torch.autograd.grad(*given, allow_unused=True))
    return [next(found) if leaf.requires_grad else None for leaf in leaves]


def _numbers(operand: Operand, generator: torch.Generator) -> torch.Tensor:
    """Returns a tensor like the whole operand; in single precision if it has less."""
    meta = operand.whole
    if operand.data is not None:
        return operand.data
    dtype = torch.float32 if meta.dtype in _LOW else meta.dtype
    if meta.dtype.is_floating_point or meta.dtype.is_complex:
        numbers = torch.randn(meta.shape, generator=generator).to(dtype)
    else:
        numbers = torch.randint(2, meta.shape, generator=generator).to(dtype)
    return _laid_out(numbers, meta).requires_grad_(meta.requires_grad and dtype.is_floating_point)


def _laid_out(numbers: torch.Tensor, meta: Meta) -> torch.Tensor:
    """Returns a copy of `numbers`, in memory as `meta` says if each has a place of its own there."""
    if any(size > 1 and not stride for size, stride in zip(meta.shape, meta.stride, strict=True)):
        return numbers.to(meta.device, copy=True)
    memory = torch.empty_strided(meta.shape, meta.stride, dtype=numbers.dtype, device=meta.device)
    return memory.copy_(numbers)


def _like(tensor: torch.Tensor, whole: torch.Tensor, operand: Operand, dim: int | None, member: int) -> torch.Tensor:
    """Returns a copy of a part of `whole`, which lies in memory as the member's own does."""
    detached, own = tensor.detach(), operand.parts[member]
    if operand.dim == dim and tuple(detached.shape) == own.shape and operand.data is None:
        return _laid_out(detached, own).requires_grad_(whole.requires_grad)
    return detached.clone().requires_grad_(whole.requires_grad)


def _split_of(
    whole: torch.Tensor, part: torch.Tensor, member: int, num_parts: int, numbers: Sequence[int]
) -> tuple[int, int]:
    """Returns along which a result is split, and into how many sections, one of `numbers`; (-1, 1) where `part` is no
    part of it."""
    if whole.dim() != part.dim() or whole.dtype != part.dtype:
        return -1, 1
    found = [dim for dim, size in enumerate(whole.shape) if part.shape[dim] != size]
    if len(found) != 1:
        return -1, 1
    for number in numbers:
        fits = number == 1 or whole.shape[found[0]] % (number * num_parts) == 0
        if fits and _are_close(share_of(whole, found[0], number, member, num_parts), part):
            return found[0], number
    return -1, 1


def _are_close(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.shape != other.shape:
        return False
    if not one.dtype.is_floating_point:
        return torch.equal(one, other)
    if not one.numel():
        return True
    is_finite = one.isfinite()
    if not torch.equal(one[~is_finite].nan_to_num(1.0), other[~is_finite].nan_to_num(1.0)):
        return False
    one, other = one[is_finite].double(), other[is_finite].double()
    if not one.numel():
        return True
    return bool((one - other).abs().max() <= _TOLERANCE * one.abs().max())
