"""How the processes of a job find each other: a store that all can reach, addresses, and the side channel."""

from farspan.runtime.rendezvous.join import Joined as Joined
from farspan.runtime.rendezvous.join import join_side_channel as join_side_channel
from farspan.runtime.rendezvous.peers import Peers as Peers
from farspan.runtime.rendezvous.peers import find_peers as find_peers

__all__ = ["Joined", "Peers", "find_peers", "join_side_channel"]
