"""gloo: what has been sent is let go of, and what broke a send is told."""

from __future__ import annotations

from pathlib import Path

from tests.support.ranks import run_processes

PART_BYTES = 4096 * 16 * 4
LEAKS = """
import gc
import torch, farspan
from torch import nn
torch.set_num_threads(1)
torch.manual_seed(0)
model = farspan.distribute(nn.Sequential(*[nn.Linear(16, 16) for _ in range(4)]))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
x = torch.randn(4 * 4096, 16)

def held_bytes():
    storages = [item.untyped_storage() for item in gc.get_objects() if type(item) is torch.Tensor]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())

for step in range(4):
    optimizer.zero_grad()
    for part in x.chunk(4):
        (model(part).square().mean() / 4).backward()
    optimizer.step()
    gc.collect()
    print("held", held_bytes())
"""

SENDS = """
import torch, torch.distributed as dist
from farspan.comm.gloo import GlooTransport
dist.init_process_group("gloo")
store = dist.distributed_c10d._get_default_store()
rank, large = dist.get_rank(), 1 << 24
transport = GlooTransport(dist.PrefixStore("test", store), rank, 2, "127.0.0.1", 60.0)
if rank == 0:
    sending = transport.send(torch.ones(large, dtype=torch.uint8), 1, 0)
    try:
        sending.wait(0.1)
    except TimeoutError:
        print("waits", sending.is_done())
    dist.barrier()
    sending.wait(60.0)
    print("ends", sending.is_done(), sending.flat)
    stuck = [transport.send(torch.ones(large, dtype=torch.uint8), 1, 0) for _ in range(2)]
    transport.abort()
    for each in stuck:
        try:
            each.wait(60.0)
        except RuntimeError as error:
            print("breaks", each.is_done())
else:
    dist.barrier()
    received = torch.zeros(large, dtype=torch.uint8)
    transport.receive(received, 0, 0).wait(60.0)
    print("comes", bool(received.all()))
dist.barrier()
"""


def test_a_send_ends_when_it_was_received_or_when_the_road_is_closed(tmp_path: Path) -> None:
    script = tmp_path / "sends.py"
    script.write_text(SENDS)
    first, second = run_processes(2, script)
    assert first.stdout.splitlines() == ["waits False", "ends True None", "breaks True", "breaks True"], first.stderr
    assert second.stdout.splitlines() == ["comes True"], second.stderr


def test_what_has_been_sent_is_released(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(LEAKS)
    for finished in run_processes(2, script, environment={"FARSPAN_SAME_HOST": "0"}):
        assert finished.code == 0, finished.stderr
        first, *_, last = [int(line.split()[1]) for line in finished.stdout.splitlines() if line.startswith("held")]
        assert last < first + 2 * PART_BYTES  # one may be on its way; each step sends four
