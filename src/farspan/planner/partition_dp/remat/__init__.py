"""Chooses how the nodes of a stage run, where its device has not the memory for the fastest way of each."""

from farspan.planner.partition_dp.remat.choices import Choice as Choice
from farspan.planner.partition_dp.remat.choices import choices_of as choices_of
from farspan.planner.partition_dp.remat.steps import Steps as Steps
from farspan.planner.partition_dp.remat.steps import make_steps as make_steps

__all__ = ["Choice", "Steps", "choices_of", "make_steps"]
