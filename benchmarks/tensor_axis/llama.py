"""Llama's blocks in plain PyTorch, and the ways in which two processes can train them."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

__all__ = ["HEAD_SIZE", "Blocks", "parallelized", "sharded"]

HEAD_SIZE = 64


class RMSNorm(nn.Module):
    """Divides by the root of the mean of squares, and scales."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


class Attention(nn.Module):
    """Causal, with rotary positions."""

    def __init__(self, width: int, num_parts: int) -> None:
        super().__init__()
        inner = width // num_parts
        self.q, self.k, self.v = (nn.Linear(width, inner, bias=False) for _ in range(3))
        self.o = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = (each(x).view(batch, length, -1, HEAD_SIZE).transpose(1, 2) for each in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(turned(q, cos, sin), turned(k, cos, sin), v, is_causal=True)
        return self.o(y.transpose(1, 2).reshape(batch, length, -1))


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, width: int, num_parts: int) -> None:
        super().__init__()
        inner = width * 11 // 4 // num_parts
        self.gate, self.up = (nn.Linear(width, inner, bias=False) for _ in range(2))
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """Attention and MLP, each behind a norm and beside a residual."""

    def __init__(self, width: int, num_parts: int) -> None:
        super().__init__()
        self.norm1, self.attention = RMSNorm(width), Attention(width, num_parts)
        self.norm2, self.mlp = RMSNorm(width), MLP(width, num_parts)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x), cos, sin)
        return x + self.mlp(self.norm2(x))


class Blocks(nn.Module):
    """Maps hidden states [batch, length, width] to hidden states.

    Args:
        width: Of the states.
        num_blocks: How many.
        num_parts: Each matrix is one of so many parts of a whole one's columns, or rows.
    """

    def __init__(self, width: int, num_blocks: int, num_parts: int = 1) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(width, num_parts) for _ in range(num_blocks)])
        self.norm = RMSNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        angles = torch.outer(torch.arange(x.shape[1]), 1e4 ** -(torch.arange(0, HEAD_SIZE, 2) / HEAD_SIZE))
        angles = torch.cat([angles, angles], -1)
        cos, sin = angles.cos(), angles.sin()
        for block in self.blocks:
            x = block(x, cos, sin)
        return self.norm(x)


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Returns x, turned by its positions."""
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat([-b, a], -1) * sin


def parallelized(model: Blocks, mesh: DeviceMesh) -> Blocks:
    """Splits each layer over the ranks of a mesh by hand, as Megatron does."""
    column, row = ColwiseParallel, RowwiseParallel
    plan: dict[str, Any] = {f"attention.{name}": column() for name in "qkv"} | {"attention.o": row()}
    plan |= {"mlp.gate": column(), "mlp.up": column(), "mlp.down": row()}
    for block in model.blocks:
        parallelize_module(block, mesh, plan)
    return model


def sharded(model: Blocks, mesh: DeviceMesh) -> Blocks:
    """Shards parameters over the ranks of a mesh, block by block: each has a part of the batch."""
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model
