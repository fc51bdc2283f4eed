"""How ranks are used beside a row of stages of one rank each: micro-batches of a batch, width, groups, layers."""

from farspan.planner.mesh.chain_step import ChainStage as ChainStage
from farspan.planner.mesh.chain_step import chain_step as chain_step
from farspan.planner.mesh.degrees import DegreeForecast as DegreeForecast
from farspan.planner.mesh.degrees import best_degree as best_degree
from farspan.planner.mesh.groups import GroupsForecast as GroupsForecast
from farspan.planner.mesh.groups import Machine as Machine
from farspan.planner.mesh.groups import best_groups as best_groups
from farspan.planner.mesh.lanes import LanesForecast as LanesForecast
from farspan.planner.mesh.lanes import best_lanes as best_lanes
from farspan.planner.mesh.lanes import nominal_speeds as nominal_speeds
from farspan.planner.mesh.lanes import seconds_of_work as seconds_of_work

__all__ = [
    "ChainStage",
    "DegreeForecast",
    "GroupsForecast",
    "LanesForecast",
    "Machine",
    "best_degree",
    "best_groups",
    "best_lanes",
    "chain_step",
    "nominal_speeds",
    "seconds_of_work",
]
