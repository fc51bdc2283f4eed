"""Lists the functions that multiply by a matrix: which of their arguments is what."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

__all__ = ["PRODUCTS", "Product", "product_of"]

_T: Any = torch.Tensor


@dataclass(frozen=True, slots=True)
class Product:
    """One of the functions that multiply by a matrix.

    Attributes:
        names: Of its arguments, as torch calls them, in order.
        out_dim: The dimension of the matrix along which the result's last one lies.
        in_dim: The dimension along which that of x lies.
    """

    names: tuple[str, ...]
    out_dim: int
    in_dim: int

    def call(self, function: Any, x: Any, weight: Any, bias: Any) -> tuple[Any, tuple[Any, ...]]:
        """Returns a function that multiplies like this one, with or without a bias, and its arguments."""
        if self.names[0] == "bias":
            return (torch.mm, (x, weight)) if bias is None else (function, (bias, x, weight))
        return function, (x, weight) if bias is None else (x, weight, bias)


PRODUCTS: dict[Any, Product] = {
    F.linear: Product(("input", "weight", "bias"), 0, 1),
    torch.addmm: Product(("bias", "input", "weight"), 1, 0),
    **dict.fromkeys([torch.matmul, _T.matmul, _T.__matmul__, torch.mm, _T.mm], Product(("input", "weight"), 1, 0)),
}


def product_of(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Product, Any, Any, Any] | None:
    """Returns the product that a call is, with x, the matrix and the bias (None if there is none)."""
    product = PRODUCTS.get(function)
    if product is None or len(args) > len(product.names):
        return None
    given = dict(zip(product.names, args, strict=False))
    if not kwargs.keys() <= set(product.names) - given.keys():
        return None
    given |= kwargs
    if not isinstance(given.get("input"), torch.Tensor) or not isinstance(given.get("weight"), torch.Tensor):
        return None
    return product, given["input"], given["weight"], given.get("bias")
