"""The calls of `calls.py` by torch.distributed.rpc: rank 0 has the counter, ranks 1 to 4 call it."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from benchmarks.services.calls import Counter, pipelined, waiting
from torch.distributed import FileStore, rpc

COUNTER = Counter()


def add(number: int) -> int:
    return COUNTER.add(number)


def size(tensor: torch.Tensor) -> int:
    return COUNTER.size(tensor)


class Call:
    """A future of torch's with the one method that `pipelined` needs."""

    def __init__(self, future: Any) -> None:
        self._future = future

    def result(self) -> Any:
        return self._future.wait()


def main() -> None:
    out, scale, rank, store = Path(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{store}")
    rpc.init_rpc(f"process{rank}", rank=rank, world_size=5, rpc_backend_options=options)
    if rank > 0:
        call(out, scale, rank, FileStore(f"{store}-of-callers", -1))
    rpc.shutdown()


def call(out: Path, scale: float, rank: int, store: FileStore) -> None:
    rates: dict[str, float] = {}
    waiting(lambda: rpc.rpc_sync("process0", add, (0,)), 100)
    barrier(store, "begun")
    if rank == 1:
        alone(scale, rates)
    barrier(store, "alone")
    number = int(4000 * scale)
    began = time.perf_counter()
    waiting(lambda: rpc.rpc_sync("process0", add, (1,)), number)
    barrier(store, "all")
    rates["four callers, each waits"] = 4 * number / (time.perf_counter() - began)
    if rank == 1:
        out.write_text(json.dumps(rates))


def barrier(store: FileStore, name: str) -> None:
    """Waits for the four callers."""
    if store.add(name, 1) == 4:
        store.set(f"{name} is over", "")
    store.wait([f"{name} is over"])


def alone(scale: float, rates: dict[str, float]) -> None:
    """The rates of one caller, while the others wait."""
    small, large = torch.zeros(1 << 10), torch.zeros(1 << 18)
    rates["one caller, futures"] = pipelined(lambda: Call(rpc.rpc_async("process0", add, (1,))), int(40_000 * scale))
    rates["one caller, each waits"] = waiting(lambda: rpc.rpc_sync("process0", add, (1,)), int(10_000 * scale))
    rates["futures of 4 KiB"] = pipelined(lambda: Call(rpc.rpc_async("process0", size, (small,))), int(8_000 * scale))
    rates["futures of 1 MiB"] = pipelined(lambda: Call(rpc.rpc_async("process0", size, (large,))), int(1_000 * scale))


if __name__ == "__main__":
    main()
