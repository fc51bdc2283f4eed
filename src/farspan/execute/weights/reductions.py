"""Adds the gradients that arrive at their parameters' owner: each as soon as it is there and its turn has come.

    tasks        F0 F1 B0 ... B1 ... B2 ...
    arriving        1:g1       0:g0   2:g2         from other members, in any order
    added                      0 1      2          in the loop's order, between two tasks

Nothing in the step waits for them, so the rank looks after them between its tasks, and waits only at the end.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import takewhile
from typing import Any

import torch

from farspan.call.draws.program_draws import around_backward
from farspan.call.leaf import Placed, sliced, tensor_of
from farspan.call.modes import apply_modes
from farspan.errors import RecordError
from farspan.graph import BackwardSegment, Edge, SliceName, whole_name
from farspan.program.program import Channel, Message, Program
from farspan.torch_private import DisableTorchFunction, has_gradient_hooks, raw_grad, set_raw_grad

__all__ = ["Reductions", "add_gradients", "as_absent", "is_absent"]

_POSTED = 2
"""Messages of a channel for which there is room at a time. Between GPUs there is room when the tasks have run: until
then a receive would stand on the device.
"""


class Reductions:
    """The reductions of one step, on one rank.

    Args:
        program: Of the step.
        arrived: Holds the gradients that are here and have not been added; None for one that there is not.
        post: Makes room for a message.
        take: Waits for a message that has been posted.
        has_arrived: Whether that would return at once.
        add: Adds the gradients that these parts bring.
    """

    def __init__(
        self,
        program: Program,
        arrived: dict[Edge, torch.Tensor | None],
        *,
        post: Callable[[Message], None],
        take: Callable[[Message], None],
        has_arrived: Callable[[Message], bool],
        add: Callable[[Sequence[BackwardSegment]], None],
    ) -> None:
        self.arrived = arrived
        self.post, self.take, self.has_arrived, self.add = post, take, has_arrived, add
        self._carried = program.carried
        self._sums: dict[Edge, torch.Tensor] = {}
        """Sums so far, by the edge that adds to each next."""
        self._own: set[Edge] = set()
        """The edges whose sum is in memory of its own."""
        self._late = program.late_reductions
        self._is_over = False
        self._queues: dict[str, deque[BackwardSegment]] = {}
        """For each parameter the gradients to add, in order."""
        for reduction in program.reductions:
            self._queues.setdefault(whole_name(reduction.part.brought), deque()).append(reduction.part)
        self._coming: dict[Channel, deque[Message]] = {}
        self._posted: dict[Channel, deque[Message]] = {}
        for message in program.reduction_messages:
            self._coming.setdefault(message.channel, deque()).append(message)
        for channel in self._coming:
            self._posted[channel] = deque()
            self._make_room(channel)

    def carry(self, made: Iterable[Edge]) -> None:
        """A task has made gradients: add up those that are added up on this rank."""
        for edge in made if self._carried else ():
            before = self._sums.pop(edge, None)
            following = self._carried.get(edge)
            if before is None and following is None:
                continue
            total = self.arrived.pop(edge)
            is_own = edge in self._own
            if before is not None and total is not None:
                is_own &= before.layout is total.layout is torch.strided
                total = before.add_(total) if is_own else total + before if before.is_sparse else before + total
                is_own = True
            elif before is not None:
                total = before
            if following is None:
                self.arrived[edge] = total
            elif total is not None:
                self._sums[following] = total
                if is_own:
                    self._own.add(following)

    def advance(self) -> None:
        """Add what can be added now; never waits."""
        if not self._queues:
            return
        for channel, posted in self._posted.items():
            while posted and self.has_arrived(posted[0]):
                self.take(posted.popleft())
                self._make_room(channel)
        self._add()

    def finish(self) -> None:
        """The tasks have run: add all that has not been added."""
        self._late, self._is_over = frozenset(), True
        for channel in self._coming:
            self._make_room(channel)
        while channels := [channel for channel, posted in self._posted.items() if posted]:
            for channel in channels:
                self.take(self._posted[channel].popleft())
                self._make_room(channel)
            self._add()
        self._add()

    def _make_room(self, channel: Channel) -> None:
        coming, posted = self._coming[channel], self._posted[channel]
        while coming and len(posted) < _POSTED and (self._is_over or not coming[0].is_between_gpus):
            posted.append(coming.popleft())
            self.post(posted[-1])

    def _add(self) -> None:
        while ready := [
            part for name, queue in self._queues.items() if name not in self._late for part in self._taken_from(queue)
        ]:
            self._queues = {key: queue for key, queue in self._queues.items() if queue}
            by_backward: dict[Any, list[BackwardSegment]] = {}
            for part in ready:
                by_backward.setdefault(part.backward, []).append(part)
            for parts in by_backward.values():
                self.add(parts)

    def _taken_from(self, queue: deque[BackwardSegment]) -> list[BackwardSegment]:
        """Takes the next gradient to add, if it is here; of a backward all slices of a parameter at once."""
        first = queue[0]
        is_slice = type(first.brought) is SliceName
        parts = [*takewhile(lambda part: part.backward is first.backward, queue)] if is_slice else [first]
        if not all(part.incoming[0] in self.arrived for part in parts):
            return []
        return [queue.popleft() for _ in parts]


def add_gradients(
    parts: Sequence[BackwardSegment], gradients: Sequence[torch.Tensor | None], parameters: Mapping[str, Placed]
) -> None:
    """Let autograd add `gradients`, as far as there are any, to those of the parameters that `parts` are of; all are of
    one backward."""
    backward = parts[0].backward
    roots: list[torch.Tensor] = []
    seeds: list[torch.Tensor] = []
    slices: dict[str, list[tuple[SliceName, torch.Tensor]]] = {}
    for part, gradient in zip(parts, gradients, strict=True):
        name = part.brought
        tensor = parameters[whole_name(name)].tensor
        if gradient is None or not tensor.requires_grad:
            continue  # frozen since the forward: autograd adds nothing to its gradient either
        if type(name) is SliceName and _can_lie_in(tensor, gradient):
            slices.setdefault(name.whole, []).append((name, gradient))
        else:
            roots.append(tensor_of(parameters, name))
            seeds.append(gradient)
    for whole, pieces in slices.items():
        _add_slices(parameters[whole].tensor, pieces)
    if roots:
        backward.moment.go_to()
        with apply_modes(backward.modes), around_backward(parts[0].describe):
            torch.autograd.backward(roots, seeds)


_ABSENT = {1: 0x7F, 2: 0x7FD3, 4: 0x7FD35A5A, 8: 0x7FFD35A5A5A5A5A5}
"""By bytes of a number, one that is no number, in bits that no operation gives."""
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def as_absent(edge: Edge, message: Message) -> torch.Tensor:
    """Returns what is sent in the place of a parameter's gradient that there is not: data have decided that a module
    does not use it.

    Raises:
        RecordError: It would go from GPU to GPU, where nobody looks whether there is one.
    """
    if message.is_between_gpus:
        why = "a module on another GPU than its owner's has not used it, as its data decide."
        raise RecordError(f"there is no {edge.describe()}.", why=why, hint="place its module on one rank")
    tensor = torch.empty_strided(edge.meta.shape, edge.meta.stride, dtype=edge.meta.dtype)
    bits = _bits(tensor)
    bits.fill_(_ABSENT[bits.element_size()])
    return tensor


def is_absent(gradient: torch.Tensor) -> bool:
    """Returns whether a gradient that has come through the host's memory, and is still there, stands for none."""
    if gradient.numel() == 0:
        return False
    first = gradient[(0,) * gradient.dim()].item()
    if first == first:
        return False
    bits = _bits(gradient)
    return bool((bits == _ABSENT[bits.element_size()]).all())


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    numbers = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return numbers.view(_INTEGERS[numbers.element_size()])


def _can_lie_in(parameter: torch.Tensor, gradient: torch.Tensor) -> bool:
    """Returns whether the gradient of a slice can be added where it lies in that of the parameter."""
    total = raw_grad(parameter)
    if gradient.layout is not torch.strided or gradient.dtype != parameter.dtype or has_gradient_hooks(parameter):
        return False
    return total is None or not (
        total.requires_grad or total.layout is not torch.strided or total.dtype != gradient.dtype
    )


def _add_slices(parameter: torch.Tensor, pieces: Sequence[tuple[SliceName, torch.Tensor]]) -> None:
    """Adds the gradients of slices where they lie, for autograd would first make a whole tensor of zeros around each.

    Args:
        parameter: What they are slices of.
        pieces: The slices and their gradients, in the order in which to add them.
    """
    # A product with a slice of columns has a transposed gradient, which is slow to add to what is not transposed.
    pieces = [(name, gradient.contiguous()) for name, gradient in pieces]
    with DisableTorchFunction(), torch.no_grad():
        total = raw_grad(parameter)
        if total is None:
            if parameter.is_contiguous() and (joined := _joined(parameter, pieces)) is not None:
                set_raw_grad(parameter, joined)
                return
            total = torch.zeros_like(parameter)
            set_raw_grad(parameter, total)
        for name, gradient in pieces:
            sliced(total, name).add_(gradient)


def _joined(parameter: torch.Tensor, pieces: Sequence[tuple[SliceName, torch.Tensor]]) -> torch.Tensor | None:
    """Returns the pieces as a whole, if they are all there is of it, each once."""
    dim, begins = pieces[0][0].dim, sorted(pieces, key=lambda piece: piece[0].begin)
    names = [name for name, _ in begins]
    ends = [0, *(name.end for name in names)]
    is_whole = all(name.dim == dim and name.begin == end for name, end in zip(names, ends, strict=False))
    if not is_whole or ends[-1] != parameter.shape[dim]:
        return None
    return torch.cat([gradient for _, gradient in begins], dim)
