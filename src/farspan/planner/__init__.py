"""Finding a plan. Imports no torch, needs no accelerator and no process group."""

from farspan.plan.hints import Hints as Hints
from farspan.planner.auto import auto_plan as auto_plan
from farspan.planner.cost_model import read_graph as read_graph
from farspan.planner.links import Link as Link
from farspan.planner.links import own_links as own_links
from farspan.planner.model_unit import Unit as Unit
from farspan.planner.partition import partition as partition
from farspan.planner.partition_dp.stages import Rules as Rules
from farspan.planner.pipeline import Pipeline as Pipeline
from farspan.planner.pipeline import plan_pipeline as plan_pipeline
from farspan.planner.simulate import simulate as simulate
from farspan.planner.simulation import Simulation as Simulation

__all__ = [
    "Unit",
    "Hints",
    "Link",
    "Pipeline",
    "Rules",
    "Simulation",
    "auto_plan",
    "own_links",
    "partition",
    "plan_pipeline",
    "read_graph",
    "simulate",
]
