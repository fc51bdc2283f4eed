"""A run that grows: hosts that come while the ranks run, or come back, take part from the next save on.

`growth` waits for the save, `absent` has the hosts of a list that do not answer, and `saves` lets the launcher know of
the saves of a rank 0 that is on another host.
"""

from farspan.launch.hosts.growing.absent import Absent as Absent
from farspan.launch.hosts.growing.growth import Growth as Growth

__all__ = ["Absent", "Growth"]
