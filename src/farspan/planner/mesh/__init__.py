"""How ranks are used beside a row of stages of one rank each: micro-batches of a batch, width, groups."""

from farspan.planner.mesh.chain_step import ChainStage as ChainStage
from farspan.planner.mesh.chain_step import chain_step as chain_step
from farspan.planner.mesh.lanes import LanesForecast as LanesForecast
from farspan.planner.mesh.lanes import best_lanes as best_lanes
from farspan.planner.mesh.lanes import seconds_of_work as seconds_of_work

__all__ = ["ChainStage", "LanesForecast", "best_lanes", "chain_step", "seconds_of_work"]
