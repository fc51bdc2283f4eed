"""A simulation by MPI and, in the same processes, the training of a network on what it has computed.

    mpirun -n 4 python examples/simulate_and_train.py

A bar is heated at places of its own in each run, and cools: the heat equation, its cells divided among the ranks, which
exchange their borders. A network learns to say from the first state where the heat will be. Needs farspan[mpi].
"""

from __future__ import annotations

import argparse

import numpy as np
import torch
from mpi4py import MPI
from torch import nn

import farspan

NUM_CELLS, NUM_TIMES, RATE = 64, 200, 0.2


def simulate(comm: MPI.Intracomm, num_runs: int) -> tuple[np.ndarray, np.ndarray]:
    """The first and the last states of some runs, [run, cell], on every rank; each rank computes its own cells."""
    rank, size = comm.Get_rank(), comm.Get_size()
    first, last = (NUM_CELLS * each // size for each in (rank, rank + 1))
    places = np.random.default_rng(0).integers(0, NUM_CELLS, (num_runs, 3))
    heat = np.zeros((num_runs, NUM_CELLS))
    np.put_along_axis(heat, places, 1.0, axis=1)
    mine = np.zeros((num_runs, last - first + 2))  # and the last cell of the rank on each side
    mine[:, 1:-1] = heat[:, first:last]
    left, right = (other if 0 <= other < size else MPI.PROC_NULL for other in (rank - 1, rank + 1))
    border = np.zeros(num_runs)
    for _ in range(NUM_TIMES):
        border[:] = 0.0
        comm.Sendrecv(np.ascontiguousarray(mine[:, 1]), left, recvbuf=border, source=right)
        mine[:, -1] = border
        border[:] = 0.0
        comm.Sendrecv(np.ascontiguousarray(mine[:, -2]), right, recvbuf=border, source=left)
        mine[:, 0] = border
        mine[:, 1:-1] += RATE * (mine[:, :-2] - 2 * mine[:, 1:-1] + mine[:, 2:])
    parts = comm.allgather(mine[:, 1:-1])
    return heat, np.concatenate(parts, axis=1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=60)
    args = parser.parse_args()
    comm = MPI.COMM_WORLD
    before, after = (torch.from_numpy(each).float() for each in simulate(comm, 512))

    torch.manual_seed(0)
    layers = [nn.Linear(NUM_CELLS, 256), nn.GELU(), nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 256), nn.GELU()]
    model = nn.Sequential(*layers, nn.Linear(256, NUM_CELLS))
    model = farspan.distribute(model, comm=comm)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    loss = torch.zeros(())
    for step in range(args.steps):
        optimizer.zero_grad()
        for x, y in zip(before.chunk(8), after.chunk(8), strict=True):
            loss = (model(x) - y).square().mean() / after.var() / 8
            loss.backward()
        optimizer.step()
        if comm.Get_rank() == 0 and (step + 1) % 20 == 0:  # a loss is known on every rank
            print(f"step {step + 1}: {8 * loss.item():.3f} of the variance is not explained", flush=True)

    with torch.no_grad():
        error = (model(before[:64]) - after[:64]).abs().amax().item()
    # Each rank looks at cells of its own, and MPI joins them, as in any program of this kind.
    cells = slice(*(NUM_CELLS * each // comm.Get_size() for each in (comm.Get_rank(), comm.Get_rank() + 1)))
    heat = comm.allreduce(after[:, cells].sum().item())
    if comm.Get_rank() == 0:
        print(f"largest error {error:.3f}; all the heat that is left: {heat:.1f}")


if __name__ == "__main__":
    main()
