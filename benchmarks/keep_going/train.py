"""The program that loses groups: every rank of `farspan run --keep-going`, or of the run that is never killed.

    train.py groups FOLDER PIPE NUM_GROUPS            under farspan; says where it is, and leaves what it has found
    train.py reference FOLDER PIPE NUM_GROUPS         under torchrun-like variables: gloo alone, one process for a group

The reference knows which groups each mean is over (FOLDER/means.json), computes them in one process for each
group by `all_reduce` among exactly these, and knows nothing of farspan.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parents[2]), str(Path(__file__).resolve().parents[2] / "src")]

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from benchmarks.recovery.words import say  # noqa: E402
from torch import Tensor, nn  # noqa: E402

NUM_STEPS = 150
PAUSE_S = 0.03
MICRO_BATCHES = 2
WIDTH = 32


def build() -> nn.Sequential:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for _ in range(3):
        layers += [nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Tanh()]
    return nn.Sequential(*layers, nn.Linear(WIDTH, 8))


def losses_of(model: nn.Module, step: int, group: int) -> Tensor:
    """The last loss of a step; all of its backwards have run, or are recorded."""
    generator = torch.Generator().manual_seed(1000 * step + group)
    loss = torch.zeros(())
    for _ in range(MICRO_BATCHES):
        x, y = torch.randn(6, WIDTH, generator=generator), torch.randint(0, 8, (6,), generator=generator)
        loss = F.cross_entropy(model(x), y) / MICRO_BATCHES
        loss.backward()
    return loss


def optimizer_of(model: nn.Module) -> tuple[Any, Any]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, NUM_STEPS)


def state_of(model: nn.Module, optimizer: Any) -> list[Any]:
    moments = [kept for _, kept in sorted(optimizer.state_dict()["state"].items())]
    tensors = [*model.state_dict().values(), *(tensor for kept in moments for _, tensor in sorted(kept.items()))]
    return [tensor.tolist() for tensor in tensors]


def with_farspan(folder: Path, pipe: str, num_groups: int) -> None:
    import farspan
    from farspan.execute.process.world import current_engine

    torch.set_num_threads(1)
    rank = int(os.environ["FARSPAN_RANK"])
    model = farspan.distribute(build(), data_parallel=num_groups, measure=False)
    engine: Any = current_engine()
    group = farspan.data_rank()
    optimizer, schedule = optimizer_of(model)
    losses: list[float] = []
    means: list[int] = []
    for step in range(NUM_STEPS):
        optimizer.zero_grad()
        loss = losses_of(model, step, group)
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
        means.append(engine.groups.num_averaged)
        say(pipe, "step", rank, step, farspan.data_world(), time.monotonic())
        time.sleep(PAUSE_S)
    state = state_of(model, optimizer)
    if farspan.rank() == 0:
        found = {"losses": losses, "means": means, "state": state}
        (folder / f"group{group}.json").write_text(json.dumps(found))


def with_gloo(folder: Path, num_groups: int) -> None:
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=int(os.environ["RANK"]), world_size=num_groups
    )
    group = dist.get_rank()
    means: list[list[int]] = json.loads((folder / "means.json").read_text())
    members: dict[tuple[int, ...], Any] = {
        tuple(each): dist.new_group(each) for each in sorted({tuple(each) for each in means}, reverse=True)
    }
    model = build()
    optimizer, schedule = optimizer_of(model)
    losses: list[float] = []
    for step, groups in enumerate(means):
        if group not in groups:
            break
        optimizer.zero_grad()
        losses.append(losses_of(model, step, group).item())
        gradients = [parameter.grad for parameter in model.parameters()][::-1]
        parts = [gradient.reshape(-1) for gradient in gradients if gradient is not None]
        share = 1 / len(groups)
        flat = torch.cat([*[part * share for part in parts], torch.full((len(parts),), share)])
        dist.all_reduce(flat, group=members[tuple(groups)])
        for gradient, part in zip(gradients, flat.split([part.numel() for part in parts] + [len(parts)]), strict=False):
            assert gradient is not None
            gradient.copy_(part.view_as(gradient))
        for buffer in model.buffers():
            dist.broadcast(buffer, groups[0], group=members[tuple(groups)])
        optimizer.step()
        schedule.step()
    else:
        found = {"losses": losses, "state": state_of(model, optimizer)}
        (folder / f"reference{group}.json").write_text(json.dumps(found))
    dist.barrier()


if __name__ == "__main__":
    if sys.argv[1] == "groups":
        say(sys.argv[3], "pid", os.environ["FARSPAN_RANK"], os.getpid())
        with_farspan(Path(sys.argv[2]), sys.argv[3], int(sys.argv[4]))
    else:
        with_gloo(Path(sys.argv[2]), int(sys.argv[4]))
