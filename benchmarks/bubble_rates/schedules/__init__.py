"""Schedules of plain pipelines as papers print them, and a search for shorter ones: farspan's own are held to them."""

from benchmarks.bubble_rates.schedules.automatic import automatic as automatic
from benchmarks.bubble_rates.schedules.chain import Chain as Chain
from benchmarks.bubble_rates.schedules.chain import Costs as Costs
from benchmarks.bubble_rates.schedules.chain import looped as looped
from benchmarks.bubble_rates.schedules.chain import straight as straight
from benchmarks.bubble_rates.schedules.chain import vee as vee
from benchmarks.bubble_rates.schedules.classic import gpipe as gpipe
from benchmarks.bubble_rates.schedules.classic import interleaved as interleaved
from benchmarks.bubble_rates.schedules.classic import one_f_one_b as one_f_one_b
from benchmarks.bubble_rates.schedules.zero_bubble import zb_1p as zb_1p
from benchmarks.bubble_rates.schedules.zero_bubble import zb_2p as zb_2p
from benchmarks.bubble_rates.schedules.zero_bubble import zb_h1 as zb_h1
from benchmarks.bubble_rates.schedules.zero_bubble import zb_v as zb_v

__all__ = [
    "Chain",
    "Costs",
    "automatic",
    "gpipe",
    "interleaved",
    "looped",
    "one_f_one_b",
    "straight",
    "vee",
    "zb_1p",
    "zb_2p",
    "zb_h1",
    "zb_v",
]
