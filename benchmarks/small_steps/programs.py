"""The small programs: each gives a function that takes one step of an ordinary training loop, or writes one token.

They know nothing of farspan; `distribute` is the identity in the plain process.

mlp          784 -> 256 -> 256 -> 256 -> 10, batch 64, Adam
tiny         examples/loops/nanogpt.py's sizes: 4 blocks of width 32, 4 micro-batches
nanogpt      what nanoGPT's own README trains on a CPU: 4 blocks of width 128, context 64, batch 12, clipping
demo         examples/train_gpt.py: 8 blocks of width 128, 8 micro-batches, clipping
whole        a token of nanoGPT's generate: the whole text each time, top-k, multinomial
cached       a token of a transformers Llama with a DynamicCache
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gpt import GPT, NUM_BYTES

__all__ = ["PROGRAMS", "RUNS_OF_MESSAGES", "Step"]

Step = Callable[[], None]
Distribute = Callable[[nn.Module], Any]


def mlp(distribute: Distribute) -> Step:
    model = distribute(
        nn.Sequential(
            nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(),
            nn.Linear(256, 10),
        )
    )  # fmt: skip
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    x, y = torch.randn(64, 784), torch.randint(10, (64,))

    def step() -> None:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        loss.item()

    return step


def gpt(distribute: Distribute, *, width: int, num_blocks: int, context: int, batch: int, parts: int) -> Step:
    """A step of `parts` micro-batches."""
    model = distribute(GPT(width=width, num_heads=4, num_blocks=num_blocks, context=context))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95))
    text = torch.randint(NUM_BYTES, (100_000,))

    def step() -> None:
        optimizer.zero_grad()
        losses: list[Tensor] = []
        for _ in range(parts):
            starts = torch.randint(len(text) - context - 1, (batch,)).tolist()
            x = torch.stack([text[start : start + context] for start in starts])
            y = torch.stack([text[start + 1 : start + context + 1] for start in starts])
            loss = F.cross_entropy(model(x).view(-1, NUM_BYTES), y.reshape(-1)) / parts
            loss.backward()
            losses.append(loss.detach())
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        sum(loss.item() for loss in losses)

    return step


def tiny(distribute: Distribute) -> Step:
    return gpt(distribute, width=32, num_blocks=4, context=32, batch=4, parts=4)


def nanogpt(distribute: Distribute) -> Step:
    return gpt(distribute, width=128, num_blocks=4, context=64, batch=12, parts=1)


def demo(distribute: Distribute) -> Step:
    return gpt(distribute, width=128, num_blocks=8, context=64, batch=4, parts=8)


def whole(distribute: Distribute) -> Step:
    model = distribute(GPT(width=128, num_heads=4, num_blocks=4, context=1024)).eval()
    text = torch.zeros(1, 1, dtype=torch.long)

    @torch.no_grad()
    def token() -> None:
        nonlocal text
        logits = model(text[:, -1024:])[:, -1, :] / 0.8
        values, _ = torch.topk(logits, 200)
        logits[logits < values[:, [-1]]] = -float("inf")
        text = torch.cat((text, torch.multinomial(F.softmax(logits, dim=-1), num_samples=1)), dim=1)
        int(text[0, -1])

    return token


def cached(distribute: Distribute) -> Step:
    from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=256, hidden_size=128, intermediate_size=384, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=4, max_position_embeddings=2048,
    )  # fmt: skip
    model = distribute(LlamaForCausalLM(config)).eval()
    cache = DynamicCache(config=config)
    latest = torch.zeros(1, 1, dtype=torch.long)

    @torch.no_grad()
    def token() -> None:
        nonlocal latest
        logits = model(input_ids=latest, past_key_values=cache, use_cache=True).logits[:, -1, :]
        latest = logits.argmax(dim=-1, keepdim=True)
        int(latest)

    return token


PROGRAMS: dict[str, Callable[[Distribute], Step]] = {
    "mlp": mlp, "tiny": tiny, "nanogpt": nanogpt, "demo": demo, "whole": whole, "cached": cached,
}  # fmt: skip

RUNS_OF_MESSAGES = {"mlp": 64 * 256, "whole": 200 * 128, "cached": 128}
"""How many numbers go from one half of a model to the other."""
