"""What stands in front of a program: its first optimizer step is noted, and ends it.

Python runs this file, and the program's name stands behind it. Dropout is off, for micro-batches draw other masks than
the whole batch. With LANES in the environment `farspan.distribute` is given `micro_batches=` that.
"""

from __future__ import annotations

import functools
import json
import os
import random
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

LANES = int(os.environ.get("LANES", "0"))
RESULT = Path(os.environ["LANES_RESULT"])


class _HasSteppedError(SystemExit):
    """The first optimizer is about to step."""


IS_BEGUN = False
"""Whether the program has come to where its model is distributed: it may train before."""


def _note(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    if not vars(sys.modules["__main__"])["IS_BEGUN"]:
        return
    gradients = [item.grad for group in optimizer.param_groups for item in group["params"]]
    plain = [None if item is None else torch.tensor(item.detach().double().tolist()) for item in gradients]
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

    def attend(*args: Any, dropout_p: float = 0.0, **kwargs: Any) -> Any:
        return attention(*args, **kwargs)

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
    register_optimizer_step_pre_hook(_note)
    program = sys.argv.pop(1)
    sys.argv[0] = program
    names = {"__name__": "__main__", "__file__": program}
    exec(compile(Path(program).read_text(), program, "exec"), names)


if __name__ == "__main__":
    main()
