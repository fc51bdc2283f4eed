"""What the training scripts print and write: a progress line, and the losses of every step, to the last bit."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

__all__ = ["Progress", "save_losses"]


class Progress:
    """Prints a line every few steps: loss, learning rate, tokens per second and, in a pipeline, its bubble."""

    def __init__(self, num_steps: int, tokens_per_step: int, every: int) -> None:
        self.num_steps = num_steps
        self.tokens_per_step = tokens_per_step
        self.every = every
        self.shown_step = 0
        self.shown_at = self.started_at = time.perf_counter()

    def show(self, step: int, loss: float, lr: float) -> None:
        """Prints a line if it is time for one; `step` counts from 1."""
        if step != 1 and step % self.every and step != self.num_steps:
            return
        now = time.perf_counter()
        speed = (step - self.shown_step) * self.tokens_per_step / (now - self.shown_at)
        self.shown_step, self.shown_at = step, now
        line = f"step {step:4d}/{self.num_steps}  loss {loss:.4f}  lr {lr:.2e}  {speed:6,.0f} tokens/s"
        print(line + _bubble() + f"  {now - self.started_at:5.1f} s", flush=True)


def _bubble() -> str:
    """The idle part of the last step, if farspan runs this process; the plain script knows nothing of it."""
    farspan = sys.modules.get("farspan")
    step = farspan.last_step() if farspan else None
    return "" if step is None else f"  bubble {step.bubble:5.1%}"


def save_losses(file: str, losses: Sequence[float]) -> None:
    """Writes the losses as hexadecimal floats, which keep every bit."""
    Path(file).parent.mkdir(parents=True, exist_ok=True)
    Path(file).write_text(json.dumps([loss.hex() for loss in losses], indent=1) + "\n")
