"""How metadata are found out: on fakes; on fakes with symbolic sizes; by running the call for real, once or each time.

most calls                              fakes
x[x > 0].sum()                          fakes with symbols: none comes out
no rule for fakes, `.item()` inside     learned: the owner runs the call and tells; expected to stay so after
                                        it gave the same twice
nonzero, a mask as index                learned each time
"""

from __future__ import annotations

import traceback
import weakref
from collections.abc import Collection, Sequence
from typing import Any

import torch

from farspan.graph import Meta
from farspan.lazy.leaf import Leaf, LeakError
from farspan.lazy.metadata.entry import Entry, Unknown
from farspan.lazy.metadata.leaks import remove_leaked
from farspan.lazy.metadata.modes import Modes
from farspan.lazy.metadata.predict import DynamicShapeError, predict
from farspan.lazy.ops.functions import name_of
from farspan.lazy.torch_private import DynamicOutputShapeException, is_fake_limit, is_not_torchs_device

__all__ = ["find_out"]


def find_out(
    target: Any, template: Any, metas: Sequence[Meta], modes: Modes, placed: Collection[int]
) -> Entry | Unknown:
    """Return what a call will give, or that it must be run to know.

    Args:
        target: What is called, with arguments of this `template`, with tensors of these `metas`, under these `modes`.
        placed: Ids of the parameters and buffers that have an owner.

    Raises:
        LeakError: The call has kept something of the run outside itself; it has been taken away there. Or it names a
            place, or uses a parameter of another module: only its parts can be called.
        Whatever the call itself raises on such arguments (a shape error, say).
    """
    made: list[weakref.ref[torch.Tensor]] = []
    outside = placed if type(target) is Leaf else ()
    try:
        entry = predict(target, template, metas, modes, made=made, outside=outside)
    except LeakError:
        remove_leaked(made)
        raise
    except Exception as error:
        if is_not_torchs_device(error):
            raise LeakError(f"{name_of(target)} moves a tensor to a place") from error
        if not is_fake_limit(error):
            raise
        limit = error
    else:
        if remove_leaked(made) and type(target) is Leaf:
            raise LeakError(f"{name_of(target)} keeps a tensor outside itself")
        return entry
    # The error holds the frames of the run, and they what it has made.
    traceback.clear_frames(limit.__traceback__)
    limit.__traceback__ = None
    remove_leaked(made)
    if isinstance(limit, DynamicOutputShapeException):
        try:
            return predict(target, template, metas, modes, is_symbolic=True, outside=outside)
        except LeakError:
            raise
        except DynamicShapeError:
            return Unknown(name_of(target), str(limit), is_dynamic=True)
        except Exception as error:  # symbols do not help here: what fakes cannot tell, a real run will
            limit.add_note(f"with symbolic sizes: {type(error).__name__}: {error}")
    return Unknown(name_of(target), str(limit), is_dynamic=False)
