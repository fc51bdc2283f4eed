"""Hosts that come by themselves, where there is no ssh: the first one listens, the others connect.

    farspan run -n 2 --nnodes 2 --node-rank 0 --join a:29400 train.py       on a, which listens at that port
    farspan run -n 4 --node-rank 1 --join a:29400 train.py                  on b

Where FARSPAN_SECRET is set, both ends prove that they know it before anything else is said. What the first host says is
which ranks are here and how they find each other; what they run is what this host's own command line says.
"""

from farspan.launch.hosts.joining.joined_fleet import JoinedFleet as JoinedFleet
from farspan.launch.hosts.joining.member import join_run as join_run
from farspan.launch.hosts.joining.member import read_address as read_address

__all__ = ["JoinedFleet", "join_run", "read_address"]
