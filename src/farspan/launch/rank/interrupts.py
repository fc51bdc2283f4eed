"""Signals wait while Python runs inside torch's own C++ code.

A handler of Python's that raises, as that of Ctrl-C does, raises between any two instructions. Where these run within a
C++ function that may not raise, as what torch does to fakes often does, and while it is imported, the process aborts.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Generator
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
def signals_held() -> Generator[None, None, None]:
    """Let the program's own signal handlers run after the body. A signal that comes twice does not wait: the body may
    hang. Handlers run in the main thread only, so elsewhere there is nothing to hold. What `signal.siginterrupt` has
    set for a handler of Python's is lost.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handlers = {int(number): signal.getsignal(number) for number in signal.valid_signals()}
    waiting = [number for number, handler in handlers.items() if callable(handler) and not _is_free(handler)]
    held: dict[int, FrameType | None] = {}
    is_over = False

    def hold(number: int, frame: FrameType | None) -> None:
        if not is_over and number not in held:
            held[number] = frame
            return
        handler = handlers[number]
        assert callable(handler)
        handler(number, frame)

    def restore(number: int) -> None:
        if signal.getsignal(number) is hold:  # else the body has set another one, which stays
            signal.signal(number, handlers[number])

    def deliver_all() -> None:
        nonlocal is_over
        is_over = True
        with contextlib.ExitStack() as last_first:
            for number in reversed(held):
                last_first.callback(_deliver, number, held[number])

    with contextlib.ExitStack() as stack:  # all of it is done, whatever a handler raises meanwhile
        stack.callback(deliver_all)
        for number in waiting:
            stack.callback(restore, number)
            signal.signal(number, hold)
        yield


def _deliver(number: int, frame: FrameType | None) -> None:
    """Call the handler; who watches a wakeup descriptor, as asyncio does, has heard of the signal when it came."""
    handler = signal.getsignal(number)
    if callable(handler):
        handler(number, frame)
    else:
        signal.raise_signal(number)


def _is_free(handler: object) -> bool:
    return any(handler is each for each in _not_held)
