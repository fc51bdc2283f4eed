"""Placements for throughput, which need not be chains of stages: what chains lose by being chains is measured here."""

from benchmarks.planner_placement.placement.place import DeviceLoad as DeviceLoad
from benchmarks.planner_placement.placement.place import Placement as Placement
from benchmarks.planner_placement.placement.place import place as place

__all__ = ["DeviceLoad", "Placement", "place"]
