"""Shows what a rank did in a flush, where another rank did something else: draws, events, calls, and the data given to
them.

Ranks must do the same: record the same calls, with arguments that come from the same places, change state alike between
two flushes (`events.py`), draw the same random numbers (`generators.py`), and be given the same plain tensors (batches,
masks; `checksum.py`), or parts of different batches would be mixed without a word. All of it is one number in each
agreement. Only where that differs does a rank write down, in order, what it is made of.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from farspan.call.leaf import Leaf
from farspan.call.naming import format_where, name_of
from farspan.call.pytree.canonical import digest_of
from farspan.control.hub.divergence import END_OF_STEP, HINT
from farspan.execute.agreement.checksum import Checksum, checksum_of, checksum_of_all, is_comparable
from farspan.execute.agreement.events import Entry, Events, Happened, Position
from farspan.execute.agreement.shared_generators import (
    DRAWN_BY_A_LOADER,
    SAME_DRAWS,
    GeneratorStates,
    generator_entries,
    generator_states,
)
from farspan.graph import EVERYWHERE, Backward, Call, Graph, MicroBatch, Value, plain_of
from farspan.torch_private import DisableTorchFunction

if TYPE_CHECKING:
    from farspan.graph import Template

__all__ = ["PROGRAM_IS_OVER", "History"]

PROGRAM_IS_OVER = "the program is over"
"""Why what is left runs, behind the last line of a program."""

_Draw = tuple[Any, Any, Position]
"""A draw of the program itself: the function, the line, and (graph, call) that came next."""
_EVERY_ON_DEVICES = 100
"""Number of flushes after which data on other devices than the CPU, which would have to wait for it, are compared
again; they are also compared in the first four flushes."""
_SAME_DATA = (
    "seed `random`, numpy and torch before data are split or shuffled, with the same seed on every rank,\n"
    "and read the same batches; or let one rank read: batch = farspan.from_rank(0, batch); ranks that are to train on\n"
    "batches of their own: farspan.distribute(model, data_parallel=2)"
)


class History:
    """The actions of this rank in the present flush or barrier."""

    def __init__(self, position: Callable[[], Position]) -> None:
        self.events = Events(position)
        self.compares_generators = False
        """True if the states of the generators belong to the agreement: not where ranks are threads of one process."""
        self._graphs: Sequence[Graph] = ()
        self._checksums: dict[int, tuple[Any, Checksum]] = {}
        self._end: Entry = (0, "")
        self._num_flushes = 0
        self._draws: Sequence[_Draw] = ()
        self._states: GeneratorStates | tuple[()] | None = ()
        """None until they are looked at."""
        self._reason = self._before = ""
        """The reasons of this flush and of the one before, in which all ranks agreed."""
        self._happened = Happened()

    def begin_flush(self, graphs: Sequence[Graph], reason: str, draws: Sequence[_Draw] = ()) -> None:
        """`graphs` are about to run.

        Args:
            graphs: What was recorded.
            reason: Why now, for people.
            draws: What the program itself has drawn since the last flush.
        """
        self._graphs, self._end = graphs, (0, f"{END_OF_STEP}{reason}", HINT)
        self._draws, self._happened = draws, self.events.take()
        self._states = None
        if [call for graph in graphs for call in graph.calls if call.path is not None]:  # they move the generators
            self._look_at_generators()
        self._num_flushes += 1
        self._before, self._reason = self._reason, reason

    def digests(self) -> tuple[int, Checksum]:
        """Returns, of the flush that has begun, the number that must be equal on all ranks, and one for each grid, of
        which one must be. Its calls may run meanwhile, unless they write into what they are given.
        """
        data = self._look_at_data(self._graphs)
        digests = b"".join([graph.digest.to_bytes(8, "big") for graph in self._graphs])
        return self._digest(digests), data

    def begin_barrier(self, what: str, digest: int, draws: Sequence[_Draw] = ()) -> int:
        """Begins a barrier; returns the number that must be equal on all ranks."""
        self._graphs, self._checksums, self._end = (), {}, (digest, what)
        self._draws, self._happened, self._states = draws, self.events.take(), None
        return self._digest(digest.to_bytes(8, "big"))

    def begin_end(self) -> int:
        """Begins the end of the program; returns what must be equal on all ranks, of what has happened since the last
        flush."""
        self._graphs, self._checksums, self._end = (), {}, (0, "the end of the program")
        self._draws, self._states = (), ()
        self._happened = self.events.take()
        return self._happened.digest()

    def last_reasons(self) -> list[str]:
        """Returns why the last flushes were, and where, the last one first."""
        reasons = (self._reason, self._before)
        return [reason for reason in reasons if reason and not reason.startswith(PROGRAM_IS_OVER)]

    def _digest(self, digests: bytes) -> int:
        if self._states is None:
            self._look_at_generators()
        return digest_of((digests, self._happened.digest(), self._states))

    def _look_at_generators(self) -> None:
        self._states = generator_states() if self.compares_generators else ()

    def end(self) -> None:
        """The flush is over."""
        self._graphs, self._checksums, self._draws, self._happened = (), {}, (), Happened()

    def entries(self, step: int) -> list[Entry]:
        """Returns everything, for people and for the comparison with other ranks."""
        entries: list[Entry] = []
        happened = [
            *self._happened.entries(),
            *[(draw[2], functools.partial(_entries_of_draw, draw)) for draw in self._draws],
        ]
        left = deque(sorted(happened, key=lambda item: item[0]))
        for graph in self._graphs:
            for call in graph.calls:
                while left and left[0][0] <= (graph.index, call.index):
                    entries += left.popleft()[1]()
                line = _place_of(graph.line_of(call))
                for digest, words, *hint in self._entries_of(call):
                    entries.append((digest, words, hint[0] if hint else "", line))
            for backward in graph.backwards:
                entries += self._entries_of_backward(backward)
        for _, make in left:
            entries += make()
        # The end comes before the generators: where a rank is at its end, that is what it shows beside others' calls.
        before = self._before if self._graphs else self._reason
        states = generator_entries(self._states, before) if self._states else []
        return [*entries, self._end, *states, self._end]

    def _entries_of(self, call: Call) -> Iterator[Entry]:
        name = call.describe()
        yield digest_of((call.entry.name, call.stage)), name
        for number, argument in enumerate(call.arguments or ()):
            yield self._entry_of(argument, f"argument {number + 1}", name, call.graph)
        yield digest_of((call.entry.digest, call.path)), f"{name}{_circumstances(call)}"

    def _entries_of_backward(self, backward: Backward) -> Iterator[Entry]:
        name = f"backward() at {format_where(backward.where)}"
        yield digest_of(("backward", backward.retain_graph, backward.modes, backward.requested is None)), name
        for root in backward.roots:
            yield self._entry_of(root, "the root", name, backward.graph)
        for gradient in backward.gradients:
            if gradient is not None:
                yield self._entry_of(gradient, "the gradient", name, backward.graph)
        if backward.requested is not None:
            names = sorted(backward.requested.names)
            yield digest_of((names, len(backward.requested.outside))), f"{name}, of {', '.join(names) or 'tensors'}"

    def _entry_of(self, argument: Any, role: str, name: str, graph: MicroBatch) -> Entry:
        """Returns where the argument `role` of `name` comes from, or what is in it."""
        item = plain_of(argument)
        known = self._checksums.get(id(item))
        if known is not None:
            text = f"{_meta_text(item)} with the checksum {known[1][0]:08x}, given to {name} as {role}"
            return digest_of((_meta_text(item), known[1])), text, _SAME_DATA
        if not isinstance(argument, Value):
            return digest_of(_meta_text(argument)), f"{role} of {name} is {_meta_text(argument)}"
        is_source = argument.call is None or argument.call.graph is not graph
        identity = argument.identity if argument.call is None or is_source else (argument.call.index, argument.index)
        return digest_of((is_source, identity, argument.meta)), f"{role} of {name} is {argument.describe()}"

    # Data.

    def _look_at_data(self, graphs: Sequence[Graph]) -> Checksum:
        """Find the checksum of each plain tensor; a number for each grid."""
        self._checksums = {}
        sees_devices = self._num_flushes <= 4 or self._num_flushes % _EVERY_ON_DEVICES == 1
        found: list[Checksum] = []
        with DisableTorchFunction():
            for item in _plain_arguments(graphs):
                if is_comparable(item) and (sees_devices or item.device.type == "cpu"):
                    checksum = checksum_of(item)
                    self._checksums[id(item)] = (item, checksum)
                    found.append(checksum)
        return checksum_of_all(found)


def _entries_of_draw(draw: _Draw) -> list[Entry]:
    function, where, _ = draw
    name = name_of(function)
    hint = DRAWN_BY_A_LOADER if name.endswith(".random_") else SAME_DRAWS
    return [(digest_of(name), f"{name} draws random numbers at {format_where(where)}", hint)]


def _plain_arguments(graphs: Iterable[Graph]) -> Iterable[Any]:
    """Yields the arguments of calls and backwards that every rank has, each object once."""
    found: dict[int, Any] = {}
    for graph in graphs:
        for call in graph.calls:
            if call.target is torch.clone:  # how a plain tensor becomes a recorded one, to be written into
                continue
            for argument in call.arguments or ():
                if type(argument) is not Value:
                    found[id(argument)] = argument
                elif argument.stage == EVERYWHERE:
                    found[id(argument.data)] = argument.data
        for backward in graph.backwards:
            for gradient in backward.gradients:
                item = plain_of(gradient)
                found[id(item)] = item
    return found.values()


def _place_of(where: Any) -> str:
    """Returns a line of the program, as ranks are told of it."""
    return "" if where is None else f"{where[0].co_filename}:{where[1]}"


def _meta_text(tensor: Any) -> str:
    if not isinstance(tensor, torch.Tensor):
        return type(tensor).__name__
    text = f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
    is_plain = tensor.layout is not torch.strided or tensor.is_contiguous()
    return text if is_plain else f"{text} of strides {list(tensor.stride())}"


def _circumstances(call: Call) -> str:
    """Returns what a call depends on besides its tensors, for people."""
    words: list[str] = []
    plain = list(_plain_values(call.template))
    if plain:
        words.append("with " + ", ".join(plain))
    if type(call.target) is Leaf:
        training = [module.training for module in call.target.modules]
        words.append("in training" if all(training) else "partly in training" if any(training) else "in evaluation")
        frozen = sum(not item.tensor.requires_grad for item in call.target.placed if item.is_parameter)
        words += [f"{frozen} of its parameters frozen"] if frozen else []
    if call.modes:
        words += [] if call.modes[0] else ["without gradient"]
        words += [f"autocast to {dtype}" for _, dtype, *_ in call.modes[2]]
    if call.path is not None:
        words.append(f"draw {call.path[-1]} of its kind")
    return f" ({'; '.join(words)})" if words else ""


def _plain_values(template: Template) -> Iterator[str]:
    """Yields the plain values in the template of a call's arguments."""
    if not isinstance(template, tuple):
        return
    if len(template) == 3 and isinstance(template[1], type) and not isinstance(template[2], tuple):
        yield repr(template[2])[:40]
        return
    for part in template:
        yield from _plain_values(part)
