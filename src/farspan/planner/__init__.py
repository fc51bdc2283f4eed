"""Finding a plan. Imports no torch, needs no accelerator and no process group."""

from farspan.planner.auto import Atom as Atom
from farspan.planner.auto import auto_plan as auto_plan
from farspan.planner.links import Link as Link
from farspan.planner.links import own_links as own_links
from farspan.planner.partition import partition as partition
from farspan.planner.simulate import simulate as simulate
from farspan.planner.simulation import Simulation as Simulation

__all__ = ["Atom", "Link", "Simulation", "auto_plan", "own_links", "partition", "simulate"]
