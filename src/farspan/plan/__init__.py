"""The plan: which stage owns what, and where each stage lies. Imports no torch."""

from farspan.plan.plan import PLANNED_SECONDS as PLANNED_SECONDS
from farspan.plan.plan import Plan as Plan
from farspan.plan.remat import resolve_remat as resolve_remat
from farspan.plan.resolve import Resolved as Resolved
from farspan.plan.resolve import layouts_of as layouts_of
from farspan.plan.resolve import resolve as resolve
from farspan.plan.team import Homes as Homes
from farspan.plan.team import Place as Place
from farspan.plan.team import RankDevices as RankDevices
from farspan.plan.team import Team as Team
from farspan.plan.team import Worker as Worker
from farspan.plan.team import are_direct as are_direct
from farspan.plan.team import format_place as format_place
from farspan.plan.team import format_places as format_places
from farspan.plan.team import is_split as is_split
from farspan.plan.team import parse_place as parse_place
from farspan.plan.team import parse_places as parse_places

__all__ = [
    "PLANNED_SECONDS",
    "Homes",
    "Place",
    "Plan",
    "RankDevices",
    "Resolved",
    "Team",
    "Worker",
    "are_direct",
    "format_place",
    "format_places",
    "is_split",
    "layouts_of",
    "parse_place",
    "parse_places",
    "resolve",
    "resolve_remat",
]
