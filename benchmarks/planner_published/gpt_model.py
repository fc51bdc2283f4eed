"""A GPT as one writes it in torch: the model of the zero-bubble tables, for farspan to record."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

__all__ = ["GPT", "Sizes"]

DROPOUT = 0.1
"""Megatron's default, of attention and of what is added to the residual."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """What a GPT is made of.

    Attributes:
        layers: Blocks.
        hidden: Size of what flows between them.
        heads: Of attention.
        sequence: The longest text.
        vocabulary: Rows of the embedding, and of the output layer, which has weights of its own.
        is_fused: Whether attention is one operation.
        has_one_dropout: Whether dropout is the one operation that torch has for GPUs, where it has three for CPUs.
    """

    layers: int
    hidden: int
    heads: int
    sequence: int
    vocabulary: int
    is_fused: bool = False
    has_one_dropout: bool = False


class Dropout(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.is_one = sizes.has_one_dropout

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.native_dropout(x, DROPOUT, True)[0] if self.is_one else F.dropout(x, DROPOUT)


class Attention(nn.Module):
    """Causal attention in pieces: the scores are in memory."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.heads, self.width = sizes.heads, sizes.hidden // sizes.heads
        self.qkv = nn.Linear(sizes.hidden, 3 * sizes.hidden)
        self.out = nn.Linear(sizes.hidden, sizes.hidden)
        self.dropout = Dropout(sizes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """From [batch, sequence, hidden] to the same."""
        batch, sequence, hidden = x.shape
        parts = self.qkv(x).view(batch, sequence, 3, self.heads, self.width).permute(2, 0, 3, 1, 4)
        q, k, v = (each.reshape(batch * self.heads, sequence, self.width) for each in parts.unbind())
        mask = torch.full((sequence, sequence), float("-inf"), dtype=x.dtype, device=x.device).triu(1)
        scores = torch.baddbmm(mask, q, k.transpose(1, 2), alpha=self.width**-0.5)
        context = torch.bmm(self.dropout(scores.softmax(-1)), v)
        context = context.view(batch, self.heads, sequence, self.width).transpose(1, 2)
        return self.out(context.reshape(batch, sequence, hidden))


class FusedAttention(Attention):
    """The same as one operation of torch, which keeps no scores."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, sequence, hidden = x.shape
        q, k, v = self.qkv(x).view(batch, sequence, 3, self.heads, self.width).permute(2, 0, 3, 1, 4).unbind()
        context = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(context.transpose(1, 2).reshape(batch, sequence, hidden))


class Block(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(sizes.hidden)
        self.attention = FusedAttention(sizes) if sizes.is_fused else Attention(sizes)
        self.second_norm = nn.LayerNorm(sizes.hidden)
        self.wide = nn.Linear(sizes.hidden, 4 * sizes.hidden)
        self.narrow = nn.Linear(4 * sizes.hidden, sizes.hidden)
        self.dropout = Dropout(sizes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.dropout(self.attention(self.norm(x)))
        return x + self.dropout(self.narrow(F.gelu(self.wide(self.second_norm(x)))))


class GPT(nn.Module):
    """Tokens [batch, sequence] to logits [batch, sequence, vocabulary]."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.embedding = nn.Embedding(sizes.vocabulary, sizes.hidden)
        self.positions = nn.Embedding(sizes.sequence, sizes.hidden)
        self.dropout = Dropout(sizes)
        self.blocks = nn.ModuleList([Block(sizes) for _ in range(sizes.layers)])
        self.norm = nn.LayerNorm(sizes.hidden)
        self.head = nn.Linear(sizes.hidden, sizes.vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.dropout(self.embedding(tokens) + self.positions(places))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))
