"""An object's methods under a name, for other processes of the run to call."""

from __future__ import annotations

import contextlib
import inspect
import os
import re
import secrets
import threading
from collections.abc import Callable, Collection
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from farspan import settings
from farspan.errors import LaunchError, quoted
from farspan.launch.membership.lines import listen_in
from farspan.launch.rank.process_end import at_process_end
from farspan.services.far import Port
from farspan.services.names import Names, has_other_hosts, names_of_run
from farspan.services.server import Server

__all__ = ["Exposed", "expose"]

_FORM = re.compile(r"[A-Za-z0-9_.-]{1,100}")
_ENDING_S = 5.0
_OF_SERVICE = ("future",)
"""Names that mean something else on a `Service`."""


class Exposed:
    """An object while others can call it; ends with `close`, with a `with` block, or with the process.

    Args:
        name: Of the service.
        methods: What can be called.
        num_threads: How many calls run at a time.
        names: Of the run.
    """

    def __init__(self, name: str, methods: dict[str, Callable[..., Any]], num_threads: int, names: Names) -> None:
        self.name = name
        self._names = names
        self._process = os.getpid()
        self._closed = threading.Event()
        self._socket = secrets.token_hex(8)
        self._port: Port | None = None
        with contextlib.ExitStack() as stack:
            listener = listen_in(names.folder, self._socket)
            stack.callback(self._unlink)
            stack.callback(listener.close)
            if has_other_hosts():
                self._port = Port(name, settings.text("SECRET"))
                stack.callback(self._port.close)
            names.expose(name, self._socket, self._port.number if self._port is not None else 0)
            stack.pop_all()
        self._server = Server(name, listener, methods, num_threads)
        if self._port is not None:
            self._port.open(self._server.take)
        at_process_end(self.close)

    def wait(self, timeout: float | None = None) -> bool:
        """Returns once it is closed, which the end of the run does too, or after `timeout` seconds; whether it is
        closed.
        """
        return self._closed.wait(timeout)

    def close(self) -> None:
        """Ends it: callers hear that it is lost. Returns when no call runs any more."""
        if self._closed.is_set() or os.getpid() != self._process:  # a forked child has not exposed it
            return
        self._closed.set()
        self._names.withdraw(self.name)
        self._unlink()
        if self._port is not None:
            self._port.close()
        self._server.close(_ENDING_S)

    def _unlink(self) -> None:
        with contextlib.suppress(OSError):  # the folder may be gone
            (Path(self._names.folder) / self._socket).unlink()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def expose(name: str, obj: object, *, methods: Collection[str] | None = None, threads: int = 1) -> Exposed:
    """Lets other processes of the run call an object's methods, by `farspan.service(name)`.

    Calls run in a thread beside the program, one after the other in the order in which they arrive. Arguments and
    results are plain values, tensors, arrays, and lists, dictionaries and dataclasses of them; an exception of the
    method is the caller's. Nothing but the methods can be reached, and no code is sent.

    Args:
        name: By which others find it; one process of a run has it at a time.
        obj: Any object.
        methods: The names of the methods that may be called; None: all whose names do not begin with "_".
        threads: How many calls may run at a time; with more than one they run in no order, and the object has to
            stand that.

    Returns:
        What ends it (`close`), and waits until it ends (`wait`), which is what a process does that is there for this
        alone. It ends with the process.

    Raises:
        ServiceError: Another process has exposed that name.
        LaunchError: It is no name, there is no such method, or the launcher does not answer.

    Example:
        >>> import farspan
        >>> class Counter:
        ...     total = 0
        ...
        ...     def add(self, number):
        ...         self.total += number
        ...         return self.total
        >>> with farspan.expose("counter", Counter()):
        ...     counter = farspan.service("counter")
        ...     counter.add(2), counter.future.add(3).result()
        (2, 5)
    """
    if not isinstance(name, str) or not _FORM.fullmatch(name):
        raise LaunchError(
            f"{quoted(name)} is no name of a service.",
            why="it has 1 to 100 letters, digits and _.-",
            hint='farspan.expose("buffer", object)',
        )
    if type(threads) is not int or threads < 1:
        why = "it is how many calls may run at a time: a whole number from 1."
        raise LaunchError(
            f"threads={quoted(threads)} is no number of threads.", why=why, hint="threads=1, in order of arrival"
        )
    return Exposed(name, _methods_of(obj, methods), threads, names_of_run())


def _methods_of(obj: object, methods: Collection[str] | None) -> dict[str, Callable[..., Any]]:
    kind = type(obj)
    if methods is None:
        found = [each for each in dir(kind) if not each.startswith("_") and _is_method(kind, each)]
    else:
        found = list(methods)
        wrong = next((each for each in found if each.startswith("_") or not _is_method(kind, each)), None)
        if wrong is not None:
            raise LaunchError(
                f"{kind.__qualname__} has no method {wrong!r} that could be exposed.",
                why="methods are those of the class whose names do not begin with _.",
                hint=f"methods={sorted(each for each in found if _is_method(kind, each))}",
            )
    if not found:
        raise LaunchError(
            f"a {kind.__qualname__} has no methods that could be exposed.",
            why="methods are those of the class whose names do not begin with _.",
            hint="an object of a class with methods",
        )
    taken = next((each for each in _OF_SERVICE if each in found), None)
    if taken is not None:
        raise LaunchError(
            f"the method {taken!r} cannot be exposed.",
            why=f"farspan.service(name).{taken} is something else.",
            hint="another name for it, or methods=[...] without it",
        )
    return {each: getattr(obj, each) for each in found}


def _is_method(kind: type, name: str) -> bool:
    """Returns whether a class has a method of that name, which it may have from a base."""
    return (
        isinstance(name, str)
        and callable(getattr(kind, name, None))
        and not isinstance(inspect.getattr_static(kind, name, None), (property, type))
    )
