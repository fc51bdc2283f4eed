"""The same model and data by torch's own means, under torchrun: DDP, and DCP in each step: FOLDER PIPE STEPS PAUSE.

Each step goes to a folder of its own, and the newest that has its metadata is loaded: DCP's way to have whole ones.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parents[2]), str(Path(__file__).resolve().parents[2] / "src")]

from benchmarks.recovery.words import say  # noqa: E402


def main() -> None:
    folder, pipe, num_steps = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    rank, start = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    say(pipe, "pid", start, rank, os.getpid())
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from benchmarks.exact_resume.program import Net, Noisy
    from torch import nn
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
    from torch.nn.parallel import DistributedDataParallel

    torch.set_num_threads(1)
    # With init_process_group("gloo") alone ranks find addresses of the start before, and wait for gloo's timeout.
    agent = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    store = dist.PrefixStore(f"start {start}", agent)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=int(os.environ["WORLD_SIZE"]))
    torch.manual_seed(0)
    model = DistributedDataParallel(Net())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    data = Noisy()
    step = 0
    whole = sorted((path for path in folder.glob("step-*") if (path / ".metadata").exists()), key=_step_of)
    if whole:
        weights, moments = get_state_dict(model, optimizer)
        state: dict[str, Any] = {"model": weights, "optimizer": moments}
        dcp.load(state, checkpoint_id=whole[-1])
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        step = _step_of(whole[-1])
    while step < num_steps:
        optimizer.zero_grad()
        items = [data[(8 * step + 2 * rank + i) % len(data)] for i in range(2)]
        x, y = torch.stack([item[0] for item in items]), torch.stack([item[1] for item in items])
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        step += 1
        weights, moments = get_state_dict(model, optimizer)
        dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=folder / f"step-{step}")
        if rank == 0:
            say(pipe, "step", start, step, time.monotonic())
        time.sleep(float(sys.argv[4]))
    dist.destroy_process_group()


def _step_of(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


if __name__ == "__main__":
    main()
