"""Watching what a run does: the memory it reads and writes, the tensors it makes, its random draws."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from farspan.call.draws.drawing_functions import DRAWS
from farspan.call.draws.generators import is_as_in_python, kept, put_in_python, states_in_python
from farspan.call.draws.mersenne import is_same_state
from farspan.call.draws.movement import BY_SHAPE, Draws, Operation, keep_operation
from farspan.call.draws.scope import active
from farspan.call.leaf import LeakError
from farspan.call.pytree.holes import numbers_of
from farspan.call.pytree.template import flatten
from farspan.torch_private import TorchDispatchMode, as_it_is, flops_of, is_fake, no_dispatch, set_version, tensors_in
from farspan.torch_private.flags import is_in_checkpoint

__all__ = [
    "Generators",
    "Made",
    "NoteFunction",
    "Watch",
    "is_switched_off",
    "noted_generators",
    "storage_id",
    "untouched_by_torch",
    "untouched_generators",
]

_STATISTICS = ("running_mean", "running_var")
Made = list["weakref.ref[torch.Tensor]"]


class NoteFunction(TorchFunctionMode):
    """Notes for `watch` which torch function is running; a mode changes what some functions do, so it has its own
    run."""

    def __init__(self, watch: Watch) -> None:
        super().__init__()
        self.watch = watch

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.watch.function = func
        try:
            return func(*args, **(kwargs or {}))
        finally:
            self.watch.function = None


class Watch(TorchDispatchMode):
    """Note whether an operation draws random numbers, and which memory is written (by schema: fakes do not count
    the versions of `_foreach_*` arguments).
    """

    def __init__(
        self, made: Made, outside: Collection[int], *, in_symbols: bool = False, is_rehearsal: bool = False
    ) -> None:
        super().__init__()
        self._is_rehearsal = is_rehearsal
        """Whether real tensors that the run writes into are put back in the end."""
        self._kept: list[tuple[torch.Tensor, int, torch.Tensor]] = []
        """Those, or views of them, with their version and a copy from before each time that they were written into."""
        self.has_drawn = False
        self.operations: list[Operation] = []
        """The operations that have drawn, from torch's CPU generator, as many numbers as their shapes say."""
        self.can_foresee = True
        """False if other draws have happened, too."""
        self.own_generators: list[Any] = []
        """The generators that the call draws from, but for torch's default one."""
        self.function: Any = None
        """The torch function that is running, where this is known."""
        self.written: set[int] = set()
        self.updated: set[int] = set()
        """Running statistics that an operation writes although its schema does not say so."""
        self.written_plain: dict[int, torch.Tensor] = {}
        """The tensors, by id, that are no fakes and were written, themselves or through a view of them."""
        self._viewed: dict[int, tuple[torch.Tensor, Any]] = {}
        """For the memory of fake views, by id, the real tensors of which they are views; and that memory."""
        self.used: set[int] = set()
        """The memory that any operation reads or writes."""
        self.is_checkpointed = False
        """True if a checkpoint will compute a part of it again."""
        self.goes_back = False
        """True if it has run a backward, so that what it gives has derivatives of operations behind it."""
        self.made = made
        self.flops = 0
        self.in_symbols = in_symbols
        """True if operations are counted in symbols too; otherwise those whose sizes depend on data are left out."""
        self.outside = outside

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tensors = tensors_in((args, kwargs))
        if any(id(item) in self.outside for item in tensors):
            raise LeakError(f"{func} reaches a parameter outside the call")
        self.used.update(map(storage_id, tensors))
        draws = False
        schema = func._schema.arguments
        given = {}
        self.goes_back |= "_backward" in func.__name__
        self.is_checkpointed = self.is_checkpointed or is_in_checkpoint()
        if "batch_norm" in func.__name__:
            given = {item.name: value for item, value in zip(schema, args, strict=False)} | (kwargs or {})
        if given.get("training", given.get("use_input_stats")):
            self.updated.update(storage_id(given[name]) for name in _STATISTICS if given.get(name) is not None)
        if func._schema.is_mutable or torch.Tag.nondeterministic_seeded in func.tags:
            given = {item.name: value for item, value in zip(schema, args, strict=False)} | (kwargs or {})
            if torch.Tag.nondeterministic_seeded in func.tags and not is_switched_off(func, given):
                self.has_drawn = draws = True
                if self.function is not None:
                    DRAWS.add(self.function)
            for item in schema:
                if item.alias_info is not None and item.alias_info.is_write and given.get(item.name) is not None:
                    value = given[item.name]
                    values = value if isinstance(value, (list, tuple)) else (value,)
                    self.written.update(map(storage_id, values))
                    for part in values:
                        plain = self._plain_behind(part)
                        if plain is not None:
                            self.written_plain[id(plain)] = plain
                            self._keep(part)
        result = as_it_is(func, args, kwargs or {}, func(*args, **(kwargs or {})))
        if not func._schema.is_mutable and any(item.alias_info is not None for item in func._schema.returns):
            self._note_views(func, args, kwargs or {}, result)
        if draws:
            self._note_draw(func, args, kwargs or {}, result)
        flops = flops_of(func, args, kwargs or {}, result)
        self.flops += flops if isinstance(flops, int) or self.in_symbols else 0
        self.made += [weakref.ref(item) for item in tensors_in(result)]
        return result

    def __exit__(self, *raised: object) -> None:
        super().__exit__(*raised)
        with no_dispatch(), torch.no_grad():
            for tensor, version, copy in reversed(self._kept):
                tensor.data.copy_(copy)
                set_version(tensor, version)
        self._kept.clear()

    def _keep(self, part: torch.Tensor) -> None:
        """A tensor is about to be written into: fakes are not, but what the program holds would be."""
        if self._is_rehearsal and not is_fake(part) and not part.is_meta:
            with no_dispatch(), torch.no_grad():
                self._kept.append((part, part._version, part.detach().clone()))

    @contextmanager
    def paused(self) -> Iterator[None]:
        """What the body runs is not the call's: it uses no memory, and is no work."""
        used, flops = set(self.used), self.flops
        try:
            yield
        finally:
            self.used, self.flops = used, flops

    def _note_views(self, func: Any, args: Any, kwargs: dict[str, Any], result: Any) -> None:
        schema = func._schema.arguments
        given = {item.name: value for item, value in zip(schema, args, strict=False)} | kwargs
        for item in schema:
            value = given.get(item.name)
            plain = self._plain_behind(value) if item.alias_info is not None and torch.is_tensor(value) else None
            if plain is not None:
                made = [part for part in tensors_in(result) if is_fake(part)]
                self._viewed.update((storage_id(part), (plain, part.untyped_storage())) for part in made)

    def _plain_behind(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Returns the tensor that is no fake, and in whose memory `tensor` lies."""
        if not is_fake(tensor):
            return tensor
        known = self._viewed.get(storage_id(tensor))
        return None if known is None else known[0]

    def _note_draw(self, func: Any, args: Any, kwargs: dict[str, Any], result: Any) -> None:
        generator = kwargs.get("generator")
        if generator not in (None, torch.default_generator):
            self.own_generators.append(generator)
            return
        made = tensors_in(result)
        if made and made[0].device.type != "cpu":
            return  # that device has a generator of its own
        if func.namespace != "aten" or func._overloadpacket.__name__ not in BY_SHAPE:
            self.can_foresee = False
            return
        given = {name: value for name, value in kwargs.items() if name != "generator"}
        if made and any(item.name == "dtype" for item in func._schema.arguments):
            given["dtype"] = made[0].dtype  # None is what torch's default says now
        template, tensors = flatten((tuple(args), given))
        keep_operation(func.name(), func)
        about = tuple([flatten((tuple(item.shape), tuple(item.stride()), item.dtype))[0] for item in tensors])
        numbers: list[Any] = []
        numbers_of((template, about), numbers)
        if not self.in_symbols and any(isinstance(number, torch.SymInt) for number in numbers):
            self.can_foresee = False  # as many as there are elements of some kind in the data
            return
        self.operations.append((func.name(), template, about))

    def draws(self) -> Draws | None:
        """Returns what has been drawn from torch's CPU generator; None where that does not follow from shapes."""
        return Draws(self.operations, has_own=bool(self.own_generators)) if self.can_foresee else None


class Generators:
    """The generators that a run has used."""

    have_drawn = False
    """True if Python's or numpy's generator was used."""
    has_torch_drawn = False
    """True if torch's generator has moved, where that is allowed."""
    were_seeded = False
    """True if torch's generator was seeded, or given another state."""


def is_switched_off(func: Any, given: dict[str, Any]) -> bool:
    """Returns whether an operation that may draw random numbers does not: dropout of probability 0, or not in
    training."""
    if func._overloadpacket in _DRAW_ALWAYS:
        return False
    values = {item.name: given.get(item.name, item.default_value) for item in func._schema.arguments}
    return any(values.get(name, 1) == 0 for name in ("dropout_p", "p", "dropout", "train", "training"))


_aten = torch.ops.aten
_DRAW_ALWAYS = frozenset([_aten.bernoulli, _aten.bernoulli_, _aten.geometric, _aten.geometric_])
"""Those whose `p` is what they draw, not whether they do; it may be a tensor."""


@contextmanager
def untouched_generators() -> Iterator[Generators]:
    """Leave Python's, numpy's and torch's generators as they were, and note whether the first two were used."""
    noted = Generators()
    with kept((torch.default_generator,)):
        states, num_seedings = states_in_python(), active.num_seedings
        try:
            yield noted
        finally:
            noted.have_drawn = not is_as_in_python(states)
            noted.were_seeded = active.num_seedings != num_seedings
            if noted.have_drawn:
                put_in_python(states)


@contextmanager
def untouched_by_torch() -> Iterator[Generators]:
    """Leave torch's generator as it was, where only torch's own functions run: they use no other."""
    with kept((torch.default_generator,)):
        yield Generators()


@contextmanager
def noted_generators() -> Iterator[Generators]:
    """Note whether Python's, numpy's and torch's generators were used, and let that be."""
    noted = Generators()
    states, state = states_in_python(), torch.default_generator.get_state()
    yield noted
    noted.have_drawn = not is_as_in_python(states)
    noted.has_torch_drawn = not is_same_state(state, torch.default_generator.get_state())


def storage_id(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata if tensor.layout is torch.strided else id(tensor)
