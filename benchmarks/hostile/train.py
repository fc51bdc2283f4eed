"""The training that goes on while a stranger sends nonsense: `train.py NUM_STEPS`.

Prints the loss of each step, to the last bit, and a digest of the weights, which every rank reads from their owners
before the first step, now and then, and at the end.
"""

import hashlib
import os
import sys

import torch
from torch import nn

import farspan

BATCH, WIDTH, NUM_MICRO_BATCHES, EVERY = 16, 96, 4, 50

rank = int(os.environ.get("FARSPAN_RANK") or os.environ["RANK"])
torch.manual_seed(1)
model = nn.Sequential(*[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(6)], nn.Linear(WIDTH, 1))
farspan.distribute(model, measure=False)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
generator = torch.Generator().manual_seed(5)
digest = hashlib.sha256()


def read_weights() -> None:
    for parameter in model.parameters():
        digest.update(parameter.detach().numpy().tobytes())


read_weights()
for step in range(int(sys.argv[1])):
    losses = []
    for _ in range(NUM_MICRO_BATCHES):
        x = torch.randn(BATCH, WIDTH, generator=generator)
        y = torch.randn(BATCH, 1, generator=generator)
        loss = nn.functional.mse_loss(model(x), y)
        (loss / NUM_MICRO_BATCHES).backward()
        losses.append(loss.detach())
    optimizer.step()
    optimizer.zero_grad()
    mean = float(torch.stack(losses).mean().item())
    if rank == 0:
        print(f"step {step} loss {float(mean).hex()}", flush=True)
    if step % EVERY == EVERY - 1:
        read_weights()
read_weights()
if rank == 0:
    print(f"weights {digest.hexdigest()}", flush=True)
