"""torch's functions about its generator (`get_rng_state`, `manual_seed`, `fork_rng`, ...), which the program may call
at any time: what is recorded has drawn nothing yet, and they must find that it has.

All of them use one name of `torch.random`. `torch.default_generator` itself is torch's own object, and is not seen.
"""

from __future__ import annotations

from typing import Any

import torch

from farspan.call.draws.scope import active

__all__ = ["SeenGenerator"]


class SeenGenerator:
    """Stands for torch's generator in `torch.random`: that of the program which this thread records, if it does."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.default_generator, name)

    def get_state(self) -> torch.Tensor:
        draws = _recorded()
        return torch.default_generator.get_state() if draws is None else draws.state()

    def set_state(self, state: torch.Tensor) -> None:
        draws = _recorded()
        if draws is None:
            active.num_seedings += 1
            torch.default_generator.set_state(state)
        else:
            draws.set_state(state)

    def manual_seed(self, seed: int) -> torch.Generator:
        return _set("manual_seed", seed)

    def seed(self) -> int:
        return _set("seed")


def _set(name: str, *args: Any) -> Any:
    draws = _recorded()
    if draws is not None:
        return draws.set(lambda generator: getattr(generator, name)(*args))
    active.num_seedings += 1
    return getattr(torch.default_generator, name)(*args)


def _recorded() -> Any:
    """Returns the draws of this thread's program, if it is being recorded."""
    recorder = active.recorder
    return recorder.draws if recorder is not None and recorder.is_recording else None
