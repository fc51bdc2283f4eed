"""The files of a script that several ranks run: rank 0 writes them, the others write for themselves alone.

    rank 0       writes and reads the disk; before it changes what was there at the start, it keeps it in BEFORE
    other ranks  write to a folder of their own; read there first, then in BEFORE, then the disk

So every rank finds what one process would find: the disk as it was when the script started, and what the script
itself has done since. `layers` are the folders, `journal` is what rank 0 keeps and `view` what the others see;
`patches` and `seen` put them under Python's functions on files, `outside` under those of libraries.

Nothing here imports torch, nor more than a start of Python has loaded anyway.
"""

from farspan.launch.files.choice import ELSEWHERE as ELSEWHERE
from farspan.launch.files.choice import become_first as become_first
from farspan.launch.files.choice import catch_up as catch_up
from farspan.launch.files.choice import install as install
from farspan.launch.files.choice import install_late as install_late
from farspan.launch.files.choice import keeps_apart as keeps_apart

__all__ = ["ELSEWHERE", "become_first", "catch_up", "install", "install_late", "keeps_apart"]
