"""Decides in which order every rank runs its tasks. Imports no torch."""

from farspan.schedule.limits import Limits as Limits
from farspan.schedule.limits import in_flight_of_1f1b as in_flight_of_1f1b
from farspan.schedule.messages import Channel as Channel
from farspan.schedule.messages import Message as Message
from farspan.schedule.messages import as_sent as as_sent
from farspan.schedule.messages import channels_of as channels_of
from farspan.schedule.messages import places_of as places_of
from farspan.schedule.named import LEAST_WEIGHT_WORK_S as LEAST_WEIGHT_WORK_S
from farspan.schedule.named import LOOKAHEAD as LOOKAHEAD
from farspan.schedule.named import NOMINAL_S as NOMINAL_S
from farspan.schedule.named import SCHEDULES as SCHEDULES
from farspan.schedule.named import drawn_name as drawn_name
from farspan.schedule.named import is_worth_splitting as is_worth_splitting
from farspan.schedule.named import orders_by_name as orders_by_name
from farspan.schedule.named import run_ahead_of as run_ahead_of
from farspan.schedule.named import split_from as split_from
from farspan.schedule.named import whole_until as whole_until
from farspan.schedule.schedule import Schedule as Schedule
from farspan.schedule.task import Kind as Kind
from farspan.schedule.task import Task as Task

__all__ = [
    "LEAST_WEIGHT_WORK_S",
    "LOOKAHEAD",
    "NOMINAL_S",
    "SCHEDULES",
    "Channel",
    "Kind",
    "Limits",
    "Message",
    "Schedule",
    "Task",
    "channels_of",
    "drawn_name",
    "in_flight_of_1f1b",
    "is_worth_splitting",
    "orders_by_name",
    "run_ahead_of",
    "split_from",
    "whole_until",
]
