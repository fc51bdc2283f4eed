"""Lets a rank go on after losses, where `farspan run --keep-going` has started it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from farspan.execute.data_axis.recovery.agreement import AgreementOfGroups
from farspan.execute.data_axis.recovery.forming import join_membership
from farspan.execute.data_axis.recovery.recovery import Recovery
from farspan.execute.data_axis.recovery.regroup import Regroup

if TYPE_CHECKING:
    from farspan.comm.rendezvous.group import Peers
    from farspan.execute.agreement.agreement import Agreement
    from farspan.execute.data_axis.reduction import Reduction

__all__ = ["keep_going"]


def keep_going(reduction: Reduction, peers: Peers, address: str, deadline_s: float) -> Agreement:
    """Let this rank's group go on if another one is lost; returns the agreement of all ranks from here on.

    Args:
        reduction: Of this rank.
        peers: This rank among all.
        address: Of this host, at which the other ranks reach it.
        deadline_s: The longest wait for another rank.

    Raises:
        LaunchError: The launcher is not there.
    """
    channel = reduction.channel
    membership = join_membership(peers, group=channel.number, num_groups=channel.num_groups)
    regroup = Regroup(peers, address, membership, deadline_s, reduction)
    reduction.recovery = recovery = Recovery(membership, channel, regroup, deadline_s)
    agreement = AgreementOfGroups(channel.everybody, deadline_s, recovery)
    reduction.take_agreement(agreement)
    return agreement
