"""Answers what the doctor asks of a host: in its agent, and in the launcher for the launcher's own host."""

from __future__ import annotations

import time
from dataclasses import asdict

from farspan.errors import LaunchError, quoted
from farspan.launch.doctor.gather import gather_facts
from farspan.launch.doctor.probe import listen, probe
from farspan.launch.hosts.connection import Message

__all__ = ["answer"]


def answer(question: Message) -> Message:
    """Returns what was asked for.

    Raises:
        LaunchError: There is no such question.
    """
    match question["what"]:
        case "clock":
            return {"time_s": time.time()}
        case "facts":
            return asdict(gather_facts(str(question["devices"])))
        case "listen":
            return {"port": listen(str(question["token"]), float(question["limit_s"]))}
        case "probe":
            address, port = str(question["address"]), int(question["port"])
            return probe(address, port, str(question["token"]), float(question["limit_s"]))
        case other:
            raise LaunchError(
                f"{quoted(other)} is no question of farspan doctor.",
                why="the host that asks has another version.",
                hint="the same version of farspan on all hosts",
            )
