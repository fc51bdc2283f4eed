"""Something goes wrong on rank 1, `fault.py WHAT`: it raises, leaves early, differs, gives no communicator."""

from __future__ import annotations

import sys

import mpi4py

what = sys.argv[1]
if what == "threads":
    mpi4py.rc.thread_level = "funneled"
import torch  # noqa: E402
from mpi4py import MPI  # noqa: E402
from torch import nn  # noqa: E402

import farspan  # noqa: E402

world = MPI.COMM_WORLD
is_one = world.Get_rank() == 1
comm = world
if what == "part":  # the third rank waits for something that never comes
    comm = world.Split(int(world.Get_rank() == 2), world.Get_rank())
    if world.Get_rank() == 2:
        world.recv(source=0)
torch.manual_seed(0)
model = farspan.distribute(
    nn.Sequential(*[nn.Linear(8, 8) for _ in range(4)]), comm=None if what == "some" and is_one else comm
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(4):
    loss = model(torch.ones(3, 8)).square().mean()
    if what == "differs" and is_one and step == 2:
        loss = loss * 2
    loss.backward()
    if is_one and step == 2:
        if what in ("raises", "part"):
            raise ValueError("the disk is full")
        if what == "leaves":
            sys.exit(0)
    optimizer.step()
