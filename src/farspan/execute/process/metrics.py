"""Numbers of a step for whoever draws them."""

from __future__ import annotations

import psutil
import torch

from farspan.execute.process.world import current_engine

__all__ = ["metrics"]


def metrics() -> dict[str, float]:
    """Returns numbers of the last training step, for TensorBoard, W&B or a line of one's own; none before the first.

    Seconds are those of this rank. `memory_bytes` is what its process holds in main memory; on an accelerator
    `device_memory_bytes` is the most that torch has had in use there at once.

    Example:
        >>> import farspan
        >>> farspan.metrics()
        {}
    """
    engine = current_engine()
    record = None if engine is None else engine.last_training_step
    if record is None:
        return {}
    found = {
        "step_seconds": record.duration_s,
        "compute_seconds": record.compute_s,
        "wait_seconds": record.wait_s,
        "bubble": record.bubble,
        "micro_batches": float(record.num_micro_batches),
        "memory_bytes": float(psutil.Process().memory_info().rss),
    }
    if torch.accelerator.is_available():
        found["device_memory_bytes"] = float(torch.accelerator.max_memory_allocated())
    return found
