"""Gives every draw of random numbers its place in the user's program: a path of module calls, the same for every plan.

    frame(root)       = seed
    frame(module)     = blake2b(frame of its caller, its name, how many calls of it this caller has made before)
    seed of a draw    = blake2b(frame of its caller, its name, how many calls of it this caller has made before)

A module called in a loop over blocks, and a block's own two dropouts:

    root - model (3rd call) - blocks.1 (1st) - blocks.1.drop (1st) - dropout (1st)
                                             - blocks.1.drop (2nd) - dropout (1st)

The same frames arise whether a module's Python is being recorded (a container) or runs at its owner (inside a leaf).
"""

from __future__ import annotations

import hashlib
import struct
from typing import Any

from farspan.call.naming import name_of

__all__ = [
    "Frame",
    "Path",
    "forget_module",
    "key_of",
    "key_of_function",
    "key_of_module",
    "mixed",
    "name_module",
    "name_of_module",
    "seed_of",
]

Path = tuple[int, int, int]
"""(key of the caller's frame, key of what it calls, how many calls of that came before)."""

_APART = 1 << 40
"""Added to the numbers of calls that are counted apart."""
_key_of_function: dict[Any, int] = {}
_key_of_module: dict[int, int] = {}
_name_of_module: dict[int, str] = {}


class Frame:
    """One call of a module while it runs, and the calls that it has made so far.

    Args:
        key: Its number, if it is known.
        path: Else what this follows from: the frame of its caller, and as in a `Path`.
    """

    __slots__ = ("_key", "_path", "counts")

    def __init__(self, key: int = 0, path: tuple[Frame, int, int] | None = None) -> None:
        self._key = key
        self._path = path
        self.counts: dict[int, int] = {}

    @property
    def key(self) -> int:
        """Returns its number, which is computed only once something draws below it."""
        if self._path is not None:
            caller, child, number = self._path
            self._key, self._path = mixed((caller.key, child, number)), None
        return self._key

    def count(self, child: int, *, is_apart: bool = False) -> int:
        """Returns how many calls of `child` came before this one, and counts this one.

        Args:
            child: What is called.
            is_apart: Count this call among those of the same kind only (evaluation, which must not move what training
                draws afterwards).
        """
        slot = ~child if is_apart else child
        number = self.counts.get(slot, 0)
        self.counts[slot] = number + 1
        return number + _APART if is_apart else number

    def take_back(self, child: int, *, is_apart: bool) -> None:
        """The last call of `child` is called again."""
        self.counts[~child if is_apart else child] -= 1

    def inside(self, child: int, *, is_apart: bool = False) -> Frame:
        """Returns the frame of a call of `child`."""
        return Frame(path=(self, child, self.count(child, is_apart=is_apart)))

    def copy(self) -> Frame:
        same = Frame(self.key)
        same.counts.update(self.counts)
        return same


def key_of(name: str) -> int:
    """Returns a number for `name`, equal in every process."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=7).digest(), "big")


def key_of_function(function: Any) -> int:
    """Returns a number for a torch function, equal in every process."""
    key = _key_of_function.get(function)
    if key is None:
        key = _key_of_function[function] = key_of(f"function {name_of(function)}")
    return key


def key_of_module(module: Any) -> int:
    """Returns the number of a module that `name_module` has named."""
    return _key_of_module[id(module)]


def name_of_module(module: Any) -> str | None:
    """Returns the name that `name_module` has given a module, None where it has given none."""
    return _name_of_module.get(id(module))


def name_module(module: Any, name: str) -> None:
    """Let `module` be known in paths as `name`."""
    _key_of_module[id(module)] = key_of(name)
    _name_of_module[id(module)] = name


def forget_module(module_id: int) -> None:
    _key_of_module.pop(module_id, None)
    _name_of_module.pop(module_id, None)


def seed_of(path: Path) -> int:
    """Returns the seed for what is drawn at `path`: all its bits are mixed, for torch's CPU generator uses 32 of
    them."""
    return mixed(path) >> 1


def mixed(path: Path) -> int:
    """Returns a number of 63 bits for `path`, equal in every process."""
    return int.from_bytes(hashlib.blake2b(struct.pack(">3Q", *path), digest_size=8).digest(), "big") >> 1
