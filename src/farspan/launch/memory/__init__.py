"""Memory that outlives the processes of a run, on each of its hosts, for what they save there.

    host a    FARSPAN_MEMORY, a folder in /dev/shm       <--- ranks of a write and read it as a disk
              keeper, in the launcher                    <--- ranks of b put copies there, and fetch what b has not
    host b    FARSPAN_MEMORY                             <--- ranks of b
              keeper, in the agent                       <--- ranks of a

A keeper knows nothing of checkpoints: it is a small file service for one folder (`keeper`, `wire`), for those that know
the secret of the start that is running. `client` is the other end. Which files make a checkpoint, and which host has
the copy of which, is `farspan.state.memory`'s. Where all ranks are on one host there is no keeper.
"""

from farspan.launch.memory.folder import MEMORY_VARIABLE as MEMORY_VARIABLE
from farspan.launch.memory.folder import Memory as Memory
from farspan.launch.memory.served import ServedMemory as ServedMemory
from farspan.launch.memory.served import keeper_variables as keeper_variables

__all__ = ["MEMORY_VARIABLE", "Memory", "ServedMemory", "keeper_variables"]
