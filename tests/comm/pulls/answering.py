"""What tests of pulls share."""

from __future__ import annotations

import threading

import torch

__all__ = ["of_rank", "wait_until"]


def of_rank(rank, request):
    """A handler."""
    return {"from": rank, **request}, [torch.full((3,), rank), torch.tensor(0.5)]


def wait_until(condition):
    for _ in range(1_000):
        if condition():
            return
        threading.Event().wait(0.01)
    raise AssertionError("waited too long")
