"""Train the cases that are named, with a move after each step; print what differs, and what moved."""

from __future__ import annotations

import copy
import json
import sys

import torch
from tests.place.test_moving import train_moving
from tests.support.cases import CASES
from tests.support.parity import build, train_plainly

torch.set_num_threads(1)
found: dict[str, list[str]] = {}
moved: list[int | None] = []
for name in sys.argv[1:]:
    case = CASES[name]
    found[name] = train_moving(copy.deepcopy(build(case)), case, 0, moved).differences(train_plainly(case))
print(json.dumps([found, moved]))
