"""The memory of one of several hosts, with its keeper."""

from __future__ import annotations

import os
from collections.abc import Mapping

from farspan.launch.memory.folder import MEMORY_VARIABLE, Memory
from farspan.launch.memory.keeper import Keeper
from farspan.settings import PREFIX

__all__ = ["ServedMemory", "keeper_variables"]

_KEEPERS_VARIABLE = f"{PREFIX}KEEPERS"
"""Which host this is, and the addresses of all keepers: "0 a:4001 b:4002"."""


class ServedMemory:
    """A folder in memory that other hosts reach, over all starts of a run.

    Attributes:
        port: Where its keeper listens; 0 where the host has no such memory.
    """

    def __init__(self) -> None:
        self._memory = Memory()
        self._keeper = Keeper(self._memory.path) if self._memory.path else None
        self.port = 0 if self._keeper is None else self._keeper.port

    def begin(self, variables: Mapping[str, str]) -> dict[str, str]:
        """Lets in the ranks of a new start, and no others; returns what the ranks of this host are to know.

        Args:
            variables: That they get.
        """
        if self._keeper is not None:
            name = f"{PREFIX}SECRET"
            self._keeper.secret = variables.get(name, "") or os.environ.get(name, "")
        return {MEMORY_VARIABLE: self._memory.path}

    def close(self) -> None:
        """Frees the memory."""
        if self._keeper is not None:
            self._keeper.close()
        self._memory.close()


def keeper_variables(keepers: str) -> dict[str, str]:
    """Returns what a rank is to know of the memory of all hosts.

    Args:
        keepers: Which host this is, and the addresses of all keepers; "" where a host has none: then none is used.
    """
    return {_KEEPERS_VARIABLE: keepers} if keepers else {_KEEPERS_VARIABLE: "", MEMORY_VARIABLE: ""}
