"""Whether what `follow_rows` says of a model is right: a plain run of the whole batch against runs of its parts."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Sequence
from itertools import combinations
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from farspan.call.infer.entry import meta_of
from farspan.call.infer.symbolic import Numbers
from farspan.call.leaf import Placed
from farspan.call.pytree.template import flatten, rebuild
from farspan.call.rows.follow import RowsError
from farspan.call.rows.trace import SAME, RowsApart, follow_rows
from farspan.record.lanes.batches import Batches
from farspan.record.lanes.losses import LOSSES, divisor_of, summed_inside

__all__ = ["follow", "verdicts"]


class _Summed(TorchFunctionMode):
    """Losses inside a model as the recorder takes them while it records a lane."""

    def __init__(self) -> None:
        super().__init__()
        self.batches = Batches(counts=[])

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in LOSSES and self.batches.counts is not None:
            return summed_inside(self.batches, func, args, kwargs or {})
        return func(*args, **(kwargs or {}))


def follow(module: nn.Module, args: Sequence[Any], positions: Sequence[int], varying: Sequence[int] = ()) -> RowsApart:
    """What `follow_rows` says of a call.

    Raises:
        RowsError: It is not certain that rows stay apart.
    """
    placed = [Placed(name, 0, item, meta_of(item), True, True, type(item)) for name, item in module.named_parameters()]
    placed += [Placed(name, 0, item, meta_of(item), True, False, type(item)) for name, item in module.named_buffers()]
    template, tensors = flatten((tuple(args), {}))
    metas = [meta_of(item) for item in tensors]
    numbers = Numbers(template, metas)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return follow_rows(module, placed, numbers, metas, positions, varying, LOSSES)


def verdicts(module: nn.Module, make: Any, rows: int = 6) -> dict[tuple[int, ...], str]:
    """What is said of a call for each choice of the arguments that may carry the batch; "" where rows are apart.

    Args:
        module: A model.
        make: Gives its arguments for a number of rows.
        rows: That number.

    Raises:
        AssertionError: Rows are said to be apart, and numbers say that they are not.
    """
    args = make(rows)
    tensors = flatten((tuple(args), {}))[1]
    first, *others = [number for number, item in enumerate(tensors) if item.dim() and item.shape[0] == rows]
    found: dict[tuple[int, ...], str] = {}
    for chosen in [each for number in range(len(others), -1, -1) for each in combinations(others, number)]:
        positions = (first, *chosen)
        try:
            apart = follow(module, args, positions)
        except RowsError as error:
            found[positions] = str(error)
            continue
        cuts = [sizes for sizes in _cuts(rows) if all(apart.holds([size]) for size in {rows, *sizes})]
        found[positions] = "" if cuts else "only for this number of rows"
        for sizes in cuts:
            _compare(module, args, positions, sizes, apart)
        for number in (5, 9):
            other = make(number)
            fits = all(tensors_of(other)[place].shape[0] == number for place in positions)
            same = all(
                item.shape == tensors[place].shape
                for place, item in enumerate(tensors_of(other))
                if place not in positions
            )
            if fits and same and all(apart.holds([size]) for size in (number, 2, number - 2)):
                _compare(module, other, positions, (2, number - 2), apart)
    return found


def tensors_of(args: Any) -> list[torch.Tensor]:
    """The tensors among arguments."""
    return flatten((tuple(args), {}))[1]


def _cuts(rows: int) -> list[tuple[int, ...]]:
    return [(2,) * (rows // 2), (rows - 2, 2), (2, rows - 2)]


def _compare(module: nn.Module, args: Any, positions: Sequence[int], sizes: Sequence[int], apart: RowsApart) -> None:
    """Assert that outputs and gradients of the whole batch are those of its parts together."""
    if apart.is_random:
        module = copy.deepcopy(module).eval()
    template, tensors = flatten((tuple(args), {}))
    whole = _run(module, template, tensors, is_mean=False)[0]
    parts, counts = list[list[torch.Tensor]](), list[Any]()
    begin = 0
    for size in sizes:
        given = [item.narrow(0, begin, size) if number in positions else item for number, item in enumerate(tensors)]
        begin += size
        outputs, counted = _run(module, template, given, is_mean=apart.is_mean)
        parts.append(outputs)
        counts.append(counted)
    divisor = divisor_of(counts) if apart.is_mean else 1.0
    columns = [list(column) for column in zip(*parts, strict=True)]
    assert len(columns) == len(whole) == len(apart.dims)
    for column, item, dim in zip(columns, whole, apart.dims, strict=True):
        if dim is None and apart.is_mean:
            column[:] = [each / divisor for each in column]
        detached = [each.detach() for each in column]
        together = (
            detached[0] if dim == SAME else torch.stack(detached).sum(0) if dim is None else torch.cat(detached, dim)
        )
        _assert_close(item.detach(), together, f"an output along {dim} in {sizes}")
    trained = [number for number, item in enumerate(whole) if item.requires_grad]
    generator = torch.Generator().manual_seed(1)
    seeds = [
        torch.randn(whole[number].shape, generator=generator, dtype=torch.float64).to(whole[number].dtype)
        for number in trained
    ]
    wanted = [item for item in module.parameters() if item.requires_grad]
    expected = torch.autograd.grad([whole[number] for number in trained], wanted, seeds, allow_unused=True)
    total: list[Any] = [None] * len(wanted)
    begins = [0] * len(trained)
    for lane in range(len(sizes)):
        roots, cut = [], []
        for place, number in enumerate(trained):
            dim, root = apart.dims[number], columns[number][lane]
            roots.append(root)
            if dim is None:
                cut.append(seeds[place])
            else:
                cut.append(seeds[place].narrow(dim, begins[place], root.shape[dim]))
                begins[place] += root.shape[dim]
        found = torch.autograd.grad(roots, wanted, cut, allow_unused=True)
        total = [b if a is None else a if b is None else a + b for a, b in zip(total, found, strict=True)]
    for one, two in zip(expected, total, strict=True):
        if one is not None or two is not None:
            zeros = torch.zeros_like(two if one is None else one)
            _assert_close(zeros if one is None else one, zeros if two is None else two, f"a gradient in {sizes}")


def _run(module: nn.Module, template: Any, tensors: Sequence[Any], *, is_mean: bool) -> Any:
    torch.manual_seed(0)
    args, kwargs = rebuild(template, [item.clone() for item in tensors])
    if not is_mean:
        return flatten(module(*args, **kwargs))[1], None
    with _Summed() as mode:
        result = module(*args, **kwargs)
    return flatten(result)[1], mode.batches.counts


def _assert_close(one: torch.Tensor, two: torch.Tensor, what: str) -> None:
    assert one.shape == two.shape, f"{what}: {tuple(one.shape)} is {tuple(two.shape)}"
    assert one.dtype == two.dtype, what
    one, two = one.to(torch.complex128), two.to(torch.complex128)
    torch.testing.assert_close(two, one, rtol=1e-5, atol=1e-6, equal_nan=True, msg=lambda text: f"{what}: {text}")
