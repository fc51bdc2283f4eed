"""Activations that are let go after the forward, and computed again when the backward asks for them."""

from farspan.lazy.recompute.modules import ModuleUnits as ModuleUnits
from farspan.lazy.recompute.modules import WrittenBuffers as WrittenBuffers
from farspan.lazy.recompute.modules import draws_by_itself as draws_by_itself
from farspan.lazy.recompute.modules import plain_attributes as plain_attributes
from farspan.lazy.recompute.unit import Unit as Unit

__all__ = ["ModuleUnits", "Unit", "WrittenBuffers", "draws_by_itself", "plain_attributes"]
