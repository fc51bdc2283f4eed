"""What stands in front of a program: its first optimizer step is noted, and ends it.

Python runs this file, and the program's name stands behind it. Dropout is off, for micro-batches draw other masks than
the whole batch. With LANES in the environment `farspan.distribute` is given `micro_batches=` that.
"""

from __future__ import annotations

import functools
import json
import os
import random
import runpy
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

LANES = int(os.environ.get("LANES", "0"))
RESULT = Path(os.environ["LANES_RESULT"])


class _HasSteppedError(SystemExit):
    """The first optimizer is about to step."""


def _before(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """A step that is given a closure has no gradients yet."""
    if any(item.grad is not None for group in optimizer.param_groups for item in group["params"]):
        _note(optimizer)


def _note(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    if "IS_BEGUN" not in vars(sys.modules["__main__"]):  # it has not come to where its model is distributed
        return
    gradients = [item.grad for group in optimizer.param_groups for item in group["params"]]
    dense = [item.to_dense() if item is not None and item.is_sparse else item for item in gradients]
    plain = [None if item is None else torch.tensor(item.detach().double().tolist()) for item in dense]
    said: dict[str, Any] = {"is_cut": False, "reasons": [], "is_random": False, "precision": 0.0}
    rank = 0
    if LANES:
        import farspan
        from farspan.execute.process.world import current_engine

        engine = current_engine()
        batched = [] if engine is None else [*engine.recorder.batches.models.values()]
        said = {
            "is_cut": any(item.is_cut for item in batched),
            "reasons": [reason for item in batched for reason in item.reasons],
            "is_random": any(item.is_random for item in batched),
            "precision": max([item.precision for item in batched], default=0.0),
        }
        rank = farspan.rank()
    if rank == 0:
        torch.save(plain, RESULT / "gradients.pt")
        (RESULT / "said.json").write_text(json.dumps(said))
    raise _HasSteppedError(0)


def _without_dropout() -> None:
    def keep(input: Any, *args: Any, **kwargs: Any) -> Any:  # the name is torch's
        return input

    for name in ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout"):
        setattr(nn.functional, name, keep)
    attention: Any = nn.functional.scaled_dot_product_attention

    def attend(
        query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0, *args: Any, **kwargs: Any
    ):
        return attention(query, key, value, attn_mask, 0.0, *args, **kwargs)

    nn.functional.scaled_dot_product_attention = functools.wraps(attention)(attend)


def main() -> None:
    torch.set_num_threads(1)
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    _without_dropout()
    if LANES:
        import farspan

        distribute = farspan.distribute
        farspan.distribute = functools.partial(distribute, micro_batches=LANES, measure=False)  # type: ignore[assignment]
    register_optimizer_step_pre_hook(_before)
    register_optimizer_step_post_hook(_note)
    program = sys.argv.pop(1)
    sys.argv[0] = program
    if "timm" in Path(program).read_text():  # it imports torchvision, whose build for CPUs is not on PyPI
        for name in ("nms", "qnms"):
            torch.library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    runpy.run_path(program, run_name="__main__")


if __name__ == "__main__":
    main()
