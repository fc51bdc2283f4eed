"""Calls of a model with parts of a batch; and comparing by numbers what it gives for the whole and for these."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from farspan.call.pytree.template import flatten, rebuild
from farspan.call.rows.trace import SAME, RowsApart
from farspan.record.lanes.batches import Batches, NotInLanesError
from farspan.record.lanes.lane_tensor import LaneTensor
from farspan.record.lanes.losses import divisor_of
from farspan.record.surgery.attempt import Attempt

if TYPE_CHECKING:
    from farspan.graph import Template
    from farspan.record.recording import Recording

__all__ = ["Lane", "counting", "cut_tensors", "difference"]


@dataclass(frozen=True, slots=True)
class Lane:
    """A call of the model with some tensors."""

    call: Any
    template: Template
    tensors: Sequence[Any]

    def __call__(self) -> Any:
        given = rebuild(self.template, self.tensors)
        return self.call(*given[0], **given[1])


def counting(batches: Batches, lane: Lane, *, is_loss: bool = True) -> Callable[[], tuple[Any, list[float | None]]]:
    """Returns a call of a model that gives also what the mean of the loss it makes is divided by, which it leaves out.

    Args:
        batches: Where that is noted.
        lane: The call.
        is_loss: Whether it makes one.
    """

    def counted() -> tuple[Any, list[float | None]]:
        batches.counts = counts = [] if is_loss else None
        try:
            return lane(), counts or []
        finally:
            batches.counts = None

    return counted


def cut_tensors(tensors: Sequence[Any], positions: Sequence[int], sizes: Sequence[int]) -> list[list[Any]]:
    """Returns the tensors of each lane."""
    lanes: list[list[Any]] = []
    begin = 0
    for size in sizes:
        lanes.append(
            [
                _part(item, len(lanes), begin, size) if number in positions else item
                for number, item in enumerate(tensors)
            ]
        )
        begin += size
    return lanes


def _part(item: Any, lane: int, begin: int, size: int) -> Any:
    return item._lanes[lane] if type(item) is LaneTensor else item.narrow(0, begin, size)


def difference(
    recorder: Recording, model: nn.Module, whole: Callable[[], Any], lanes: Sequence[Lane], apart: RowsApart
) -> float:
    """Run a call of `model` as a whole and in lanes, forward and backward, and leave no trace of it.

    If it draws random numbers it runs in eval mode, for whole and lanes draw others; if it draws even there, nothing
    can be compared.

    Args:
        recorder: Records it.
        model: Which.
        whole: Calls it with the whole batch.
        lanes: Call it with the parts of the batch.
        apart: What it gives.

    Returns:
        The largest difference of an output, relative to its size; or of a gradient, relative to the largest.

    Raises:
        NotInLanesError: The outputs of the lanes are not parts of those of the whole.
    """
    attempt, dims = Attempt(recorder, model), apart.dims
    try:
        with _evaluating(model) if apart.is_random else contextlib.nullcontext():
            outputs = flatten(whole())[1]
            if apart.is_random and not _are_equal(outputs, flatten(whole())[1]):
                return 0.0
            results = [counting(recorder.batches, lane, is_loss=apart.is_mean)() for lane in lanes]
            parts = [flatten(result)[1] for result, _ in results]
            if any(len(part) != len(outputs) for part in parts) or len(dims) != len(outputs):
                raise NotInLanesError("its lanes give other outputs than the whole batch")
            columns: list[Any] = [*zip(*parts, strict=True)]
            divisor = divisor_of([counts for _, counts in results]) if apart.is_mean else 1.0
            for number, dim in enumerate(dims):
                if dim is None and divisor != 1.0:
                    columns[number] = [each / divisor for each in columns[number]]
            found: list[Any] = []
            for item, column, dim in zip(outputs, columns, dims, strict=True):
                together = column[0] if dim == SAME else _together([lane.detach() for lane in column], dim)
                if together.shape != item.shape:
                    raise NotInLanesError("its outputs do not follow the number of rows")
                if item.is_floating_point():
                    found.append(_distance(item.detach(), together))
            trained = [number for number, item in enumerate(outputs) if item.requires_grad]
            found += _of_gradients(
                [item for item in model.parameters() if item.requires_grad],
                [outputs[number] for number in trained],
                [columns[number] for number in trained],
                [dims[number] for number in trained],
            )
            return max(map(float, found))
    finally:
        attempt.undo()


def _of_gradients(
    parameters: Sequence[Any], outputs: Sequence[Any], columns: Sequence[Sequence[Any]], dims: Sequence[Any]
) -> list[torch.Tensor]:
    """Returns how far the parameters' gradients are from each other, with random gradients for the outputs.

    Args:
        parameters: Of the model.
        outputs: Of the whole batch, those that require grad.
        columns: For each of them the lanes' parts of it.
        dims: Along which these lie.
    """
    generator = torch.Generator().manual_seed(0)
    seeds = [torch.randn(item.shape, generator=generator).to(item.dtype) for item in outputs]
    cut = [
        [seed] * len(column) if dim is None else torch.split(seed, [lane.shape[dim] for lane in column], dim)
        for seed, column, dim in zip(seeds, columns, dims, strict=True)
    ]
    expected = torch.autograd.grad(outputs, parameters, seeds, allow_unused=True)
    total: list[Any] = [None] * len(parameters)
    for lane in range(len(columns[0])):
        roots = [column[lane] for column in columns]
        found = torch.autograd.grad(roots, parameters, [parts[lane] for parts in cut], allow_unused=True)
        total = [b if a is None else a if b is None else a + b for a, b in zip(total, found, strict=True)]
    if any((one is None) != (two is None) for one, two in zip(expected, total, strict=True)):
        raise NotInLanesError("other parameters are used for some rows than for others")
    pairs = [(one, two) for one, two in zip(expected, total, strict=True) if one is not None]
    norms: list[Any] = [one.float().norm() for one, _ in pairs]
    largest = max([norm.item() for norm in norms], default=0.0)  # some gradients are zero but for rounding
    return [_distance(one, two, torch.tensor(largest)) for one, two in pairs]


def _are_equal(one: Sequence[Any], two: Sequence[Any]) -> bool:
    """Returns whether two calls have given the same numbers."""
    return all(a.shape == b.shape and torch.equal(a.detach(), b.detach()) for a, b in zip(one, two, strict=True))


def _together(lanes: list[torch.Tensor], dim: int | None) -> torch.Tensor:
    """Joins lanes: behind each other along a dim, or as their sum."""
    return torch.stack(lanes).sum(0) if dim is None else torch.cat(lanes, dim)


def _distance(expected: torch.Tensor, found: torch.Tensor, size: Any = None) -> torch.Tensor:
    """Returns the norm of the difference in units of `size`, or of the norm of `expected`."""
    expected, found = expected.float(), found.float()
    different = torch.where(expected == found, torch.zeros_like(found), expected - found)  # infinite ones, too
    norm = torch.where(expected.isfinite(), expected, torch.zeros_like(expected)).norm() if size is None else size
    return different.norm() / norm.clamp_min(1e-12)


@contextlib.contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    training = [module for module in model.modules() if module.training]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True
