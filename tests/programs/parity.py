"""Train all cases in this group of processes (of two: under all plans); print what differs from the plain loop."""

from __future__ import annotations

import json
import os

import torch
from tests.support.parity import compare_all

torch.set_num_threads(1)
num_ranks = int(os.environ["WORLD_SIZE"])
print(json.dumps(compare_all(num_ranks, with_all_plans=num_ranks == 2)))
