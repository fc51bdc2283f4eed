"""The schedules that have names: for plain pipelines, and for any graph of segments."""

from farspan.schedule.named.chain import Chain as Chain
from farspan.schedule.named.chain import Costs as Costs
from farspan.schedule.named.chain import looped as looped
from farspan.schedule.named.chain import straight as straight
from farspan.schedule.named.chain import vee as vee
from farspan.schedule.named.classic import gpipe as gpipe
from farspan.schedule.named.classic import interleaved as interleaved
from farspan.schedule.named.classic import one_f_one_b as one_f_one_b
from farspan.schedule.named.recorded import LEAST_WEIGHT_WORK_S as LEAST_WEIGHT_WORK_S
from farspan.schedule.named.recorded import SCHEDULES as SCHEDULES
from farspan.schedule.named.recorded import orders_by_name as orders_by_name
from farspan.schedule.named.recorded import run_ahead_of as run_ahead_of
from farspan.schedule.named.rules import LOOKAHEAD as LOOKAHEAD
from farspan.schedule.named.rules import NOMINAL_S as NOMINAL_S
from farspan.schedule.named.rules import is_worth_splitting as is_worth_splitting
from farspan.schedule.named.splitting import split_from as split_from
from farspan.schedule.named.splitting import whole_until as whole_until
from farspan.schedule.named.zero_bubble import zb_1p as zb_1p
from farspan.schedule.named.zero_bubble import zb_2p as zb_2p
from farspan.schedule.named.zero_bubble import zb_h1 as zb_h1
from farspan.schedule.named.zero_bubble import zb_v as zb_v

__all__ = [
    "LEAST_WEIGHT_WORK_S",
    "LOOKAHEAD",
    "NOMINAL_S",
    "SCHEDULES",
    "Chain",
    "Costs",
    "gpipe",
    "interleaved",
    "is_worth_splitting",
    "looped",
    "one_f_one_b",
    "orders_by_name",
    "run_ahead_of",
    "split_from",
    "straight",
    "vee",
    "whole_until",
    "zb_1p",
    "zb_2p",
    "zb_h1",
    "zb_v",
]
