"""A run on several hosts: one launcher, and an agent of it on each other host.

    launcher --ssh, or a TCP connection that the other side has opened--> agent --fork--> ranks of that host
       |
       +--fork--> ranks of this host

What goes over a connection are lines of JSON (`connection`). `host` is what a user says about a host, `code` whether it
has the same program, `agent` what runs there, `remote` is how the launcher sees it, `fleet` are all of them.
"""

from farspan.launch.hosts.fleet import Fleet as Fleet
from farspan.launch.hosts.host import Host as Host
from farspan.launch.hosts.host import read_hosts as read_hosts
from farspan.launch.hosts.joining import JoinedFleet as JoinedFleet
from farspan.launch.hosts.joining import join_run as join_run
from farspan.launch.hosts.joining import read_address as read_address

__all__ = ["Fleet", "Host", "JoinedFleet", "join_run", "read_address", "read_hosts"]
