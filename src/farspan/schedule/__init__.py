"""In which order every rank runs its tasks. Imports no torch."""

from farspan.schedule.listing import Limits as Limits
from farspan.schedule.listing import list_schedule as list_schedule
from farspan.schedule.task import Kind as Kind
from farspan.schedule.task import Task as Task

__all__ = ["Kind", "Limits", "Task", "list_schedule"]
