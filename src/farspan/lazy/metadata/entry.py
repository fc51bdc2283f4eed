"""What is known of a call before it runs, and the cache of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from farspan.graph import Meta
from farspan.lazy.metadata.modes import Modes

__all__ = ["Entry", "MetadataCache", "intern", "meta_of"]


@dataclass(frozen=True, slots=True, eq=False)
class Entry:
    """The prediction for one kind of call."""

    name: str
    """Of what is called, for people."""
    template: Any
    """Structure of the result; slot numbers index `metas`."""
    metas: tuple[Meta, ...]
    """Of the result's tensors, then of the arguments written in place (their new versions)."""
    num_results: int
    depends_on: tuple[tuple[int, ...], ...]
    """For each output, the arguments its gradient flows to."""
    mutated: tuple[int, ...]
    """Arguments that the call writes in place."""
    same_as: tuple[int, ...]
    """For each result, the argument it is (the same tensor object), or -1."""
    shares: tuple[int, ...]
    """For each result, an argument whose memory it shares (a view), or -1."""
    has_tensors_only: bool
    """False where the result holds a number or bool computed from data."""
    is_one_new_tensor: bool
    """Whether the result is one tensor that shares nothing with the arguments, and none of these is written."""
    is_random: bool
    """Whether it draws random numbers."""
    is_random_in_python: bool
    """Whether some of them come from Python's or numpy's generator."""
    digest: int
    """Equal on all ranks for equal calls."""


_interned: dict[Meta, Meta] = {}


def meta_of(tensor: torch.Tensor) -> Meta:
    """The metadata of `tensor`; equal metadata is the same object."""
    if tensor.layout is torch.strided:
        stride = tuple(map(int, tensor.stride()))
    else:
        stride = ()
    return intern(Meta(tuple(map(int, tensor.shape)), stride, tensor.dtype, tensor.device, tensor.requires_grad))


def intern(meta: Meta) -> Meta:
    """The one object that stands for all metadata equal to `meta`."""
    return _interned.setdefault(meta, meta)


class MetadataCache:
    """Entries by call, argument template, argument metadata and modes."""

    def __init__(self, predict: Callable[[Any, Any, Sequence[Meta], Modes], Entry]) -> None:
        self.predict = predict
        self.entries: dict[Any, Entry] = {}
        self.num_misses = 0

    def lookup(self, target: Any, template: Any, metas: Sequence[Meta], modes: Modes) -> Entry:
        """Return the entry for calling `target` with arguments of this structure; run it on fakes if it is new.

        Args:
            target: A `Leaf`, or a torch function.
            template: Of (args, kwargs).
            metas: Of the tensors in template order; interned, so compared by identity.
            modes: Grad mode and autocast.

        Raises:
            Whatever the call itself raises on such arguments (a shape error, say).
        """
        state = target.state_key() if hasattr(target, "state_key") else None
        key = (target, template, tuple(map(id, metas)), modes, state)
        entry = self.entries.get(key)
        if entry is None:
            self.num_misses += 1
            entry = self.entries[key] = self.predict(target, template, metas, modes)
        return entry
