"""What programs ask of `torch.cuda` and of `torch.accelerator`."""

from __future__ import annotations

from tests.emulated.conftest import Run
from tests.emulated.test_kernels import TRAIN

CUDA = """
import torch
assert torch.cuda.is_available() and torch.cuda.device_count() == 2
assert torch.accelerator.current_accelerator() == torch.device("cuda")
assert torch.cuda.get_device_properties(1).total_memory == torch.cuda.mem_get_info(1)[1]

with torch.cuda.device(1):
    x = torch.ones(3, device="cuda")
assert x.device == torch.device("cuda:1") and torch.cuda.current_device() == 0
assert x.to("cuda:0").device.index == 0 and x.cpu().tolist() == [1, 1, 1]

before = torch.cuda.memory_allocated()
y = torch.empty(1 << 20, device="cuda")
assert torch.cuda.memory_allocated() - before == 4 << 20
del y
assert torch.cuda.memory_allocated() == before and torch.cuda.max_memory_allocated() >= 4 << 20
assert torch.empty(1 << 20, device="cuda").isnan().all()  # the same memory: nothing that was there can be read

begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
begun.record()
torch.cuda._sleep(20_000_000)
ended.record()
assert not ended.query()
ended.synchronize()
assert ended.query() and begun.elapsed_time(ended) >= 20

torch.cuda.manual_seed(3)
state = torch.cuda.get_rng_state()
drawn = torch.randn(5, device="cuda")
assert not torch.equal(drawn, torch.randn(5, device="cuda"))
torch.cuda.set_rng_state(state)
assert torch.equal(drawn, torch.randn(5, device="cuda"))
own = torch.Generator(device="cuda").manual_seed(3)
assert torch.equal(drawn, torch.randn(5, device="cuda", generator=own))
first = torch.random.get_rng_state()
torch.nn.functional.dropout(torch.ones(9, device="cuda"))
assert torch.equal(first, torch.random.get_rng_state())  # the CPU's generator has drawn nothing

storage = torch.ones(4, device="cuda").untyped_storage()
assert storage.resize_(0).nbytes() == 0
z = torch.arange(12.0, device="cuda").view(3, 4).t()[1:]
assert z[z > 5].tolist() == [9.0, 6.0, 10.0, 7.0, 11.0] and torch.nonzero(z).shape == (9, 2)
a = torch.zeros(4, device="cuda")
a[torch.tensor([1, 3], device="cuda")] = 2.0
out = torch.empty(0, device="cuda")
torch.add(a, 1, out=out)
assert out.tolist() == [1, 3, 1, 3]
print("all")
"""

COUNTS = """
import json, torch
from tests.emulated import torch_half
x = torch.ones(1000).pin_memory().to("cuda", non_blocking=True)
torch_half.native.reset_counters()
y = x * 2 + 1
loss = y.sum()
print(json.dumps(torch_half.native.counters()["host_waits"]))
loss.item()
y.to("cpu")
print(json.dumps(torch_half.native.counters()))
"""

NPU = """
import torch
assert not torch.cuda.is_available()
assert torch.accelerator.current_accelerator() == torch.device("npu") and torch.accelerator.device_count() == 2
assert not torch.distributed.is_nccl_available()
stream = torch.Stream(device="npu")
x = torch.ones(3, device="npu:1")
torch.accelerator.synchronize(1)
assert torch.accelerator.memory_allocated(1) == 512 and torch.get_device_module("npu").device_count() == 2
print("all")
"""


def test_torch_cuda(run: Run) -> None:
    ended = run(code=CUDA)
    assert ended.out == "all\n"
    assert ended.races == []


def test_what_the_host_waits_for_is_counted(run: Run) -> None:
    ended = run(code=COUNTS)
    first, second = ended.out.splitlines()
    assert first == "{}"
    for text in ("item at ", "script.py:9", "copy to host at ", "script.py:10", '"bytes_to_host": 4004', '"mul": 1'):
        assert text in second


def test_another_name(run: Run) -> None:
    assert run(code=NPU, devices="npu:2").out == "all\n"
    run(TRAIN, "--device", "npu:1", devices="npu:2")
