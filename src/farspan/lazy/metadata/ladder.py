"""How metadata are found out: on fakes; on fakes with symbolic sizes; by running the call for real, once or each time.

most calls                              fakes
x[x > 0].sum()                          fakes with symbols: none comes out
no rule for fakes, `.item()` inside     learned: the owner runs the call and tells; expected to stay so after
                                        it gave the same twice
nonzero, a mask as index                learned each time
"""

from __future__ import annotations

import gc
import weakref
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch

from farspan.errors import RecordError
from farspan.graph import Meta
from farspan.lazy.metadata.entry import Entry, Unknown
from farspan.lazy.metadata.modes import Modes
from farspan.lazy.metadata.predict import DynamicShapeError, predict
from farspan.lazy.ops.functions import name_of
from farspan.lazy.torch_private import DynamicOutputShapeException, is_fake_limit, is_not_torchs_device

__all__ = ["LeakError", "find_out"]


class LeakError(RecordError):
    """A call reaches outside: puts a tensor into a closure or a global list, or names a place to run at.

    A module that does is not called as one unit. The user sees the error only where that comes too late.
    """


def find_out(target: Any, template: Any, metas: Sequence[Meta], modes: Modes) -> Entry | Unknown:
    """Return what a call will give, or that it must be run to know.

    Raises:
        LeakError: The call has kept something of the run outside itself; it has been taken away there. Or it names a
            place: only its parts can be called.
        Whatever the call itself raises on such arguments (a shape error, say).
    """
    made: list[weakref.ref[torch.Tensor]] = []
    try:
        entry = predict(target, template, metas, modes, made=made)
    except Exception as error:
        if is_not_torchs_device(error):
            raise LeakError(f"{name_of(target)} moves a tensor to a place") from error
        if not is_fake_limit(error):
            raise
        limit = error
    else:
        _raise_if_leaked(made, target)
        return entry
    if isinstance(limit, DynamicOutputShapeException):
        try:
            return predict(target, template, metas, modes, is_symbolic=True)
        except DynamicShapeError:
            return Unknown(name_of(target), str(limit), is_dynamic=True)
        except Exception as error:  # symbols do not help here: what fakes cannot tell, a real run will
            limit.add_note(f"with symbolic sizes: {type(error).__name__}: {error}")
    return Unknown(name_of(target), str(limit), is_dynamic=False)


def _raise_if_leaked(made: list[weakref.ref[torch.Tensor]], target: Any) -> None:
    if all(reference() is None for reference in made):
        return
    gc.collect()  # what is alive only in circles
    leaked = [tensor for tensor in [reference() for reference in made] if tensor is not None]
    if not leaked:
        return
    for tensor in leaked:
        for holder in gc.get_referrers(tensor):
            if holder is leaked:
                continue
            if isinstance(holder, (list, deque)):
                for number in reversed([number for number, item in enumerate(holder) if item is tensor]):
                    del holder[number]
            elif isinstance(holder, dict):
                for key in [key for key, item in holder.items() if item is tensor]:
                    del holder[key]
    raise LeakError(f"{name_of(target)} keeps a tensor outside itself")
