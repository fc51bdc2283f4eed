"""A run that is interrupted and resumed from its checkpoint, generator states included, beside one that is not."""

import copy
import random

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn


def make_model():
    return nn.Sequential(nn.Linear(8, 24), nn.ReLU(), nn.Dropout(0.3), nn.Linear(24, 24), nn.ReLU(), nn.Linear(24, 3))


def rng_state():
    return {"torch": torch.get_rng_state(), "numpy": np.random.get_state(), "python": random.getstate()}


def set_rng_state(state):
    torch.set_rng_state(state["torch"])
    np.random.set_state(state["numpy"])
    random.setstate(state["python"])


def epochs(model, optimizer, scheduler, first, last):
    for epoch in range(first, last):
        order = np.random.permutation(60)
        total = 0.0
        for chunk in np.array_split(order, 4):
            xb = x[chunk] + random.gauss(0, 0.05)
            loss = F.cross_entropy(model(xb), y[chunk])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.item()
        scheduler.step()
        print(f"  epoch {epoch} loss {total / 4:.8f} lr {scheduler.get_last_lr()[0]:.5f}")


random.seed(3)
np.random.seed(3)
torch.manual_seed(3)
x = torch.randn(60, 8)
y = x[:, :3].argmax(1)
first = make_model()
second = copy.deepcopy(first)
# farspan: first, second = farspan.distribute(nn.ModuleList([first, second]))
print("first run")
optimizer = torch.optim.AdamW(first.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
epochs(first, optimizer, scheduler, 0, 2)
torch.save(
    {
        "model": first.state_dict(),
        "optimizer": optimizer.state_dict(),
        "scheduler": scheduler.state_dict(),
        "rng": rng_state(),
        "epoch": 2,
    },
    "checkpoint.pt",
)
epochs(first, optimizer, scheduler, 2, 4)

print("second run, resumed")
checkpoint = torch.load("checkpoint.pt", weights_only=False)
second.load_state_dict(checkpoint["model"])
optimizer2 = torch.optim.AdamW(second.parameters(), lr=1e-2)
optimizer2.load_state_dict(checkpoint["optimizer"])
scheduler2 = torch.optim.lr_scheduler.ExponentialLR(optimizer2, 0.9)
scheduler2.load_state_dict(checkpoint["scheduler"])
set_rng_state(checkpoint["rng"])
epochs(second, optimizer2, scheduler2, checkpoint["epoch"], 4)
same = all(torch.equal(a, b) for a, b in zip(first.state_dict().values(), second.state_dict().values()))
print("the same weights:", same)
torch.save(second.state_dict(), "final.pt")
