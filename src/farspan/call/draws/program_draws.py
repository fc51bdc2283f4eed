"""The plain program's random numbers: each call draws what it would draw in one process, whoever runs it and when.

recording (every rank)                                  running (the owner)
-----------------------------------------------------------------------------------------------------
a call that draws takes the next place of a stretch     the generator is put where the call's place begins,
the program draws or reads the generator:    this is    which is nothing to do after the call before it;
brought to the end of the stretch, which is then over   the call must move it as far as foreseen

Between these torch's own generator lags behind: it stands where the stretch began. After each flush it stands where
the plain program's stands, on every rank.
"""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from farspan.call.draws.frame import key_of, seed_of
from farspan.call.draws.generators import (
    GENERATORS,
    is_as_in_python,
    kept,
    put_in_python,
    states_in_python,
)
from farspan.call.draws.mersenne import BLOCK, cached_normals, is_same_state, position_of
from farspan.call.draws.movement import Draws
from farspan.call.draws.scope import active, seeded_on
from farspan.call.draws.stretch import Place, Point, Stretch
from farspan.devices import generators_of
from farspan.errors import RecordError

if TYPE_CHECKING:
    from farspan.graph import Call

__all__ = ["ProgramDraws", "around_backward"]

_SEED = "farspan.distribute(model, seed=0): the model's draws are then farspan's own"


class ProgramDraws:
    """The random numbers of one rank's program, and where the program stands in them."""

    def __init__(self) -> None:
        self.seed: int | None = 0
        """The seed of all paths, which seed what calls draw; None where calls draw what the plain program draws."""
        self.group = 0
        """The number of this rank's group: what the model draws differs between groups."""
        self.first_seed = 0
        """The seed that torch had when the outermost module was called."""
        self.generator = torch.default_generator
        """The program's. Where ranks are threads of one process, each has one of its own, and borrows torch's."""
        self.repeated: Call | None = None
        """The call whose numbers those that are recorded now draw again: they compute it once more."""
        self._stretch: Stretch | None = None
        self._used: list[Stretch] = []
        """The stretches of which something may still have to run."""
        self._at: tuple[Stretch, Point] | None = None
        """The place at which the calls that have run have left the generator."""
        self._left: torch.Tensor | None = None
        """The generator's state at `_at`."""
        self._start: torch.Tensor = torch.empty(0)
        """The generator's state before the call that is running."""
        self._lent: tuple[Stretch, Point, torch.Tensor] | None = None
        """The state that the program was given last as the generator's."""
        self._resting: torch.Tensor | None = None
        """The program's state, if calls have run since, and no stretch is open."""
        self._is_running = False

    @property
    def is_plain(self) -> bool:
        return self.seed is None

    @property
    def name(self) -> str:
        """Returns the beginning of all paths."""
        return f"seed {self.seed or 0}" + (f" of group {self.group}" if self.group else "")

    # Recording.

    def place_of(self, draws: Draws | None) -> Place:
        """Returns the place in the random numbers of the call that is being recorded, which is known to draw
        `draws`."""
        stretch = self._stretch
        if stretch is None:
            stretch = self._stretch = Stretch(self.generator.get_state(), self.running)
            self._used.append(stretch)
        moves = None if draws is None else draws.moves(stretch.cached)
        if moves is None:
            return Place(stretch, stretch.end, None, None)
        return Place(stretch, *_in_order(moves, stretch.append(moves)))

    def settle(self) -> None:
        """Bring the program's generator to where it stands in the plain program."""
        stretch = self._stretch
        if stretch is not None:
            if not self._is_running:
                self._check_unseen(stretch.state, self.generator.get_state())
            if self._at is not None and self._left is not None:
                self._at[0].remember(self._at[1], self._left)
            state = stretch.state_at(stretch.end)
            stretch.remember(stretch.end, state)
            self.generator.set_state(state)
        elif self._resting is not None:
            self.generator.set_state(self._resting)
        self._stretch = self._at = self._left = self._resting = None
        self._is_running = False

    def end_flush(self) -> None:
        """Ends the flush: all that was recorded has run."""
        self.settle()
        for stretch in self._used:
            stretch.forget()
        self._used.clear()
        self._lent = None

    def now(self, function: Any, args: Any, kwargs: Any) -> Any:
        """Run a function that draws, on the program's own tensors."""
        if not self.is_plain or self.generator is torch.default_generator:
            self.settle()
            return function(*args, **kwargs)
        with GENERATORS, kept((torch.default_generator,)):
            self.settle()
            torch.default_generator.set_state(self.generator.get_state())
            try:
                return function(*args, **kwargs)
            finally:
                self.generator.set_state(torch.default_generator.get_state())

    def state(self) -> torch.Tensor:
        """Returns the generator's state, for the program to keep; nothing changes by it."""
        stretch = self._stretch
        if stretch is None:  # calls that have run since may have left torch's own where they ended
            return self.generator.get_state() if self._resting is None else self._resting.clone()
        state = stretch.state_at(stretch.end)
        stretch.remember(stretch.end, state)
        self._lent = (stretch, stretch.end, state)
        return state.clone()

    def set(self, change: Callable[[torch.Generator], Any]) -> Any:
        """Sets the generator to another state, which the program has given."""
        self._stretch = None
        return change(self.generator)

    def set_state(self, state: torch.Tensor) -> None:
        """The program gives its generator this state; often the one it had before, which it has asked for."""
        self.set(lambda generator: generator.set_state(state))
        if self._lent is not None:
            stretch, end, given = self._lent
            if stretch in self._used and stretch.end == end and is_same_state(given, state):
                self._stretch = stretch  # as if nothing had been: one rank alone may have put it back
                self.generator.set_state(stretch.state)

    def mark(self) -> Callable[[], None]:
        """Notes where all generators stand in the plain program; returns a function that brings them back there."""
        stretch, in_python = self._stretch, states_in_python()
        end = None if stretch is None else stretch.end
        state = self.generator.get_state() if stretch is None else None

        def bring_back() -> None:
            put_in_python(in_python)
            if stretch is None or end is None:
                assert state is not None
                self.set_state(state)
            elif self._stretch is not stretch or stretch.end != end:
                self.set_state(stretch.state_at(end))

        return bring_back

    def end_interrupted(self, state: torch.Tensor | None) -> None:
        """Some of what was recorded has not run: the generator stands at `state`, or where it stood before."""
        if self.is_plain and state is not None:
            self.set_agreed(state)
        self.end_flush()

    # Running.

    @contextlib.contextmanager
    def running(self, call: Call, tensors: Sequence[torch.Tensor]) -> Iterator[None]:
        """Lets `call` draw, while the body runs it on `tensors`, what it draws in the plain program."""
        place: Place = call.draws
        others = generators_of([*tensors, *(item.tensor for item in getattr(call.target, "placed", ()))])[1:]
        default = torch.default_generator
        is_borrowed = default is not self.generator
        with GENERATORS, kept((default,)) if is_borrowed else contextlib.nullcontext():
            self._go_to(place, call)
            is_of_group = self.group > 0 and place.end is not None and not place.is_same_in_groups
            if is_of_group:
                default.manual_seed(seed_of((key_of(self.name), zlib.crc32(bytes(self._start.numpy())), 0)))
            in_python = None if place.end is not None else states_in_python()
            active.draws_plainly = True
            active.draws_from_own = call.entry.draws is not None and call.entry.draws.has_own
            try:
                with seeded_on(call, others) if others else contextlib.nullcontext():
                    yield
            except Exception:
                place.state = default.get_state()  # what it has drawn, it has drawn in the plain program too
                raise
            finally:
                active.draws_plainly = active.draws_from_own = False
                self._at = None
            if is_of_group and place.end is not None:  # the program itself draws the same in all groups
                default.set_state(place.stretch.state_at(place.end))
            after = default.get_state()
            if place.end is None:
                if not call.entry.is_foreseen and call.raised is None:  # it has come to nothing
                    put_in_python(in_python)
                    default.set_state(self._start)
                    return
                place.state = after
                place.has_moved = not (is_as_in_python(in_python) and is_same_state(after, self._start))
                return
            if not is_of_group:
                self._verify(call, place, after)
            self._at, self._left = (place.stretch, place.end), after

    def _go_to(self, place: Place, call: Call) -> None:
        default = torch.default_generator
        is_borrowed = default is not self.generator
        if not self._is_running and not is_borrowed:
            state = default.get_state()
            if self._stretch is None:
                self._resting = state
            else:
                self._check_unseen(self._stretch.state, state)
            self._is_running = True
        at, left = self._at, self._left
        if at is not None and left is not None:
            if not is_borrowed:
                self._check_unseen(left, default.get_state())
            if at[0] is place.stretch and at[1] == place.start:
                self._start = left
                if is_borrowed:
                    default.set_state(left)
                return
            at[0].remember(at[1], left)
        self._start = place.stretch.state_at(place.start)
        default.set_state(self._start)

    def _verify(self, call: Call, place: Place, after: torch.Tensor) -> None:
        """Raise if the call has moved the generator otherwise than foreseen.

        The first time all is compared; then where in its block of 624 words the state stands.
        """
        moves, verified = place.moves, call.entry.draws.verified
        assert moves is not None and place.end is not None
        kind = cached_normals(self._start)
        if kind not in verified:
            place.stretch.remember(place.start, self._start)
            is_right = is_same_state(place.stretch.state_at(place.end), after)
            verified.add(kind)
        else:
            wanted = (position_of(self._start) + moves.count - 1) % BLOCK + 1
            is_right = position_of(after) == wanted and cached_normals(after) == moves.cached
        if not is_right:
            raise RecordError(
                f"{call.describe()} has drawn more or fewer random numbers than foreseen.",
                why="how many depends on the data, or on code that torch.compile has made: other calls have been\n"
                "given the numbers that come after those foreseen.",
                hint=_SEED,
            )

    def set_agreed(self, state: torch.Tensor) -> None:
        """Sets the plain program's generator to the state that all ranks have agreed on."""
        self._stretch = self._at = self._left = None
        self._resting = None
        self._is_running = False
        self.generator.set_state(state)

    def _check_unseen(self, wanted: torch.Tensor, found: torch.Tensor) -> None:
        if not is_same_state(wanted, found):
            raise RecordError(
                "torch's random generator was used where farspan does not see it.",
                why="by torch.default_generator itself, or by code that is not Python; what the model draws has been\n"
                "recorded, and has not run yet.",
                hint="call farspan.flush() before it, or use torch.manual_seed, torch.get_rng_state, torch.rand, ...",
            )

    @contextlib.contextmanager
    def around_backward(self, describe: Callable[[], str]) -> Iterator[None]:
        """The body is a backward: in the plain program it runs at another time, and must draw nothing."""
        default = torch.default_generator
        if not self.is_plain or self.generator is not default:
            with kept((default,)):
                if not self.is_plain:
                    default.manual_seed(seed_of((key_of(self.name), key_of(describe()), 0)))
                yield
            return
        before, num_seedings = default.get_state(), active.num_seedings
        yield
        after = default.get_state()
        if torch.equal(before, after) or is_same_state(before, after):
            return
        if active.num_seedings == num_seedings:
            raise RecordError(
                f"the {describe()} draws random numbers.",
                why="a backward runs when all micro-batches have been recorded: those that come next have been given\n"
                "these numbers. It draws in an autograd function, or in a checkpoint with preserve_rng_state=False.",
                hint=_SEED,
            )
        default.set_state(before)  # it has drawn what it has seeded itself


def around_backward(describe: Callable[[], str]) -> contextlib.AbstractContextManager[None]:
    """Runs a backward in the body: it must not move the program's generator."""
    recorder = active.recorder
    return contextlib.nullcontext() if recorder is None else recorder.draws.around_backward(describe)


def _in_order(moves: Any, ends: tuple[Point, Point]) -> tuple[Point, Any, Point]:
    return ends[0], moves, ends[1]
