"""Joins all ranks: rank 0 opens the hub of the side channel, and everybody connects to it.

    every rank   "rank 1"      its address
    rank 0       reads them all, and opens the hub
                 "hub"         its address, and the secret of the run unless FARSPAN_SECRET says it
    every rank   connects, past 33 ranks by way of others
                 "relay 1"     where, of a rank to which others connect
                 "joined 1"    that it has
    rank 0       reads them all

A rank that fails leaves its error in the place of its next record, one that ends before it comes leaves a word there
(`messenger`): rank 0 reads all records, and everybody reads rank 0's.
"""

from __future__ import annotations

import contextlib
import secrets
from dataclasses import dataclass

from farspan import settings
from farspan.comm.rendezvous.addresses import address_towards, is_loopback
from farspan.comm.rendezvous.group import Peers
from farspan.comm.rendezvous.records import Record, Records
from farspan.control.channel import SideChannel
from farspan.control.tree.numbers import host_of, parent
from farspan.errors import LaunchError
from farspan.launch.rank.absent import note_coming
from farspan.launch.rank.notes import note_waiting

__all__ = ["Joined", "join_side_channel"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Joined:
    """The connections of a rank once all have joined.

    Attributes:
        side: Its end of the side channel.
        address: An address of this host at which all other ranks reach it.
    """

    side: SideChannel
    address: str


def join_side_channel(peers: Peers, limit_s: float) -> Joined:
    """Wait until all ranks have called this, and connect them.

    Args:
        peers: This rank among the others.
        limit_s: The longest wait for another rank, here and later.

    Raises:
        RemoteError: Another rank has failed, or has ended before it came here.
        DeadlineError: Some rank has not come in time.
        LaunchError: No way to the others, or they have another secret.
    """
    records = Records(peers, limit_s)
    note_coming()
    note_waiting(peers.rank)
    return _host(peers, records, limit_s) if peers.rank == 0 else _connect(peers, records, limit_s)


def _host(peers: Peers, records: Records, limit_s: float) -> Joined:
    others = range(1, peers.world_size)
    with records.leaving_errors("hub"):
        address = address_towards(peers.host)
        records.write("rank 0", {"address": address})
        addresses = [str(records.read(f"rank {rank}", rank).get("address")) for rank in others]
        distant = next((other for other in addresses if not is_loopback(other)), None)
        if is_loopback(address) and distant is not None:
            address = address_towards(distant)
        known = settings.text("SECRET")
        secret = known or secrets.token_hex(32)
        server = SideChannel.host(peers.world_size, secret, address)
        side = SideChannel.connect(0, peers.world_size, server.address, secret, limit_s, server=server)
        records.write("hub", {"address": address, "port": server.address[1], "secret": "" if known else secret})
    try:
        for rank in others:
            records.read(f"joined {rank}", rank)
    except BaseException as error:
        side.fail(error)
        raise
    return Joined(side=side, address=address)


def _connect(peers: Peers, records: Records, limit_s: float) -> Joined:
    rank = peers.rank
    with records.leaving_errors(f"rank {rank}"):
        address = address_towards(peers.host)
        records.write(f"rank {rank}", {"address": address})
    with records.leaving_errors(f"joined {rank}"), _leaving_errors_below(records, peers):
        hub = records.read("hub", 0)
        host, given = str(hub.get("address")), str(hub.get("secret"))
        known = settings.text("SECRET")
        if bool(given) == bool(known):
            raise LaunchError(
                "the ranks do not agree on the secret of this run.",
                why=f"FARSPAN_SECRET is set on {f'rank {rank}' if known else 'rank 0'} "
                f"and not on {'rank 0' if known else f'rank {rank}'}.",
                hint="the same FARSPAN_SECRET on every rank, or on none",
            )
        if is_loopback(address) and not is_loopback(host):
            address = host  # rank 0's host is this one
        secret, above = known or given, parent(rank)
        there = _address_in(hub if above == 0 else records.read(f"relay {above}", above), above)
        server = None
        if _is_relay(peers):
            world_size = peers.world_size
            server = SideChannel.host(world_size, secret, address, rank=rank, parent=there, deadline_s=limit_s)
            there = server.address
            records.write(f"relay {rank}", {"address": there[0], "port": there[1]})
        side = SideChannel.connect(rank, peers.world_size, there, secret, limit_s, server=server)
        records.write(f"joined {rank}", {})
    return Joined(side=side, address=address)


def _is_relay(peers: Peers) -> bool:
    return host_of(peers.rank, peers.world_size) == peers.rank


def _leaving_errors_below(records: Records, peers: Peers) -> contextlib.AbstractContextManager[None]:
    """Leaves an error of the block also to the ranks below this one."""
    return records.leaving_errors(f"relay {peers.rank}") if _is_relay(peers) else contextlib.nullcontext()


def _address_in(record: Record, rank: int) -> tuple[str, int]:
    port = record.get("port")
    if not isinstance(port, int) or not 0 < port < 1 << 16:
        why = f"{str(port)[:40]!r} stands in the store of this job."
        raise LaunchError(f"rank {rank} listens at no port.", why=why)
    return str(record.get("address")), port
