"""Activations that are let go after the forward, and computed again when the backward asks for them."""

from farspan.lazy.recompute.blocks import repeated_blocks as repeated_blocks
from farspan.lazy.recompute.modules import ModuleUnits as ModuleUnits
from farspan.lazy.recompute.unit import Unit as Unit
from farspan.lazy.recompute.unit import as_packed as as_packed
from farspan.lazy.recompute.unit import unpacks_again as unpacks_again

__all__ = ["ModuleUnits", "Unit", "as_packed", "repeated_blocks", "unpacks_again"]
