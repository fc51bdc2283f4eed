"""The starts of a run: one, or several where it is started again after a failure."""

from farspan.launch.attempts.again import Restarts as Restarts
from farspan.launch.attempts.attempt import Attempt as Attempt
from farspan.launch.attempts.command import find_command as find_command
from farspan.launch.attempts.here import Here as Here
from farspan.launch.attempts.repeat import attempt_repeatedly as attempt_repeatedly
from farspan.launch.attempts.repeat import make_log_dir as make_log_dir
from farspan.launch.attempts.variables import own_threads as own_threads
from farspan.launch.attempts.variables import shared_variables as shared_variables

__all__ = [
    "Attempt",
    "Here",
    "Restarts",
    "attempt_repeatedly",
    "find_command",
    "make_log_dir",
    "own_threads",
    "shared_variables",
]
