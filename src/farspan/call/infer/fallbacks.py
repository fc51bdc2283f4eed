"""Finds out metadata, in the order of the fallbacks: on fakes; on fakes with symbolic sizes; by a real run, once or
each time.

a call like one before                  the cache
like several before, but for numbers    symbols (`sizes.py`)
most calls                              fakes
x[x > 0].sum()                          fakes with symbols: none comes out
no rule for fakes, `.item()` inside,    resolved: the owner runs the call and broadcasts; expected to stay so after
a module that raises an exception       it gave the same twice
nonzero, a mask as index                resolved each time
"""

from __future__ import annotations

import sys
import traceback
import weakref
from collections.abc import Callable, Collection, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch

from farspan.call.function_call import FunctionCall
from farspan.call.infer.entry import Entry, Raised, Recent, Unknown, interned
from farspan.call.infer.observe import DynamicShapeError, digest_of_call
from farspan.call.infer.predict import predict
from farspan.call.infer.symbolic import Family, Numbers, generalise
from farspan.call.leaf import Leaf, LeakError
from farspan.call.modes import Modes
from farspan.call.naming import is_torchs_own, name_of
from farspan.call.side_effects.leaks import remove_leaked
from farspan.call.surroundings.around import AroundError
from farspan.errors import FarspanError
from farspan.graph import Meta
from farspan.launch.raised.tracebacks import format_error
from farspan.launch.rank.interrupts import signals_held
from farspan.progress import SpreadWork
from farspan.torch_private import (
    DynamicOutputShapeException,
    is_fake_limit,
    is_not_torchs_device,
    lacks_data,
    silent_fakes,
)

if TYPE_CHECKING:
    from farspan.call.leaf import Target
    from farspan.graph import Template

__all__ = ["MetadataCache"]


def _find_out(
    target: Target, template: Template, metas: Sequence[Meta], modes: Modes, placed: Collection[int]
) -> Entry | Unknown:
    """Return what a call will give, or that it must be run to know.

    Args:
        target: What is called, with arguments of this `template`, with tensors of these `metas`, under these `modes`.
        placed: Ids of the parameters and buffers that have an owner.

    Raises:
        LeakError: The call has kept something of the run outside itself; it has been taken away there. Or it names a
            place, or uses a parameter of another module: only its parts can be called.
        Whatever an op raises on such arguments (a shape error, say). What a module raises comes from a real run of it,
            for what it has drawn, written and counted before that counts in the plain program.
    """
    made: list[weakref.ref[torch.Tensor]] = []
    handled = sys.exc_info()[1]
    raised: Raised | None = None
    outside = placed if type(target) is Leaf else ()
    try:
        with silent_fakes():
            entry = _predict_on_fakes(target, template, metas, modes, made, outside)
    except LeakError as error:
        _forget_frames(error, handled)
        remove_leaked(made)
        raise
    except Exception as error:
        if is_not_torchs_device(error):
            raise LeakError(f"{name_of(target)} moves a tensor to a place") from error
        is_of_users = type(target) in (Leaf, FunctionCall) and not isinstance(error, FarspanError)
        if not is_of_users and not is_fake_limit(error):
            raise
        if not is_fake_limit(error):
            raised = Raised(error, format_error(error))
        limit = error
    else:
        if remove_leaked(made) and type(target) is Leaf:
            raise LeakError(f"{name_of(target)} keeps a tensor outside itself")
        return entry
    _forget_frames(limit, handled)
    remove_leaked(made)
    if isinstance(limit, DynamicOutputShapeException):
        try:
            with silent_fakes():
                return predict(target, template, metas, modes, is_symbolic=True, outside=outside)
        except LeakError:
            raise
        except DynamicShapeError:
            return Unknown(name_of(target), is_dynamic=True)
        except Exception:  # symbols do not help here: what fakes cannot tell, a real run will
            return Unknown(name_of(target), is_dynamic=False)
    return Unknown(name_of(target), is_dynamic=False, raised=raised, is_refused=not lacks_data(limit))


def _predict_on_fakes(
    target: Target,
    template: Template,
    metas: Sequence[Meta],
    modes: Modes,
    made: list[weakref.ref[torch.Tensor]],
    outside: Collection[int],
) -> Entry:
    """Run `target` on fakes; once more where something around it has changed, for a thread of the program may have done
    that: what the call itself changes it changes again. Else one rank would call the parts of what others call whole.
    """
    handled = sys.exc_info()[1]
    try:
        return predict(target, template, metas, modes, made=made, outside=outside)
    except AroundError as error:
        _forget_frames(error, handled)
    return predict(target, template, metas, modes, made=made, outside=outside)


def _forget_frames(error: BaseException, handled: BaseException | None) -> None:
    """An error holds the frames of the run, and they what it has made; so do the errors that it came of, but for one
    that the program `handled` when the run began.
    """
    errors: list[BaseException | None] = [error]
    seen = {id(handled)}
    while errors:
        each = errors.pop()
        if each is not None and id(each) not in seen:
            seen.add(id(each))
            traceback.clear_frames(each.__traceback__)
            each.__traceback__ = None
            errors += [each.__cause__, each.__context__]


_of_functions = Recent()
"""What calls of torch's own functions give, for all recorders of this process: it depends on nothing but the key."""


class MetadataCache:
    """Entries by call, argument template, argument metadata and modes."""

    def __init__(self, aside: Callable[..., Any], placed: Collection[int]) -> None:
        self.aside = aside
        """Runs a function while nothing is recorded: (function, *its arguments)."""
        self.num_collected = 0
        """The value of `num_runs` when garbage was collected last."""
        self.placed = placed
        """Ids of the parameters and buffers that have an owner."""
        self.entries = Recent()
        """An entry, or an `Unknown`, by what is called with what."""
        self.families = Recent()
        """Families of calls that differ in numbers only."""
        self.known = Recent()
        """Template and entry of ordinary calls whose arguments are tensors and plain values, by their own keys."""
        self.num_runs = 0
        """Number of calls that have run on fakes."""
        self.trying = SpreadWork("trying the model on fake tensors", "call")
        """What these take since the program last ran what it had recorded."""

    def lookup(self, target: Target, template: Template, metas: Sequence[Meta], modes: Modes) -> Entry | Unknown:
        """Return the entry for calling `target` with arguments of this structure; run it on fakes if it is new.

        Args:
            target: A `Leaf`, or a torch function.
            template: Of (args, kwargs).
            metas: Of the tensors in template order; interned, so compared by their numbers.
            modes: Grad mode and autocast.

        Raises:
            Whatever the call itself raises on such arguments (a shape error, say).
        """
        key = _key(target, template, tuple([meta.number for meta in metas]), modes)
        entry = self.entries.get(key)
        if entry is not None:
            return entry
        numbers = Numbers(template, metas)
        kind = _key(target, numbers.kind, (), modes)
        family: Family | None = self.families.get(kind)
        if family is None:
            family = self.families[kind] = Family(target)
        entry = family.entry_for(numbers, lambda found: digest_of_call(target, template, metas, modes, found))
        if entry is not None:
            return entry
        is_shared = is_torchs_own(target)
        entry = _of_functions.get(key) if is_shared else None
        with signals_held(), self.trying.part() if type(target) is Leaf else nullcontext():
            if entry is None:
                self.num_runs += 1
                entry = self.aside(_find_out, target, template, metas, modes, self.placed)
                if is_shared and type(entry) is Entry and not entry.is_random:
                    _of_functions[key] = entry
            self.entries[key] = entry
            if family.is_ready(numbers, entry):
                self.aside(generalise, family, target, metas, modes, numbers)
        return entry

    def resolve(self, target: Target, template: Template, metas: Sequence[Meta], modes: Modes, entry: Entry) -> None:
        """The call has run and given `entry`."""
        key = _key(target, template, tuple([meta.number for meta in metas]), modes)
        known = self.entries.get(key)
        if type(known) is Unknown and known.confirms(entry):
            self.entries[key] = entry

    def forget_leaves(self) -> None:
        """Modules that were called as a whole no longer are, or others are."""
        for table in (self.entries, self.known, self.families):
            table.forget(lambda key: type(key[0]) is Leaf)

    def flushed(self) -> None:
        """The program has run what it had recorded."""
        if self.trying.has_begun:
            self.trying.end()
        for table in (self.entries, self.known, self.families, interned, _of_functions):
            table.flushed()


def _key(target: Target, template: Template, metas: tuple[int, ...], modes: Modes) -> Any:
    state = target.state_key() if hasattr(target, "state_key") else None
    return (target, template, metas, modes, state)
