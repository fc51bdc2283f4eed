"""Who still belongs to a run that goes on after a loss: the launcher decides, the ranks ask it."""

from farspan.launch.membership.client import Membership as Membership
from farspan.launch.membership.client import World as World
from farspan.launch.membership.door import Door as Door
from farspan.launch.membership.members import Members as Members
from farspan.launch.membership.service import MemberService as MemberService

__all__ = ["Door", "MemberService", "Members", "Membership", "World"]
