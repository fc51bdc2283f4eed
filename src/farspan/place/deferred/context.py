"""Building a model without its data."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from farspan.place.deferred.construction import CONSTRUCTION
from farspan.place.deferred.guard import PlainReads, guard_all, is_constructing, set_constructing
from farspan.place.deferred.recording import Recording
from farspan.place.pretrained.lazy_file import files_without_data
from farspan.torch_private import show_hidden

__all__ = ["deferred_init"]


@contextlib.contextmanager
def deferred_init() -> Iterator[None]:
    """Build models in the body without their data: `farspan.distribute` makes of them what each process owns.

    What a constructor writes into large tensors is noted and not done, so that no process ever holds the whole model.
    The numbers are those of ordinary construction, bit for bit, and so are the states of the random generators after
    it. A value that the constructor reads is computed, and just what it depends on.

    A tensor of such a model that is used before `distribute` is made there and then; every process that does it holds
    it. Tensors that come from numpy, from other devices or from files (but for those of safetensors) hold their data at
    once.

    Example:
        >>> import torch, farspan
        >>> with farspan.deferred_init():
        ...     model = torch.nn.Linear(512, 512)
        >>> model = farspan.distribute(model)
        >>> model(torch.zeros(1, 512)).shape
        torch.Size([1, 512])
    """
    if is_constructing():
        yield
        return
    show_hidden()
    set_constructing(True)
    try:
        with files_without_data(), PlainReads(), Recording():
            yield
    finally:
        set_constructing(False)
        CONSTRUCTION.end()
        guard_all()
