"""Costs of a model: estimates from its modules, before anything has run, and the profile of a step that has."""

from farspan.profile.cost import narrow_sides as narrow_sides
from farspan.profile.costs import costed_graph as costed_graph
from farspan.profile.costs import needs_measuring as needs_measuring
from farspan.profile.estimate import units_of as units_of
from farspan.profile.machine import this_device as this_device
from farspan.profile.machine import this_machine as this_machine
from farspan.profile.profile_cache import ProfileCache as ProfileCache
from farspan.profile.profile_cache import cache_folder as cache_folder
from farspan.profile.ranks import HostLink as HostLink
from farspan.profile.ranks import RankDevice as RankDevice
from farspan.profile.ranks import cluster_of_ranks as cluster_of_ranks
from farspan.profile.step import Operation as Operation
from farspan.profile.step import PassedValue as PassedValue
from farspan.profile.step import StepProfile as StepProfile
from farspan.profile.step import UnitProfile as UnitProfile
from farspan.profile.tied_names import keepers as keepers
from farspan.profile.tied_names import keeps_statistics as keeps_statistics
from farspan.profile.tied_names import tied as tied

__all__ = [
    "UnitProfile",
    "Operation",
    "PassedValue",
    "ProfileCache",
    "HostLink",
    "RankDevice",
    "StepProfile",
    "units_of",
    "cache_folder",
    "cluster_of_ranks",
    "costed_graph",
    "keepers",
    "keeps_statistics",
    "narrow_sides",
    "needs_measuring",
    "this_device",
    "this_machine",
    "tied",
]
