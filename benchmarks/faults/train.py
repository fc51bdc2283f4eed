"""The program that the faults strike: `train.py CASE`, the case as JSON; the kind "plain" is the same without farspan.

It prints the loss of each step and a digest of the last weights. What the benchmark must know of its moments it sends
to the socket that FAULTS_EVENTS names; nothing else of it is for the benchmark.
"""

import contextlib
import ctypes
import hashlib
import json
import multiprocessing
import os
import shutil
import socket
import sys
import time

case = json.loads(sys.argv[1])
rank = int(os.environ.get("FARSPAN_RANK") or os.environ.get("RANK") or 0)
is_victim, is_other = rank == case["victim"], rank == case["other"]
kind = case["kind"]


def tell(event):
    """Send a moment of this rank to the benchmark."""
    address = os.environ.get("FAULTS_EVENTS")
    if address:
        message = {"event": event, "rank": rank, "pid": os.getpid(), "time": time.monotonic()}
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender, contextlib.suppress(OSError):
            sender.sendto(json.dumps(message).encode(), address)


tell("started")
if kind == "secret" and is_victim:
    os.environ["FARSPAN_SECRET"] = "of another run"
    tell("fault")

import torch  # noqa: E402
from torch import nn  # noqa: E402

import farspan  # noqa: E402

BATCH, WIDTH, NUM_BLOCKS, NUM_MICRO_BATCHES = 16, 96, 6, 4
now = {"step": -1, "forwards": 0}


def strikes(place, micro_batch=0):
    """Whether the fault is to come here."""
    here = (now["step"], place) == (case["step"], case["place"])
    return here and (place == "step" or micro_batch == case["micro_batch"])


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        if kind == "forward" and is_victim and now["step"] == case["step"]:
            now["forwards"] += 1
            if now["forwards"] > case["micro_batch"]:
                tell("fault")
                raise ValueError("a bad activation")
        return torch.relu(self.linear(x)) + x


def early_faults():
    """What happens before `distribute`."""
    if not is_victim or kind not in ("early", "early_exit", "early_os_exit", "sleeps"):
        return
    time.sleep(case["delay_s"])
    tell("fault")
    if kind == "early":
        raise ValueError("no data")
    if kind == "early_exit":
        sys.exit(0)
    if kind == "early_os_exit":
        os._exit(0)
    time.sleep(600)


def fork_and_leave():
    """A child process that ends as many do, in the middle of the parent's step."""
    tell("fault")
    if case["variant"] == 0:
        child = os.fork()
        if child == 0:
            sys.exit(7)
        os.waitpid(child, 0)
    else:
        child = multiprocessing.get_context("fork").Process(target=sys.exit, args=(7,))
        child.start()
        child.join()


def lose_report_folder():
    """The folder of the report goes, or becomes a file."""
    if case["variant"] >= 2 and rank == 0 and now["step"] == 1:
        folder = os.path.dirname(os.environ["FARSPAN_REPORT"])
        shutil.rmtree(folder)
        if case["variant"] == 3:
            with open(folder, "w") as file:
                file.write("no folder\n")


def fault():
    """The fault of the program itself, at its moment."""
    if kind == "forked_exit":
        fork_and_leave()
        return
    if kind == "stop_and_raise":
        if is_other:
            tell("stop the victim")
            time.sleep(0.3)
            tell("fault")
            raise ValueError("the loader is empty")
        return
    if not is_victim or kind in ("forward", "no_step", "other_module"):
        return
    if kind in ("segv", "exit_3", "sys_exit_5", "sys_exit_0", "control"):
        tell("fault")
    if kind == "segv":
        ctypes.string_at(0)
    elif kind == "exit_3":
        os._exit(3)
    elif kind == "sys_exit_5":
        sys.exit(5)
    elif kind == "sys_exit_0":
        sys.exit(0)
    elif kind == "loop":
        tell("fault")
        try:
            raise KeyError("shard 7")
        except KeyError as cause:
            if case["variant"] == 0:
                raise RuntimeError("no batch left") from cause
            raise RuntimeError("no batch left")  # noqa: B904
    elif kind == "control":
        raise ValueError("red\x1b[31m and cleared\x1b[2J\x9b1A")
    elif kind == "full_disk":
        fill_log()
    elif kind == "bar":
        for number in range(800):
            print(
                f"\r{number / 8:5.1f} % [{'#' * (number // 20):<40s}] {number}/800", end="", flush=True, file=sys.stderr
            )
        tell("fault")
        raise ValueError("bad sample")


def fill_log():
    """Print until the disk is full; the exception is that of `print`, or one that comes later."""
    try:
        while True:
            print("a line of a very talkative program " * 4, flush=True)
    except OSError:
        tell("fault")
        if case["variant"] == 0:
            raise
    raise ValueError("after the disk was full")


def micro_batches():
    """The same data for each step, by a loader with workers where the case wants one."""
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(NUM_MICRO_BATCHES * BATCH, WIDTH, generator=generator)
    y = torch.randn(NUM_MICRO_BATCHES * BATCH, 1, generator=generator)
    if kind != "loader_kill":
        while True:
            yield from zip(x.split(BATCH), y.split(BATCH), strict=True)
    dataset = torch.utils.data.TensorDataset(x, y)
    loader = torch.utils.data.DataLoader(dataset, batch_size=BATCH, num_workers=2, persistent_workers=True)
    while True:
        yield from loader


def main():
    torch.manual_seed(1)
    model = nn.Sequential(*[Block() for _ in range(NUM_BLOCKS)], nn.Linear(WIDTH, 1))
    if kind != "plain":
        early_faults()
        farspan.distribute(model, measure=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    batches = micro_batches()
    for step in range(case["num_steps"]):
        now["step"], now["forwards"] = step, 0
        if kind == "report":
            lose_report_folder()
        losses = []
        for number in range(NUM_MICRO_BATCHES):
            x, y = next(batches)
            if strikes("forward", number):
                fault()
            if kind == "other_module" and is_victim and (step, number) == (case["step"], case["micro_batch"]):
                tell("fault")
                loss = nn.functional.mse_loss(model[-1](model[0](x)), y)
            else:
                loss = nn.functional.mse_loss(model(x), y)
            if strikes("backward", number):
                fault()
            (loss / NUM_MICRO_BATCHES).backward()
            losses.append(loss.detach())
        if strikes("step"):
            fault()
        if kind == "no_step" and is_victim and step == case["step"]:
            tell("fault")
        else:
            optimizer.step()
        optimizer.zero_grad()
        mean = float(torch.stack(losses).mean().item())
        if step == 0:
            tell("training")
        if rank == 0:
            print(f"step {step} loss {float(mean).hex()}", flush=True)
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().numpy().tobytes())
    if rank == 0:
        print(f"weights {digest.hexdigest()}", flush=True)
    tell("over")


if __name__ == "__main__":
    main()
