"""The schedules that `schedule=` names, for any graph of segments, and which backwards they split."""

from farspan.schedule.named.drawn import drawn_name as drawn_name
from farspan.schedule.named.recorded import LEAST_WEIGHT_WORK_S as LEAST_WEIGHT_WORK_S
from farspan.schedule.named.recorded import SCHEDULES as SCHEDULES
from farspan.schedule.named.recorded import orders_by_name as orders_by_name
from farspan.schedule.named.recorded import run_ahead_of as run_ahead_of
from farspan.schedule.named.split_rule import LOOKAHEAD as LOOKAHEAD
from farspan.schedule.named.split_rule import NOMINAL_S as NOMINAL_S
from farspan.schedule.named.split_rule import is_worth_splitting as is_worth_splitting
from farspan.schedule.named.splitting import split_from as split_from
from farspan.schedule.named.splitting import whole_until as whole_until

__all__ = [
    "LEAST_WEIGHT_WORK_S",
    "LOOKAHEAD",
    "NOMINAL_S",
    "SCHEDULES",
    "drawn_name",
    "is_worth_splitting",
    "orders_by_name",
    "run_ahead_of",
    "split_from",
    "whole_until",
]
