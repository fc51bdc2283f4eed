"""Ranks 0 and 1 train; rank 2 does something else; all use COMM_WORLD before, while and after that."""

from __future__ import annotations

import sys

import torch
from mpi4py import MPI
from torch import nn

import farspan
from farspan.errors import PlanError

world = MPI.COMM_WORLD
rank = world.Get_rank()
assert world.allreduce(1) == 3
comm = world.Split(0 if rank < 2 else MPI.UNDEFINED, 1 - rank)  # in the other order
if rank == 2:
    try:
        farspan.distribute(nn.Linear(2, 2), comm=comm)
    except PlanError as error:
        print("outside:", error.what, flush=True)
    found = [world.recv(source=MPI.ANY_SOURCE, tag=MPI.ANY_TAG) for _ in range(4)]
    print("heard:", sorted(found), flush=True)
else:
    torch.manual_seed(0)
    model = farspan.distribute(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), comm=comm)
    assert farspan.rank() == 1 - rank
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        loss = model(torch.ones(3, 4)).square().mean()
        world.send((rank, step), dest=2, tag=step)  # recorded, and not run yet
        loss.backward()
        optimizer.step()
    farspan.distribute(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), comm=comm.Dup())
    try:
        farspan.distribute(nn.Linear(2, 2), comm=MPI.COMM_SELF)
    except PlanError as error:
        print("other ranks:", error.what, flush=True)
world.Barrier()
assert world.allreduce(rank) == 3
if "finalize" in sys.argv:
    MPI.Finalize()
print("end", flush=True)
