"""The starts of a run: one, or several where it is started again after a failure."""

from farspan.launch.attempts.again import Restarts as Restarts
from farspan.launch.attempts.attempt import attempt as attempt
from farspan.launch.attempts.command import find_command as find_command
from farspan.launch.attempts.here import Here as Here
from farspan.launch.attempts.variables import shared_variables as shared_variables

__all__ = ["Here", "Restarts", "attempt", "find_command", "shared_variables"]
