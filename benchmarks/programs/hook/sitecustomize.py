"""What the harness does at the start of a program's process: the entropy it begins with, and where other ranks print.

Python imports this module before the program. A script that sets no seed begins with generators that nobody knows;
here they begin with PROGRAMS_ENTROPY, so that a plain run and rank 0 begin alike. The other ranks begin with other
numbers, as they would: nothing but farspan makes them agree.
"""

from __future__ import annotations

import os


def _begin(rank: int) -> None:
    if rank:
        name = os.path.join(os.environ["PROGRAMS_RESULT"], f"rank{rank}.out")
        file = os.open(name, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
        os.dup2(file, 1)
        os.close(file)
    entropy = int(os.environ["PROGRAMS_ENTROPY"]) + 1000 * rank

    import random

    import numpy as np
    import torch

    if "PROGRAMS_TIMM" in os.environ:
        # timm imports torchvision, whose build for CPUs is not on PyPI: the other one comes without its C++ operators
        for name in ("nms", "qnms"):
            torch.library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    random.seed(entropy)
    np.random.seed(entropy)
    torch.manual_seed(entropy)


_rank = os.environ.get("FARSPAN_RANK", os.environ.get("RANK", "0" if "PROGRAMS_PLAIN" in os.environ else None))
if "PROGRAMS_RESULT" in os.environ and _rank is not None:  # the launcher has no rank
    _begin(int(_rank))
