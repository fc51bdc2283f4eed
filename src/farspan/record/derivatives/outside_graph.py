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
        self._ways: dict[int, bool] = {}

    def goes_on_from(self, tensor: torch.Tensor) -> bool:
        """Returns whether the gradient of a tensor goes on to another one that is requested.

        Raises:
            WholeError: It is not the same for all values of these tensors.
        """
        sources = [item for item in self.requested.values() if item is not tensor]
        if not sources or tensor.grad_fn is None:
            return False
        if id(tensor) not in self._ways:
            self._ways[id(tensor)] = _leads_to(tensor, sources)
        return self._ways[id(tensor)]

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
        sources = [
            source
            for source in self.requested.values()
            if any(root is not source and _leads_to(root, [source]) for root in roots)
        ]
        # A requested tensor that is itself on the way keeps what it has got already.
        target = _Derivative(roots, sources)
        found = recorder.record_call(target, tuple([gradient for _, gradient in arrived]), {}, None)
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


def _leads_to(root: torch.Tensor, sources: Sequence[torch.Tensor]) -> bool:
    """Returns whether gradient of a tensor comes to one of others.

    Raises:
        WholeError: What comes is not the same for all values of tensors that need gradients.
    """
    with torch.enable_grad():
        seed = torch.zeros_like(root, requires_grad=True)
        found = torch.autograd.grad(root, sources, seed, create_graph=True, retain_graph=True, allow_unused=True)
        known = [gradient for gradient in found if gradient is not None]
        if any(leaf is not seed for gradient in known for leaf in leaves_with_gradient(gradient)):
            raise refuse_second_derivatives("it goes through operations outside of the model that are not linear")
    return bool(known)
