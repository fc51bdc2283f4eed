"""The process group that torch takes for NCCL has NCCL's rules."""

from __future__ import annotations

from tests.emulated.conftest import Run

HEAD = """
import os, datetime, torch
import torch.distributed as dist
number = int(os.environ["NUMBER"])
device = torch.device("cuda", number)
torch.cuda.set_device(device)
options = dist.ProcessGroupNCCL.Options()
options._timeout = datetime.timedelta(seconds=60)
group = dist.ProcessGroupNCCL(dist.FileStore("store", 2), number, 2, options)
x = torch.arange(4.0, device=device) * (number + 1)
first = group.allreduce([torch.ones(1, device=device)])
first.wait()
"""


def test_sends_and_reduces(run: Run) -> None:
    code = (
        HEAD
        + """
(group.send([x], 1, 0) if number == 0 else group.recv([x], 0, 0)).wait()
group.allreduce([x]).wait()
y = torch.empty(8, device=device)
group._allgather_base(y, x).wait()
print(x.tolist(), y.sum().item())
"""
    )
    ended = run(code=code, processes=2)
    assert ended.out == "[0.0, 2.0, 4.0, 6.0] 24.0\n" * 2
    assert ended.races == []


def test_host_does_not_wait_and_the_stream_does(run: Run) -> None:
    """A receive is posted, the host goes on; what is launched after the wait has the data."""
    code = (
        HEAD
        + """
if number == 0:
    work = group.recv([x], 1, 0)
    is_over = work.is_completed()
    work.wait()
    y = x * 2
    open("posted", "w").close()
    print(is_over, y.tolist())
else:
    while not os.path.exists("posted"):
        pass
    group.send([x], 0, 0).wait()
torch.cuda.synchronize()
"""
    )
    ended = run(code=code, processes=2)
    assert ended.out == "False [0.0, 4.0, 8.0, 12.0]\n"
    assert ended.races == []


def test_missing_wait_shows(run: Run) -> None:
    code = (
        HEAD
        + """
work = group.send([x], 1, 0) if number == 0 else group.recv([x], 0, 0)
if number == 1:
    y = x + 1
torch.cuda.synchronize()
"""
    )
    races = run(code=code, processes=2).races
    assert any("nccl receive from rank 0" in race and "add" in race for race in races)


def test_write_to_what_is_being_sent_shows(run: Run) -> None:
    code = (
        HEAD
        + """
work = group.send([x], 1, 0) if number == 0 else group.recv([x], 0, 0)
if number == 0:
    x.zero_()
torch.cuda.synchronize()
"""
    )
    races = run(code=code, processes=2).races
    assert any("nccl send to rank 1" in race for race in races)


def test_two_ranks_on_one_device_are_refused(run: Run) -> None:
    ended = run(code=HEAD.replace('("cuda", number)', '("cuda", 0)'), processes=2, fails=True)
    assert "Duplicate GPU detected" in ended.error


def test_orders_that_differ_stand_still(run: Run) -> None:
    """Both ranks receive first: there are no tags that would tell the messages apart, and the deadline ends it."""
    code = (
        HEAD
        + """
peer = 1 - number
group.recv([x], peer, 0)
group.send([x], peer, 0)
try:
    torch.cuda.synchronize()
except RuntimeError as error:
    print(error)
"""
    )
    ended = run(code=code, processes=2, deadline_s=3)
    assert ended.out.count("has not come to an end in 3 s") == 2


def test_abort_frees_the_stream(run: Run) -> None:
    code = (
        HEAD
        + """
if number == 0:
    group.recv([x], 1, 0)
    group.abort()
    torch.cuda.synchronize()
    print("over")
"""
    )
    assert run(code=code, processes=2).out == "over\n"


def test_lost_peer_is_an_error_of_the_work(run: Run) -> None:
    code = (
        HEAD
        + """
if number == 1:
    os._exit(0)
work = group.recv([x], 1, 0)
while not work.is_completed():
    pass
print(work.exception() is not None)
group.abort()
torch.cuda.synchronize()
"""
    )
    ended = run(code=code, processes=2)
    assert ended.out == "True\n"
