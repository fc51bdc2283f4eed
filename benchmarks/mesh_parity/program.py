"""The program whose numbers are compared: a small GPT, its loop, and the loop of k groups in one process."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["KINDS", "NUM_BLOCKS", "NUM_MICRO_BATCHES", "NUM_STEPS", "Found", "built", "in_one_process", "train"]

NUM_BLOCKS, SIZE, HEADS, WORDS, LENGTH = 4, 48, 12, 50, 12
NUM_STEPS, NUM_MICRO_BATCHES = 3, 5
KINDS = ("losses", "norms", "gradients", "weights")
Found = dict[str, list[float]]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.out = nn.LayerNorm(SIZE), nn.Linear(SIZE, SIZE)
        self.qkv = nn.Linear(SIZE, 3 * SIZE, bias=False)  # the gradient of a key's bias is rounding alone
        self.mlp = nn.Sequential(nn.LayerNorm(SIZE), nn.Linear(SIZE, 4 * SIZE), nn.GELU(), nn.Linear(4 * SIZE, SIZE))
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(self.norm(x)).view(*x.shape[:2], 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).reshape(x.shape)
        x = x + self.drop(self.out(y))
        return x + self.drop(self.mlp(x))


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, SIZE)
        self.position = nn.Parameter(torch.randn(LENGTH, SIZE) * 0.02)
        self.blocks = nn.ModuleList([Block() for _ in range(NUM_BLOCKS)])
        self.head = nn.Linear(SIZE, WORDS, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, words: Tensor) -> Tensor:
        x = self.embed(words) + self.position
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def built(dropout: float) -> nn.Module:
    torch.manual_seed(0)
    model = GPT()
    for block in model.blocks:
        block.drop.p = dropout  # type: ignore[union-attr]
    return model


def words_of(group: int) -> Tensor:
    """The micro-batches of a group, by step."""
    generator = torch.Generator().manual_seed(1 + group)
    return torch.randint(WORDS, (NUM_STEPS, NUM_MICRO_BATCHES, 3, LENGTH + 1), generator=generator)


def train(model: Any, group: int) -> Iterator[Found]:
    """Losses, norms, all numbers of the gradients of the first step, and of the weights after the last one.

    Yields where the gradients of groups are averaged, and at the end.
    """
    torch.manual_seed(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    found: Found = {kind: [] for kind in KINDS}
    for batch in words_of(group):
        optimizer.zero_grad()
        losses: list[Any] = []
        for part in batch:
            out = model(part[:, :-1])
            losses.append(F.cross_entropy(out.flatten(0, 1), part[:, 1:].flatten()) / NUM_MICRO_BATCHES)
            losses[-1].backward()
        yield found
        if not found["gradients"]:
            found["gradients"] = [x for item in model.parameters() for x in item.grad.flatten().tolist()]
        found["norms"].append(nn.utils.clip_grad_norm_(model.parameters(), 1.0).item())
        optimizer.step()
        found["losses"] += [loss.item() for loss in losses]
    found["weights"] = [x for item in model.state_dict().values() for x in item.flatten().tolist()]
    yield found


def ring_sum(flats: list[Tensor]) -> Tensor:
    """The sum of what k ranks have, added up as gloo's ring does.

    The tensor is k chunks of two segments each, all segments as long but for the last one. Chunk c sets out at rank
    c - 1, goes to c - 2, and so on to rank c, and each adds its own. (Of two ranks that is a + b everywhere.)
    """
    k = len(flats)
    chunk = 2 * -(-flats[0].numel() // (2 * k))
    parts = [flat.split(chunk) for flat in flats]
    sums: list[Tensor] = []
    for number in range(len(parts[0])):
        total = parts[(number - 1) % k][number]
        for step in range(2, k + 1):
            total = total + parts[(number - step) % k][number]
        sums.append(total)
    return torch.cat(sums)


def in_one_process(num_groups: int, dropout: float, owned: list[list[str]]) -> list[Found]:
    """What each group finds where one process averages the gradients of all.

    Args:
        num_groups: How many there are.
        dropout: Of the model.
        owned: By rank of a group the names of the parameters that it owns. Each rank's gradients are one bucket: the
            last parameter first, each times 1 / k, and behind them a one for each.
    """
    models = [built(dropout) for _ in range(num_groups)]
    loops = [train(model, group) for group, model in enumerate(models)]
    found: list[Found] = []
    for step in range(NUM_STEPS + 1):
        found = [next(loop) for loop in loops]
        if num_groups == 1 or step == NUM_STEPS:
            continue
        named: list[dict[str, Any]] = [dict(model.named_parameters()) for model in models]
        for names in filter(None, owned):
            last_first = names[::-1]
            ones = torch.ones(len(names))
            flats = [torch.cat([*(item[name].grad.flatten() for name in last_first), ones]) for item in named]
            mean = ring_sum([flat * (1 / num_groups) for flat in flats])
            sizes = [named[0][name].numel() for name in last_first]
            for item in named:
                for name, part in zip(last_first, mean[: sum(sizes)].split(sizes), strict=True):
                    item[name].grad = part.view_as(item[name]).clone()
    return found
