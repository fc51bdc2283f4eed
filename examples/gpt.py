"""A byte-level GPT, written as one writes it for one device: it knows nothing of stages, ranks or farspan.

bytes [batch, sequence] -> embedding + position -> block x 8 -> norm -> head -> logits [batch, sequence, 256]
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["GPT", "NUM_BYTES"]

NUM_BYTES = 256


class Attention(nn.Module):
    """Causal self-attention, [batch, sequence, width] to the same shape."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.query_key_value = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, sequence, width = x.shape
        heads = self.query_key_value(x).view(batch, sequence, 3, self.num_heads, width // self.num_heads)
        query, key, value = heads.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.project(mixed.transpose(1, 2).reshape(batch, sequence, width))


class Block(nn.Module):
    """Pre-norm transformer block: attention, then a two-layer perceptron, each on a residual."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = Attention(width, num_heads)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class GPT(nn.Module):
    """Predicts the next byte from at most `context` bytes before it."""

    def __init__(self, *, width: int, num_heads: int, num_blocks: int, context: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(NUM_BYTES, width)
        self.position = nn.Embedding(context, width)
        self.blocks = nn.ModuleList([Block(width, num_heads) for _ in range(num_blocks)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, NUM_BYTES, bias=False)
        self.apply(_init)
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                if name.endswith(("attention.project.weight", "mlp.2.weight")):  # what adds to the residual
                    parameter /= math.sqrt(2 * num_blocks)

    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.embedding(tokens) + self.position(places)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def _init(module: nn.Module) -> None:
    if isinstance(module, nn.Embedding):
        nn.init.normal_(module.weight, std=0.5)
    if isinstance(module, nn.Linear):
        nn.init.normal_(module.weight, std=0.7 / math.sqrt(module.in_features))
        if module.bias is not None:
            nn.init.zeros_(module.bias)
