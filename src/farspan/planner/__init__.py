"""Finding a plan. Imports no torch, needs no accelerator and no process group."""

from farspan.planner.auto import Atom as Atom
from farspan.planner.auto import auto_plan as auto_plan
from farspan.planner.partition import partition as partition

__all__ = ["Atom", "auto_plan", "partition"]
