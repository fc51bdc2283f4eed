"""Knows of the torch functions that an optimizer's step calls what they write into and what they need."""

from __future__ import annotations

from typing import Any

import torch

from farspan.call.pytree.template import shape_of_call
from farspan.graph import Meta

__all__ = ["has_dynamic_shape", "kind_of_call", "shape_of", "small_tensor", "writes_by_name", "written_lists"]


def has_dynamic_shape(function: Any) -> bool:
    """Returns whether torch says of a function that the shape of its result depends on data."""
    packet: Any = getattr(torch.ops.aten, getattr(function, "__name__", ""), None)
    overloads = [getattr(packet, name) for name in packet.overloads()] if hasattr(packet, "overloads") else []
    return any(torch.Tag.dynamic_output_shape in overload.tags for overload in overloads)


def written_lists(name: str) -> tuple[int, ...]:
    """Returns the positions of the lists of tensors into which the aten function `name` writes."""
    packet: Any = getattr(torch.ops.aten, name)
    arguments = getattr(packet, packet.overloads()[0])._schema.arguments
    return tuple([i for i, item in enumerate(arguments) if item.alias_info is not None and item.alias_info.is_write])


def writes_by_name(name: str) -> bool:
    """Returns whether torch's rule for names says that a function writes into its first argument."""
    if name.startswith("__"):
        return name.startswith("__i") or name in ("__setitem__", "__set__")
    return name.endswith("_")


def shape_of(part: Any) -> Any:
    """Returns a template without the values of its floating-point numbers, which metadata do not depend on."""
    if type(part) is not tuple:
        return float if type(part) is float else part
    return tuple([shape_of(item) for item in part])


def kind_of_call(args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[Any]) -> Any:
    """Returns a short substitute for `shape_of` the template of a call whose arguments are different tensors and plain
    values; None for another call. The tensors are appended to `tensors`, which is empty, in template order.
    """
    shape = shape_of_call(args, kwargs, tensors)
    if shape is None:
        return None
    count, names, parts = shape
    return count, names, tuple([float if part is not None and part[0] is float else part for part in parts])


def small_tensor(meta: Meta) -> torch.Tensor:
    tensor = torch.empty_strided(meta.shape, meta.stride, dtype=meta.dtype, device=meta.device)
    return tensor.fill_(0.5) if meta.dtype.is_floating_point else tensor.zero_()
