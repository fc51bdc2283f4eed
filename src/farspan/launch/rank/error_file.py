"""The file from which torchrun reports why a rank failed, in the form in which torch's `record` writes it."""

from __future__ import annotations

import logging
import os
import time

from farspan.errors import FarspanError, RemoteError
from farspan.launch.raised.tracebacks import format_error
from farspan.outputs import write_text

__all__ = ["is_of_another_rank", "leave_error"]

_log = logging.getLogger(__name__)
_HEARD_LATER_S = 10
"""torchrun takes the earliest failure for the root cause, by whole seconds, and a process that was killed has failed
when torchrun sees it: the others may have heard of it before.
"""


def leave_error(error: BaseException, *, is_heard: bool) -> None:
    """Write the file, if this is a rank of torchrun and nothing has been written yet.

    Args:
        error: That ends this process.
        is_heard: Whether it is another rank's failure, of which this one has only heard.
    """
    path = os.environ.get("TORCHELASTIC_ERROR_FILE", "")
    if not path:
        return
    import json

    when_s = int(time.time()) + (_HEARD_LATER_S if is_heard else 0)
    stack = format_error(error)
    message = {
        "message": f"{type(error).__name__}: {error}",
        "extraInfo": {"py_callstack": stack, "timestamp": str(when_s)},
    }
    if os.path.exists(path) and os.path.getsize(path):
        return
    try:
        write_text(path, json.dumps({"message": message}))  # whole: torchrun, which may end this process now, reads it
    except FarspanError as problem:
        _log.debug("torchrun is not told of %s: %s", type(error).__name__, problem)


def is_of_another_rank(error: BaseException) -> bool:
    """Returns whether this is another rank's failure; a rank that only finds another one missing is the first to
    fail."""
    return isinstance(error, RemoteError) and bool(error.remote_traceback)
