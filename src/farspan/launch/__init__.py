"""The processes of a job: which one this is, and how they are started on one machine.

`farspan.launch.run_job` starts them; it is imported for that alone, as no rank needs it.
"""

from farspan.launch.environment import Environment as Environment
from farspan.launch.environment import read_environment as read_environment

__all__ = ["Environment", "read_environment"]
