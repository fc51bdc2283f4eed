"""Notes what the program does between two flushes that changes state without being recorded as a call.

Steps of optimizers with their learning rates, gradients that are set or cleared, state that is loaded: each is noted
with a number that is equal on all ranks that did the same, and words for people. The next agreement (a flush, a
barrier, the end of the program) compares them all; so a step that one rank alone leaves out is noticed, and named.
"""

from __future__ import annotations

import functools
import operator
import weakref
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch.optim.optimizer import Optimizer

from farspan.call.leaf import Placed
from farspan.call.naming import find_where, format_where
from farspan.call.pytree.canonical import digest_of
from farspan.execute.agreement.checksum import checksum_of, is_comparable
from farspan.graph import Value

__all__ = ["Entry", "Events", "Happened", "Position", "settings_in_words"]

Position = tuple[int, int]
"""(graph, call)"""

Entry = tuple[int, str] | tuple[int, str, str] | tuple[int, str, str, str]
"""A number that is equal on all ranks that did the same, words for it, and perhaps what to try where it differs."""

_PLAIN = (torch.Tensor, torch.nn.Parameter)
_SAME_STEPS = (
    "let every rank step the same optimizers in the same order, with the same hyperparameters;\n"
    "rank-dependent code may only read values"
)


class Events:
    """The events on this rank since the last agreement.

    Args:
        position: Says which call of which graph comes next.
    """

    def __init__(self, position: Callable[[], Position]) -> None:
        self._position = position
        self._noted: list[tuple[Position, int, Callable[[], list[Entry]]]] = []
        self._gradients: dict[str, tuple[int, ...]] = {}
        self._where: tuple[Position, Any] = ((0, 0), None)
        self._groups: weakref.WeakKeyDictionary[Optimizer, list[_Group]] = weakref.WeakKeyDictionary()

    def set_gradient(self, name: str, gradient: Value | torch.Tensor | None, *, is_owners: bool) -> None:
        """The program has set the gradient of a parameter; the last time counts, and not the order of parameters.

        Args:
            name: Of the parameter.
            gradient: None if it has none from now on.
            is_owners: Whether its owner alone has the gradient, in an optimizer's step: others know where it is.
        """
        if not self._gradients:
            self._where = (self._position(), find_where())
        self._gradients[name] = () if gradient is None else (2,) if is_owners else _identity_of(gradient)

    def clear_gradients(self, names: Collection[str]) -> None:
        """The program has set the gradients of some parameters to None."""
        if names and not self._gradients:
            self._where = (self._position(), find_where())
        self._gradients.update(dict.fromkeys(names, ()))

    def load(self, name: str, source: Any) -> None:
        """The program has loaded a parameter or buffer: every rank loads the same."""
        if type(source) in _PLAIN and is_comparable(source):
            checksum = checksum_of(source)
            where, digest = find_where(), digest_of((name, checksum))
            words = f"{name} is loaded, with the checksum {checksum[0]:08x}, at"
            self._noted.append((self._position(), digest, lambda: [(digest, f"{words} {format_where(where)}")]))

    def step(self, optimizer: Optimizer, what: str, placed: Mapping[int, Placed]) -> int:
        """`optimizer` is about to step, or has been given its state; returns the digest of its settings."""
        groups = self._groups.setdefault(optimizer, [])
        del groups[len(optimizer.param_groups) :]
        groups.extend(_Group() for _ in optimizer.param_groups[len(groups) :])
        for known, group in zip(groups, optimizer.param_groups, strict=True):
            known.look_at(group, placed)
        kind, where = type(optimizer).__qualname__, find_where()
        digest = digest_of((kind, what, [known.digest for known in groups]))
        settings = [known.settings for known in groups]

        def entries() -> list[Entry]:
            place = f"{what} of {kind} at {format_where(where)}"
            found: list[Entry] = [(digest_of((kind, what)), place, _SAME_STEPS)]
            for number, group in enumerate(settings):
                for name, value in group.items():
                    words = f"param_groups[{number}][{name!r}] is {_short(value)} in {place}"
                    found.append((digest_of((name, _comparable(value))), words, _SAME_STEPS))
            return [*found, (digest, f"{place}, of other parameters", _SAME_STEPS)]

        self._noted.append((self._position(), digest, entries))
        return digest

    def take(self) -> Happened:
        """Returns what has happened since the last agreement; what happens from now on belongs to the next one."""
        happened = Happened(self._noted, self._gradients, self._where)
        self._noted, self._gradients = [], {}
        return happened


class Happened:
    """The events of one rank between two agreements of all ranks."""

    __slots__ = ("_gradients", "_noted", "_where")

    def __init__(
        self,
        noted: list[tuple[Position, int, Callable[[], list[Entry]]]] | None = None,
        gradients: dict[str, tuple[int, ...]] | None = None,
        where: tuple[Position, Any] = ((0, 0), None),
    ) -> None:
        self._noted = noted or []
        self._gradients = gradients or {}
        self._where = where

    def digest(self) -> int:
        """Equal on all ranks where the same has happened; 0 for nothing."""
        if not self._noted and not self._gradients:
            return 0
        gradients = _digest_of_gradients(tuple(self._gradients.items())) if self._gradients else 0
        return digest_of(([digest for _, digest, _ in self._noted], gradients))

    def entries(self) -> list[tuple[Position, Callable[[], list[Entry]]]]:
        """Returns where each happened, and what makes its entries."""
        gradients, (position, where) = self._gradients, self._where

        def of_gradients() -> list[Entry]:
            return [
                (
                    digest_of((name, identity)),
                    f"{name}.grad = {'...' if identity else 'None'}, at {format_where(where)}",
                )
                for name, identity in sorted(gradients.items())
            ]

        noted = [(at, make) for at, _, make in self._noted]
        return [*noted, (position, of_gradients)] if gradients else noted


@functools.lru_cache(maxsize=64)
def _digest_of_gradients(items: tuple[tuple[str, tuple[int, ...]], ...]) -> int:
    return digest_of(sorted(items))


class _Group:
    """One group of an optimizer's parameters, as it was when it was last compared."""

    __slots__ = ("_ids", "_parameters", "_values", "digest", "settings")

    def __init__(self) -> None:
        self._ids: tuple[int, ...] = ()
        self._parameters = 0
        self._values: list[Any] = []
        self.settings: dict[str, Any] = {}
        self.digest = 0

    def look_at(self, group: Mapping[str, Any], placed: Mapping[int, Placed]) -> None:
        """Find the digest of `group`; cheap where nothing has been assigned to since."""
        values = list(group.values())
        ids = tuple(map(id, group["params"]))
        is_same = len(values) == len(self._values) and all(map(operator.is_, values, self._values))
        if is_same and ids == self._ids and not any(isinstance(value, torch.Tensor) for value in values):
            return
        if ids != self._ids:
            self._ids = ids
            self._parameters = digest_of([placed[key].name if key in placed else "" for key in ids])
        self._values = values
        self.settings = {name: value for name, value in group.items() if name != "params"}
        self.digest = digest_of(
            (self._parameters, [(name, _comparable(value)) for name, value in self.settings.items()])
        )


def settings_in_words(optimizer: Optimizer, digest: int) -> str:
    """Returns words that differ where the settings of an optimizer do, of which `digest` is one."""
    found = [group["lr"] for group in optimizer.param_groups if "lr" in group]
    rates = dict.fromkeys([f"{rate:.6g}" if isinstance(rate, int | float) else "a tensor" for rate in found])
    return f"{type(optimizer).__name__}, lr {', '.join(rates)}, settings {digest & 0xFFFFFFFF:08x}"


def _comparable(value: Any) -> Any:
    """Returns the part of a hyperparameter that the ranks have alike."""
    if not isinstance(value, torch.Tensor):
        return value
    return checksum_of(value) if type(value) in _PLAIN and is_comparable(value) else ()


def _identity_of(gradient: Value | torch.Tensor) -> tuple[int, ...]:
    if isinstance(gradient, Value):
        return (0, *gradient.identity)
    return (1, *checksum_of(gradient)) if type(gradient) in _PLAIN and is_comparable(gradient) else (1,)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
