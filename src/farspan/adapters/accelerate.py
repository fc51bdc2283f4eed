"""accelerate, which transformers' Trainer builds on: its state says one process, and on rank 0 that it is the main one.

It decides by launch variables, in the constructor of `PartialState`; all else (DDP, sharded loaders, seeds of workers)
follows from that state, which all its objects share.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from collections.abc import Iterator
from typing import Any

from torch import nn

from farspan.adapters.shares import number_of_groups, shared_in_training
from farspan.adapters.this_rank import as_alone, barrier, existing, is_first, run_recorded
from farspan.errors import PlanError

__all__ = ["ADAPTERS"]

_LAUNCH_VARIABLES = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    *("PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE"),
)
_SPLITTING = ("BatchSamplerShard", "IterableDatasetShard", "DataLoaderDispatcher")


def _adapt_state(module: Any) -> None:
    """`accelerate.state`: what is decided from now on, and what has been decided already."""
    partial, whole = module.PartialState, module.AcceleratorState
    kinds = module.DistributedType
    shared: list[Any] = [state for state in (partial._shared_state, whole._shared_state) if state]
    if any(state["distributed_type"] != kinds.NO for state in shared):
        _check_in_time(shared[0]["distributed_type"], [kinds.MULTI_CPU, kinds.MULTI_GPU])
    alone = {"distributed_type": kinds.NO, "backend": None, "num_processes": 1}
    alone |= {"process_index": 0, "local_process_index": 0}
    for state in shared:
        state.update(alone, device=as_alone(state["device"]))
    original = partial.__init__

    @functools.wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        with _without_launch_variables():
            original(self, *args, **kwargs)

    partial.__init__ = init
    partial.wait_for_everyone = lambda self: barrier("accelerate's wait_for_everyone()")
    for name in ("is_main_process", "is_local_main_process", "is_last_process"):
        setattr(partial, name, property(lambda self: is_first()))

    def on_first(self: Any, function: Any = None, *number: Any, **numbers: Any) -> Any:
        if function is None:
            return functools.partial(on_first, self)
        return function if is_first() else module.do_nothing

    for name in ("main_process", "local_main_process", "last_process", "process", "local_process"):
        setattr(partial, f"on_{name}", on_first)


def _adapt_accelerator(module: Any) -> None:
    """`accelerate.accelerator`: rank 0 saves the states, and all can load them; loaders give each group its share."""
    accelerator = module.Accelerator
    save, load = accelerator.save_state, accelerator.load_state

    @functools.wraps(save)
    def save_once(self: Any, *args: Any, **kwargs: Any) -> Any:
        run_recorded("accelerate's save_state()")
        if is_first():
            return save(self, *args, **kwargs)
        if self.project_configuration.automatic_checkpoint_naming:
            self.wait_for_everyone()  # as rank 0 does
        self.project_configuration.iteration += 1
        return None

    @functools.wraps(load)
    def load_with_barrier(self: Any, *args: Any, **kwargs: Any) -> Any:
        barrier("accelerate's load_state()")
        return load(self, *args, **kwargs)

    accelerator.save_state, accelerator.load_state = save_once, load_with_barrier
    prepare = module.prepare_data_loader

    @functools.wraps(prepare)
    def prepare_share(dataloader: Any, *args: Any, **kwargs: Any) -> Any:
        if number_of_groups() == 1:
            return prepare(dataloader, *args, **kwargs)

        def make(num_processes: int, index: int) -> Any:
            own = {"num_processes": num_processes, "process_index": index, "dispatch_batches": False}
            return prepare(dataloader, *args, **{**kwargs, **own})

        return shared_in_training(make)

    module.prepare_data_loader = prepare_share


def _check_in_time(kind: Any, known: list[Any]) -> None:
    """Raise if accelerate has used its belief that there are several processes."""
    loaders = sys.modules.get("accelerate.data_loader")
    splitting = [getattr(loaders, name) for name in _SPLITTING] if loaders else []
    made = existing([*splitting, nn.parallel.DistributedDataParallel])
    if made is None and kind in known:
        return
    raise PlanError(
        "accelerate has been set up for several processes before farspan.distribute(model) was called.",
        why=f"its state says {kind}" + (f", and it has made a {made.__name__} for that already." if made else "."),
        hint="call farspan.distribute(model) before accelerator.prepare(...) and before the Trainer is used",
    )


@contextlib.contextmanager
def _without_launch_variables() -> Iterator[None]:
    hidden = {name: os.environ.pop(name) for name in _LAUNCH_VARIABLES if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(hidden)


ADAPTERS = {"accelerate.state": _adapt_state, "accelerate.accelerator": _adapt_accelerator}
