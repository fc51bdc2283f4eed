"""Ties one process to the life of its launcher, then becomes the user's program.

    launcher --fork--> python -I -S child.py LAUNCHER_PID COMMAND... --exec--> COMMAND

Linux keeps the parent-death signal across exec, so the program itself starts as under plain python: its own
`__main__`, `sys.path` and tracebacks, with nothing of ours beneath them. A hook between fork and exec
(`preexec_fn`) would do the same, but is unsafe where the launcher has threads.

Run as a file, and imports nothing of farspan: this is on the way of every start (about 15 ms).
"""

import ctypes
import os
import signal
import sys

__all__ = ["main"]

_PR_SET_PDEATHSIG = 1


def main(argv: list[str]) -> None:
    """Becomes `argv[1:]`, to be killed by the kernel when process `argv[0]`, the launcher, dies."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != int(argv[0]):  # it died before the line above
        os._exit(128 + signal.SIGKILL)
    try:
        os.execv(argv[1], argv[1:])
    except OSError as error:
        print(f"cannot start {argv[1]}: {error.strerror}", file=sys.stderr, flush=True)
        os._exit(126)


if __name__ == "__main__":
    main(sys.argv[1:])
