"""A script that every rank runs: `tell_groups.py NUM_GROUPS`; it prints what its group is given and draws, as JSON."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import farspan
from farspan.execute.process.world import current_engine

NUM_STEPS = 3


def batch_of(group: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(group)
    return torch.randn(16, 4, generator=generator), torch.randn(16, 2, generator=generator)


def net() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


def minimize(model: Any, groups: list[int]) -> None:
    """A line search, which reads the loss, on the batches of these groups."""
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=4, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = torch.stack([F.mse_loss(model(x), y) for x, y in map(batch_of, groups)]).mean()
        loss.backward()
        return loss

    for _ in range(NUM_STEPS):
        optimizer.step(closure)


def main(num_groups: int) -> None:
    found: dict[str, Any] = {"before": [farspan.data_rank(), farspan.data_world()]}
    wanted = net()
    minimize(wanted, list(range(num_groups)))
    torch.manual_seed(int(os.environ["RANK"]))
    model: Any = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 2))
    farspan.distribute(model, data_parallel=num_groups)
    found["after"] = [farspan.data_rank(), farspan.data_world(), farspan.rank()]
    found["weights"] = {name: item.tolist() for name, item in model.state_dict().items()}
    plain = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 2))
    plain.load_state_dict(model.state_dict())
    for name, each in (("plain", plain), ("model", model)):
        torch.manual_seed(7)
        found[f"{name} gives"] = [each(torch.ones(3, 4)).tolist() for _ in range(2)]
        found[f"{name} is followed by"] = torch.rand(3).tolist()
    reader = int(os.environ["WORLD_SIZE"]) // num_groups - 1
    given = farspan.from_rank(reader, torch.full((2, 4), 1.0 + farspan.data_rank()) if farspan.rank() == reader else 0)
    found["given"] = given.sum().item()
    second: Any = farspan.distribute(net(), seed=3)
    minimize(second, [farspan.data_rank()])
    found["minimized"] = [item.flatten().tolist() for item in second.state_dict().values()]
    found["wanted"] = [item.flatten().tolist() for item in wanted.state_dict().values()]
    third: Any = farspan.distribute(net())
    third[0].requires_grad_(False)
    optimizer = torch.optim.SGD(third.parameters(), lr=0.1)
    third(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    engine: Any = current_engine()
    found["sent"] = sum(bucket.num_elements for bucket in engine.groups.buckets)
    print(json.dumps(found))


if __name__ == "__main__":
    main(int(sys.argv[1]))
