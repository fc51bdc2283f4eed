"""One of three ranks, for test_pulls_processes.py: rank 2 alone reads the whole model, of 16 MiB a rank.

pulling.py CASE    "owner": rank 1 is killed while it sends; "reader": rank 2 is killed while it receives;
                   "last": nobody is, and the reading is the last line of the program
"""

from __future__ import annotations

import atexit
import os
import signal
import sys
import time
from typing import Any

import torch

import farspan
from farspan.comm.pulls import answers, listener
from farspan.control.hub.server import HubServer
from farspan.errors import RemoteError

hub_bytes = 0
hear = HubServer._hear


def count(self: Any, conn: Any, rank: int, frame: Any) -> None:
    global hub_bytes
    hub_bytes += len(frame.payload)
    hear(self, conn, rank, frame)


def die(*arguments: Any) -> Any:
    os.kill(os.getpid(), signal.SIGKILL)


def send_some_and_die(sock: Any, buffers: Any) -> None:
    sock.sendall(b"".join(buffers)[: 1 << 20])
    die()


def main(case: str, rank: int) -> None:
    HubServer._hear = count  # type: ignore[method-assign]
    if rank == 0:
        atexit.register(lambda: print("through the hub:", hub_bytes))  # when every rank has ended
    torch.manual_seed(0)
    model = torch.nn.Sequential(*[torch.nn.Linear(2048, 2048, bias=False) for _ in range(3)])
    plain = {name: item.detach().clone() for name, item in model.state_dict().items()}
    farspan.distribute(model, plan={"0": 0, "1": 1, "2": 2}, seed=0)
    x = torch.ones(1, 2048)
    float(model(x).sum())
    if case == "owner" and rank == 1:
        listener.send_all = send_some_and_die
    if case == "reader" and rank == 2:
        answers.unpack_tensor = answers.buffer_of = die
    began = time.monotonic()
    try:
        if rank == 2:
            state = model.state_dict()
            print("same:", all(torch.equal(state[name], item) for name, item in plain.items()))
        if case != "last":
            float(model(x).sum())
    except RemoteError as error:
        print(error.what, time.monotonic() - began < 10.0)
        raise


if __name__ == "__main__":
    main(sys.argv[1], int(os.environ["RANK"]))
