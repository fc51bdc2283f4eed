"""Goes through a graph that autograd has of plain tensors, any number of times, as a function of what it depends on.

    x --> sin --> z                 autograd's graph, there already
    replay(g_z, x') = g_z cos(x)    x' stands for x: gradient that comes to x' is a replay of the graph's derivative

A function that is given x' cannot compute cos(x') from it, for nobody knows how z was computed. But x' has the values
of x, so what autograd computes of x is right, and only whose gradient it is has to be said.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from farspan.torch_private import is_fake

__all__ = ["replay"]

_Compute = Callable[[list[torch.Tensor]], Sequence[torch.Tensor | None]]


class _Graph(NamedTuple):
    compute: _Compute
    """Gives results, of which autograd has the graph, from the tensors at its ends."""
    ends: Sequence[torch.Tensor | None]
    """These tensors; None for those that are given."""
    like: Sequence[torch.Tensor]
    """Tensors with the shapes of the results."""


def replay(
    compute: _Compute,
    given: Sequence[torch.Tensor],
    ends: Sequence[torch.Tensor | None],
    like: Sequence[torch.Tensor],
) -> tuple[torch.Tensor, ...]:
    """Returns what `compute` does, in memory of its own and as a function of `given`.

    Args:
        compute: Is given `ends`, with the values of `given` where they are None.
        given: Tensors of the same values as `ends`.
        ends: The tensors at which autograd's graph of the results ends.
        like: Tensors with the shapes of the results. Where these are None, zeros are returned.
    """
    results: Any = _Replay.apply(_Graph(compute, ends, like), *given)
    return results


class _Replay(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, graph: _Graph, *given: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.save_for_backward(*given)
        ctx.ends, ctx.results = graph.ends, ()
        if any(map(is_fake, given)):
            return tuple([given[0].new_zeros(item.shape, dtype=item.dtype) for item in graph.like])
        with torch.enable_grad():
            ends = [
                item.detach().requires_grad_() if end is None else end
                for item, end in zip(given, graph.ends, strict=True)
            ]
            results = graph.compute(ends)
        ctx.ends, ctx.results = ends, results
        return tuple(
            [
                torch.zeros(item.shape, dtype=item.dtype, device=item.device)
                if result is None
                else result.detach().clone(memory_format=torch.contiguous_format)
                for result, item in zip(results, graph.like, strict=True)
            ]
        )

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        given, ends, results = ctx.saved_tensors, ctx.ends, ctx.results

        def derivative(variables: list[torch.Tensor]) -> Sequence[torch.Tensor | None]:
            pairs = zip(results, variables[len(given) :], strict=True)
            roots = [(item, gradient) for item, gradient in pairs if item is not None and item.requires_grad]
            if not roots:
                return [None] * len(given)
            return torch.autograd.grad(
                [item for item, _ in roots],
                variables[: len(given)],
                [gradient for _, gradient in roots],
                create_graph=True,
                retain_graph=True,
                allow_unused=True,
            )

        found = replay(derivative, [*given, *gradients], [*ends, *(None for _ in gradients)], given)
        return (None, *found)
