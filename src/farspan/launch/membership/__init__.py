"""Who still belongs to a run that goes on after a loss: the launcher decides, the ranks ask it."""

from farspan.launch.membership.client import CAUSE_S as CAUSE_S
from farspan.launch.membership.client import Membership as Membership
from farspan.launch.membership.client import ProgramsOverError as ProgramsOverError
from farspan.launch.membership.client import World as World
from farspan.launch.membership.door import Door as Door
from farspan.launch.membership.members import Members as Members
from farspan.launch.membership.service import MemberService as MemberService

__all__ = ["CAUSE_S", "Door", "MemberService", "Members", "Membership", "ProgramsOverError", "World"]
