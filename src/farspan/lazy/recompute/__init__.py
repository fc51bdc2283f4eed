"""Activations that are let go after the forward, and computed again when the backward asks for them."""

from farspan.lazy.recompute.blocks import repeated_blocks as repeated_blocks
from farspan.lazy.recompute.modules import ModuleUnits as ModuleUnits
from farspan.lazy.recompute.unit import Unit as Unit
from farspan.lazy.recompute.unit import is_unpacked_by_unit as is_unpacked_by_unit

__all__ = ["ModuleUnits", "Unit", "is_unpacked_by_unit", "repeated_blocks"]
