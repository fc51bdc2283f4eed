"""In which order every rank runs its tasks. Imports no torch."""

from farspan.schedule.automatic import automatic as automatic
from farspan.schedule.channels import Channel as Channel
from farspan.schedule.channels import Message as Message
from farspan.schedule.channels import channels_of as channels_of
from farspan.schedule.limits import Limits as Limits
from farspan.schedule.limits import limits_of_1f1b as limits_of_1f1b
from farspan.schedule.listing import list_schedule as list_schedule
from farspan.schedule.named import LEAST_WEIGHT_WORK_S as LEAST_WEIGHT_WORK_S
from farspan.schedule.named import LOOKAHEAD as LOOKAHEAD
from farspan.schedule.named import NOMINAL_S as NOMINAL_S
from farspan.schedule.named import SCHEDULES as SCHEDULES
from farspan.schedule.named import Chain as Chain
from farspan.schedule.named import Costs as Costs
from farspan.schedule.named import gpipe as gpipe
from farspan.schedule.named import interleaved as interleaved
from farspan.schedule.named import is_worth_splitting as is_worth_splitting
from farspan.schedule.named import looped as looped
from farspan.schedule.named import one_f_one_b as one_f_one_b
from farspan.schedule.named import orders_by_name as orders_by_name
from farspan.schedule.named import run_ahead_of as run_ahead_of
from farspan.schedule.named import split_from as split_from
from farspan.schedule.named import straight as straight
from farspan.schedule.named import vee as vee
from farspan.schedule.named import whole_until as whole_until
from farspan.schedule.named import zb_1p as zb_1p
from farspan.schedule.named import zb_2p as zb_2p
from farspan.schedule.named import zb_h1 as zb_h1
from farspan.schedule.named import zb_v as zb_v
from farspan.schedule.schedule import Schedule as Schedule
from farspan.schedule.task import Kind as Kind
from farspan.schedule.task import Task as Task

__all__ = [
    "LEAST_WEIGHT_WORK_S",
    "LOOKAHEAD",
    "NOMINAL_S",
    "SCHEDULES",
    "Chain",
    "Channel",
    "Costs",
    "Kind",
    "Limits",
    "Message",
    "Schedule",
    "Task",
    "automatic",
    "channels_of",
    "gpipe",
    "interleaved",
    "is_worth_splitting",
    "limits_of_1f1b",
    "list_schedule",
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
