"""What autograd has recorded of plain tensors outside of the model, which gradients with a history go on through.

    x (plain) --> torch.cat((x, t), 1) --> | model | --> u
    d = torch.autograd.grad(u, x, ..., create_graph=True)      through the cat as well

Every rank has that graph. It is gone through where the gradient comes from, as a recorded call of the gradient and,
where the way back is not linear, of the tensors at the graph's ends (`replayed_graph`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from farspan.record.derivatives.refusal import refuse_second_derivatives
from farspan.record.derivatives.replayed_graph import replay
from farspan.torch_private import hooks_on, leads_to, leaves_behind, leaves_with_gradient

if TYPE_CHECKING:
    from farspan.record.recording import Recording

__all__ = ["OutsideDerivative", "OutsideGraph"]


_TO_COMPUTED = "it goes through operations outside of the model that are not linear, to a tensor that is computed there"


class _Behind(NamedTuple):
    """Says where the gradient of a tensor outside of the model goes on to, in autograd's graph of plain tensors."""

    sources: list[torch.Tensor]
    """The requested tensors to which its gradient goes on."""
    leaves: list[torch.Tensor]
    """The tensors on which what arrives there depends, besides the gradient."""


class OutsideGraph:
    """The way from plain tensors that the model is given back to those whose gradients are requested.

    Args:
        requested: The latter.
    """

    def __init__(self, requested: Sequence[torch.Tensor]) -> None:
        self.requested = {id(tensor): tensor for tensor in requested}
        self._behind: dict[int, _Behind] = {}

    def behind(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Returns the other requested tensors to which the gradient of a tensor goes on.

        Raises:
            WholeError: There are hooks on the way, or it is not linear and ends within autograd's graph.
        """
        sources = [item for item in self.requested.values() if item is not tensor]
        if not sources or tensor.grad_fn is None:
            return []
        if id(tensor) not in self._behind:
            _check_hooks(tensor, sources)
            self._behind[id(tensor)] = _find_behind(tensor, sources)
        return self._behind[id(tensor)].sources

    def check_again(self, derivative: OutsideDerivative) -> None:
        """Raises if a derivative of what has been computed outside depends on a requested tensor that is not among
        its arguments."""
        inner = [item for item in self.requested.values() if item.grad_fn is not None]
        if derivative.leaves and any(leads_to(root, item) for root in derivative.roots for item in inner):
            raise refuse_second_derivatives(_TO_COMPUTED)

    def record(
        self, recorder: Recording, arrived: Sequence[tuple[torch.Tensor, torch.Tensor]]
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Records what takes gradients on; returns requested tensors and their gradients.

        Args:
            recorder: Which records it.
            arrived: Tensors from which gradient goes on, and their gradients.
        """
        if not arrived:
            return []
        roots = [root for root, _ in arrived]
        reached = {id(source) for root in roots for source in self.behind(root)}
        sources = [source for source in self.requested.values() if id(source) in reached]
        leaves = {id(leaf): leaf for root in roots for leaf in self._behind[id(root)].leaves}
        gradients = tuple([gradient for _, gradient in arrived])
        target = OutsideDerivative(roots, sources, list(leaves.values()))
        found = recorder.record_call(target, (gradients, tuple(leaves.values())), {}, None)
        return list(zip(sources, found, strict=True))


class OutsideDerivative:
    """The derivative of what has been computed outside of the model, as a function of the gradients of its results, and
    of the tensors on which it depends besides."""

    def __init__(
        self, roots: Sequence[torch.Tensor], sources: Sequence[torch.Tensor], leaves: Sequence[torch.Tensor]
    ) -> None:
        self.roots = roots
        self.sources = sources
        self.leaves = leaves

    def __call__(
        self, gradients: tuple[torch.Tensor, ...], leaves: tuple[torch.Tensor, ...]
    ) -> tuple[torch.Tensor, ...]:
        if not leaves:
            return tuple([gradient.clone() for gradient in self._differentiate(gradients)])
        return replay(
            lambda variables: self._differentiate(variables[: len(gradients)]),
            [*gradients, *leaves],
            [*(None for _ in gradients), *self.leaves],
            self.sources,
        )

    def _differentiate(self, gradients: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(
            self.roots, self.sources, gradients, create_graph=True, retain_graph=True, allow_unused=True
        )

    def __str__(self) -> str:
        return "derivative of what is computed outside of the model"


def _check_hooks(root: torch.Tensor, sources: Sequence[torch.Tensor]) -> None:
    """Raises if there are hooks on tensors on the way, which only autograd itself would call, on one rank."""
    leaves = set(map(id, leaves_behind(root)))
    if any(hooks_on(item) for item in (root, *sources) if item.grad_fn is not None or id(item) in leaves):
        raise refuse_second_derivatives("it goes through operations outside of the model, where a tensor has hooks")


def _find_behind(root: torch.Tensor, sources: Sequence[torch.Tensor]) -> _Behind:
    """Returns those of `sources` to which gradient of a tensor comes, and what it depends on.

    Raises:
        WholeError: It depends on more than the gradient, and a source is computed itself: what depends on the source
            cannot be told from what depends on what that is computed from.
    """
    with torch.enable_grad():
        seed = torch.zeros_like(root, requires_grad=True)
        found = torch.autograd.grad(root, sources, seed, create_graph=True, retain_graph=True, allow_unused=True)
        leaves = {id(leaf): leaf for item in found if item is not None for leaf in leaves_with_gradient(item)}
    leaves.pop(id(seed), None)
    reached = [source for source, gradient in zip(sources, found, strict=True) if gradient is not None]
    if leaves and any(source.grad_fn is not None for source in reached):
        raise refuse_second_derivatives(_TO_COMPUTED)
    return _Behind(reached, list(leaves.values()))
