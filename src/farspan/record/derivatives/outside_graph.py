"""What autograd has recorded of plain tensors outside of the model, which gradients with a history go on through.

    x (plain) --> torch.cat((x, t), 1) --> | model | --> u
    d = torch.autograd.grad(u, x, ..., create_graph=True)      through the cat as well

Every rank has that graph. It is gone through where the gradient comes from, as a recorded call of the gradient alone:
what gives the same for every value of the tensors outside, as taking parts, joining, scaling by numbers do.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from farspan.record.derivatives.refusal import refuse_second_derivatives
from farspan.torch_private import leaves_with_gradient

if TYPE_CHECKING:
    from farspan.record.recording import Recording

__all__ = ["OutsideGraph"]


class OutsideGraph:
    """The way from plain tensors that the model is given back to those whose gradients are requested.

    Args:
        requested: The latter.
    """

    def __init__(self, requested: Sequence[torch.Tensor]) -> None:
        self.requested = {id(tensor): tensor for tensor in requested}
        self._behind: dict[int, list[torch.Tensor]] = {}

    def behind(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Returns the other requested tensors to which the gradient of a tensor goes on.

        Raises:
            WholeError: What comes to them is not the same for all values of tensors that need gradients.
        """
        sources = [item for item in self.requested.values() if item is not tensor]
        if not sources or tensor.grad_fn is None:
            return []
        if id(tensor) not in self._behind:
            self._behind[id(tensor)] = _linear_in(tensor, sources)
        return self._behind[id(tensor)]

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
        gradients = tuple([gradient for _, gradient in arrived])
        found = recorder.record_call(_Derivative(roots, sources), gradients, {}, None)
        return list(zip(sources, found, strict=True))


class _Derivative:
    """The derivative of what has been computed outside of the model, as a function of the gradients of its results."""

    def __init__(self, roots: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
        self.roots = roots
        self.sources = sources

    def __call__(self, *gradients: torch.Tensor) -> tuple[torch.Tensor, ...]:
        found = torch.autograd.grad(
            self.roots, self.sources, gradients, create_graph=True, retain_graph=True, allow_unused=True
        )
        return tuple([gradient.clone() for gradient in found])

    def __str__(self) -> str:
        return "derivative of what is computed outside of the model"


def _linear_in(root: torch.Tensor, sources: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Returns those of `sources` to which gradient of a tensor comes.

    Raises:
        WholeError: What comes is not the same for all values of tensors that need gradients.
    """
    with torch.enable_grad():
        seed = torch.zeros_like(root, requires_grad=True)
        found = torch.autograd.grad(root, sources, seed, create_graph=True, retain_graph=True, allow_unused=True)
        if any(leaf is not seed for item in found if item is not None for leaf in leaves_with_gradient(item)):
            raise refuse_second_derivatives("it goes through operations outside of the model that are not linear")
    return [source for source, gradient in zip(sources, found, strict=True) if gradient is not None]
