"""A program's first steps measured on all its ranks, and its model placed anew while it runs."""

from farspan.runtime.replan.exchange import RankMeasured as RankMeasured
from farspan.runtime.replan.exchange import exchanged as exchanged
from farspan.runtime.replan.links import links_of_hosts as links_of_hosts
from farspan.runtime.replan.move import place_elsewhere as place_elsewhere
from farspan.runtime.replan.speeds import speeds_of_ranks as speeds_of_ranks

__all__ = ["RankMeasured", "exchanged", "links_of_hosts", "place_elsewhere", "speeds_of_ranks"]
