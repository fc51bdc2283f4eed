"""Signals wait while Python runs inside torch's own C++ code.

A handler of Python's that raises, as that of Ctrl-C does, raises between any two instructions. Where these run within a
C++ function that may not raise, as what torch does to fakes often does, the process aborts.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import TypeVar

__all__ = ["never_raises", "signals_held"]

Handler = TypeVar("Handler", bound=Callable[..., None])
_not_held: list[object] = []


def never_raises(handler: Handler) -> Handler:
    """Says of a signal handler, as a decorator, that it need not wait."""
    _not_held.append(handler)
    return handler


@contextlib.contextmanager
def signals_held() -> Iterator[None]:
    """Let the program's own signal handlers run after the body. A signal that comes twice does not wait: the body may
    hang. Handlers run in the main thread only, so elsewhere there is nothing to hold.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handlers = {int(number): signal.getsignal(number) for number in signal.valid_signals()}
    waiting = [number for number, handler in handlers.items() if callable(handler) and not _is_free(handler)]
    held: list[int] = []
    is_over = False

    def hold(number: int, frame: FrameType | None) -> None:
        if not is_over and number not in held:
            held.append(number)
            return
        handler = handlers[number]
        assert callable(handler)
        handler(number, frame)

    try:
        for number in waiting:
            signal.signal(number, hold)
        yield
    finally:
        is_over = True
        for number in waiting:
            if signal.getsignal(number) is hold:  # else the body has set another one, which stays
                signal.signal(number, handlers[number])
        with contextlib.ExitStack() as stack:  # all come, whatever the handler of one raises
            for number in held:
                stack.callback(signal.raise_signal, number)


def _is_free(handler: object) -> bool:
    return any(handler is each for each in _not_held)
