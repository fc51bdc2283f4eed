"""The plan: which stage owns what, and where each stage lies. Imports no torch."""

from farspan.plan.check import SCHEDULES as SCHEDULES
from farspan.plan.device import Place as Place
from farspan.plan.device import format_place as format_place
from farspan.plan.device import parse_place as parse_place
from farspan.plan.plan import PLANNED_SECONDS as PLANNED_SECONDS
from farspan.plan.plan import Plan as Plan
from farspan.plan.remat import resolve_remat as resolve_remat
from farspan.plan.resolve import Resolved as Resolved
from farspan.plan.resolve import resolve as resolve

__all__ = [
    "PLANNED_SECONDS",
    "SCHEDULES",
    "Place",
    "Plan",
    "Resolved",
    "format_place",
    "parse_place",
    "resolve",
    "resolve_remat",
]
