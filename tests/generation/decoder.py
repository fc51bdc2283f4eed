"""A language model with a cache of keys and values written by hand, and ways to generate with it."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["PROMPTS", "Decoder", "Grown", "Reserved", "beam", "greedy", "sample"]

VOCAB, WIDTH, HEADS, LONGEST, END = 19, 16, 2, 40, 3
PROMPTS = torch.randint(4, VOCAB, (3, 5), generator=torch.Generator().manual_seed(2))


class Grown:
    """Keys and values that grow with each token; nothing is there before the first one."""

    def __init__(self) -> None:
        self.layers: dict[int, tuple[Tensor, Tensor]] = {}
        self.length = 0

    def extend(self, number: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        if number in self.layers:
            keys = torch.cat([self.layers[number][0], keys], 2)
            values = torch.cat([self.layers[number][1], values], 2)
        self.layers[number] = (keys, values)
        if number == 0:
            self.length = keys.shape[2]
        return keys, values

    def reorder(self, rows: Tensor) -> None:
        self.layers = {number: (keys[rows], values[rows]) for number, (keys, values) in self.layers.items()}


class Reserved:
    """Memory for the longest text, written in place; how far it is full is a tensor."""

    def __init__(self, batch: int, num_layers: int) -> None:
        shape = (num_layers, batch, HEADS, LONGEST, WIDTH // HEADS)
        self.layers = [(keys, values) for keys, values in zip(torch.zeros(shape), torch.zeros(shape), strict=True)]
        self.layers = [(keys.clone(), values.clone()) for keys, values in self.layers]
        self.full = [torch.tensor([0]) for _ in range(num_layers)]
        self.length = 0

    def extend(self, number: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        all_keys, all_values = self.layers[number]
        positions = torch.arange(keys.shape[2]) + self.full[number]
        self.full[number].add_(keys.shape[2])
        all_keys.index_copy_(2, positions, keys)
        all_values.index_copy_(2, positions, values)
        if number == 0:
            self.length += keys.shape[2]
        return all_keys, all_values


class Layer(nn.Module):
    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.project = nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(
            nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH)
        )
        self.dropout = nn.Dropout(0.3)

    def forward(self, x: Tensor, cache: Any, first: int) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = self.qkv(self.norm(x)).view(batch, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        if cache is not None:
            k, v = cache.extend(self.number, k, v)
        seen = torch.arange(k.shape[2]) <= torch.arange(first, first + length)[:, None]
        attended = F.scaled_dot_product_attention(q, k, v, attn_mask=seen)
        x = x + self.dropout(self.project(attended.transpose(1, 2).reshape(batch, length, WIDTH)))
        return x + self.mlp(x)


class Decoder(nn.Module):
    """A causal model. Its logits are spread out, so that a wrong key shows in the tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.position = nn.Parameter(torch.randn(LONGEST, WIDTH))
        self.blocks = nn.ModuleList([Layer(number) for number in range(2)])
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        with torch.no_grad():
            self.head.weight.mul_(8)
            for block in self.blocks:
                block.get_parameter("qkv.weight").mul_(4)

    def forward(self, ids: Tensor, cache: Any = None) -> Tensor:
        first = 0 if cache is None else cache.length
        x = self.embed(ids) + self.position[first : first + ids.shape[1]]
        for block in self.blocks:
            x = block(x, cache, first)
        return self.head(self.norm(x))


@torch.no_grad()
def greedy(model: Any, ids: Tensor, cache: Any, *, num_tokens: int = 12, stops: bool = True) -> list[list[int]]:
    """The likeliest token each time, until all rows have ended."""
    found, ended = ids, torch.zeros(len(ids), dtype=torch.bool)
    while found.shape[1] < ids.shape[1] + num_tokens:
        step = (model(found) if cache is None else model(ids, cache))[:, -1].argmax(-1)
        step = torch.where(ended, END, step)
        ended = ended | (step == END)
        found = torch.cat([found, step[:, None]], 1)
        ids = step[:, None]
        if stops and ended.all():
            break
    return found.tolist()


@torch.inference_mode()
def sample(model: Any, ids: Tensor, cache: Any, generator: torch.Generator | None = None) -> list[list[int]]:
    """Tokens drawn by their probabilities, by the program's own generator."""
    found = ids
    for _ in range(10):
        chances = (model(ids, cache)[:, -1] / 6).softmax(-1)
        ids = torch.multinomial(chances, 1, generator=generator)
        found = torch.cat([found, ids], 1)
    return found.tolist()


@torch.no_grad()
def beam(model: Any, ids: Tensor, cache: Grown, *, width: int = 3) -> list[list[int]]:
    """The likeliest texts of all that begin with the likeliest tokens."""
    rows = len(ids)
    found = ids = ids.repeat_interleave(width, 0)
    scores = torch.tensor([0.0] + [-1e9] * (width - 1)).repeat(rows, 1)
    for _ in range(8):
        chances = model(ids, cache)[:, -1].log_softmax(-1).view(rows, width, -1)
        scores, best = (scores[:, :, None] + chances).flatten(1).topk(width)
        origin = (best // VOCAB + torch.arange(rows)[:, None] * width).flatten()
        ids = (best % VOCAB).view(-1, 1)
        found = torch.cat([found[origin], ids], 1)
        cache.reorder(origin)
    return found.tolist()
