"""Seeding what draws: each call of a drawing torch function runs under a seed that its path gives.

recorded world                                executed world
---------------------------------------------------------------------------------------------
container's frame: Recorder.frame             leaf's frame, continued from its call: Scope.frame
dropout(lazy)      -> Call.path, run later    dropout(plain) -> seeded when the mode sees it
torch.rand(plain)  -> seeded at once          torch.rand     -> seeded when the mode sees it
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import CheckpointFunction

from farspan.call.draws.drawing_functions import DRAWS, has_own_generator
from farspan.call.draws.frame import Frame, Path, key_of_function, key_of_module, mixed, seed_of
from farspan.call.draws.generators import (
    GENERATORS,
    all_generators,
    host_seed,
    kept,
    kept_in_python,
    put_back_in_python,
    states_in_python,
)
from farspan.call.draws.mersenne import is_same_state
from farspan.devices import generators_of
from farspan.errors import RecordError
from farspan.graph import Call
from farspan.torch_private import is_compiled, without_modes_of

__all__ = ["Scope", "active", "called_inside", "draw_at_once", "replayed", "seeded", "seeded_on", "way_back"]

_NOTHING = contextlib.nullcontext()


class Scope(TorchFunctionMode):
    """A mode for the time in which a leaf that draws is running: it follows the module calls inside, and seeds each
    drawing function."""

    def __init__(self, frame: Frame, generators: Sequence[torch.Generator]) -> None:
        super().__init__()
        self.frame = frame
        self.generators = generators
        self.seed = generators[0].initial_seed()
        """The seed that was set last. Where torch has another one by now, the user's code has set its own."""

    @property
    def recorder(self) -> Any:
        """The recorder, by which `without_modes_of` finds this mode."""
        return self

    @property
    def is_in_charge(self) -> bool:
        return self.generators[0].initial_seed() == self.seed

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in DRAWS and has_own_generator(kwargs):
            active.num_own_draws += 1
        elif func in DRAWS and not torch.compiler.is_compiling() and active.scope is self:
            key = key_of_function(func)
            path = (self.frame.key, key, self.frame.count(key))
            if self.is_in_charge:
                self.seed_draws(path)
        return func(*args, **(kwargs or {}))

    def seed_draws(self, path: Path) -> None:
        self.seed = seed_of(path)
        for generator in self.generators:
            generator.manual_seed(self.seed)

    def call_module(self, module: torch.nn.Module, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run `call(module, ...)`, a module call of the model."""
        outer = self.frame
        self.frame = outer.inside(key_of_module(module))
        try:
            if is_compiled(module):
                with self._aside():
                    return call(module, *args, **kwargs)
            return call(module, *args, **kwargs)
        finally:
            self.frame = outer

    @contextlib.contextmanager
    def _aside(self) -> Iterator[None]:
        """Function modes and compiled code do not mix: one seed for all that the body draws."""
        if self.is_in_charge:
            self.seed_draws((self.frame.key, 0, 0))
        active.scope = None
        try:
            with without_modes_of(self):
                yield
        finally:
            active.scope = self


class _Active(threading.local):
    scope: Scope | None = None
    """The scope of the leaf that draws and is running, if there is one."""
    recorder: Any = None
    """Records this thread's program."""
    mode: Any = None
    """The function mode by which the recorder sees this thread's torch functions."""
    units: Any = None
    """The units of remat whose forwards are running: they follow the module calls."""
    num_own_draws = 0
    """Counts a leaf's draws from generators of its own."""
    draws_plainly = False
    """True while a leaf that draws is running, and draws what the plain program draws."""
    draws_from_own = False
    """True if that leaf draws from a generator of its own."""
    num_seedings = 0
    """Counts how often code that runs has seeded torch's generator, or set its state."""


active = _Active()
"""The followers of this thread's module calls."""


def called_inside(child: int, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Call `function`, whose draws are those of a call of `child`; functions are followed where modules are."""
    follower: Any = active.scope
    if follower is None:
        follower = active.recorder
        if follower is None or not follower.is_recording or follower.frame is follower.root:
            return function(*args, **kwargs)
    outer = follower.frame
    follower.frame = outer.inside(child)
    try:
        return function(*args, **kwargs)
    finally:
        follower.frame = outer


def seeded(call: Call, tensors: Sequence[torch.Tensor]) -> contextlib.AbstractContextManager[None]:
    """Lets `call` draw, while the body runs it on `tensors`, what it draws in the plain program, or what depends on its
    path alone.
    """
    if not call.entry.is_random:
        return _drawing_nothing(call) if getattr(call.target, "is_resolved", False) else _NOTHING
    if call.draws is not None:
        return call.draws.stretch.running(call, tensors)
    generators = generators_of([*tensors, *(item.tensor for item in getattr(call.target, "placed", ()))])
    return seeded_on(call, generators, in_python=call.entry.is_random_in_python)


@contextlib.contextmanager
def _drawing_nothing(call: Call) -> Iterator[None]:
    """The body runs a call that depends on data, and has drawn nothing before.

    Raises:
        RecordError: It draws now, at its owner only.
    """
    default = torch.default_generator
    with GENERATORS:
        before, num_seedings = default.get_state(), active.num_seedings
        yield
        if num_seedings == active.num_seedings and not is_same_state(before, default.get_state()):
            raise RecordError(
                f"{call.describe()} has drawn random numbers, and had drawn none before.",
                why="whether it draws depends on the data: other calls have been given these numbers.",
                hint="draw in each call alike, or farspan.distribute(model, seed=0): its draws are then farspan's own",
            )


@contextlib.contextmanager
def seeded_on(call: Call, generators: Sequence[torch.Generator], *, in_python: bool = False) -> Iterator[None]:
    """Lets `call`, while the body runs it, draw from these generators what depends on its path alone.

    Args:
        call: Runs in the body.
        generators: Of torch.
        in_python: Whether Python's and numpy's generators are meant too.
    """
    path = call.path
    assert path is not None
    seed = seed_of(path)
    with kept(generators), kept_in_python(seed) if in_python else _NOTHING:
        for generator in generators:
            generator.manual_seed(seed)
        if call.target in DRAWS:
            yield
            return
        key, child, number = path
        frame = Frame(key)
        frame.counts[child] = number  # the target's own call comes next, and finds its frame
        if getattr(call.target, "function", None) is CheckpointFunction:
            frame = Frame(mixed(path))  # has no frame of its own, so that checkpointing a module changes nothing
        with _running(Scope(frame, generators)):
            yield


@contextlib.contextmanager
def _running(scope: Scope) -> Iterator[None]:
    outer = active.scope
    active.scope = scope
    try:
        with scope:
            yield
    finally:
        active.scope = outer


def way_back(*, in_python: bool) -> Callable[[], contextlib.AbstractContextManager[None]]:
    """Remember where the leaf that is running stands: in what the returned function gives, it draws the same again.

    Args:
        in_python: Whether it draws from Python's or numpy's generator too.
    """
    scope = active.scope
    generators = [*(() if scope is None else scope.generators)]
    if active.draws_plainly:
        generators.append(torch.default_generator)
    if not generators:
        return contextlib.nullcontext
    states = [generator.get_state() for generator in generators]
    states_of_python = states_in_python() if in_python else None
    frame, seed = (None, 0) if scope is None else (scope.frame.copy(), scope.seed)

    @contextlib.contextmanager
    def back() -> Iterator[None]:
        with kept(generators), put_back_in_python(states_of_python) if in_python else _NOTHING:
            for generator, state in zip(generators, states, strict=True):
                generator.set_state(state)
            if scope is None or frame is None:
                yield
                return
            again = Scope(frame.copy(), scope.generators)
            again.seed = seed
            with _running(again):
                yield

    return back


def draw_at_once(frame: Frame, first_seed: int, function: Any, args: Any, kwargs: Any) -> Any:
    """Run a drawing function on plain tensors in a container's forward.

    Args:
        frame: Of the container.
        first_seed: What torch was seeded with when the model was called; another seed by now is the user's own.
        function: Draws.
        args: Of the call.
        kwargs: Of the call.
    """
    key = key_of_function(function)
    path = (frame.key, key, frame.count(key))
    if host_seed() != first_seed:
        return function(*args, **kwargs)
    generators = all_generators()
    with kept(generators):
        seed = seed_of(path)
        for generator in generators:
            generator.manual_seed(seed)
        return function(*args, **kwargs)


def replayed(function: Callable[..., Any], *, is_first: bool) -> Callable[..., Any]:
    """`function`, which a checkpoint runs again in the backward: it will draw the same numbers as now.

    Args:
        function: Is run by the checkpoint.
        is_first: Whether the returned function is also what runs now, as its first call.
    """
    scope = active.scope
    if scope is None or not scope.is_in_charge:
        return function
    frame, generators = scope.frame.copy(), scope.generators
    is_now = is_first

    def again(*args: Any, **kwargs: Any) -> Any:
        nonlocal is_now
        if is_now:
            is_now = False
            return function(*args, **kwargs)
        with kept(generators), _running(Scope(frame.copy(), generators)):
            return function(*args, **kwargs)

    return again
