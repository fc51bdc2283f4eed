"""Generate in this process alone, and in this group of processes; print both."""

from __future__ import annotations

import copy
import json
from typing import Any

import torch
from tests.generation.decoder import PROMPTS, Decoder, Grown, greedy, sample

import farspan

torch.set_num_threads(1)
torch.manual_seed(0)
model = Decoder().eval()


def texts(model: Any) -> list[Any]:
    """What is drawn by torch's own generator, and what is not; what the generator gives afterwards."""
    found: list[Any] = []
    for batch in (2, 1):
        torch.manual_seed(batch)
        found += [sample(model, PROMPTS[:batch], Grown()), greedy(model, PROMPTS[:batch], Grown())]
        found.append(torch.rand(2).tolist())
    return found


wanted = texts(copy.deepcopy(model))
print(json.dumps([wanted, texts(farspan.distribute(model))]))
