"""Train the cases that are named in this group of processes; print what differs from the plain loop."""

from __future__ import annotations

import json
import os
import sys

import torch
from tests.support.parity import compare_all

torch.set_num_threads(1)
print(json.dumps(compare_all(sys.argv[1:], int(os.environ["WORLD_SIZE"]))))
