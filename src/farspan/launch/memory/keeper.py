"""The file service of a host's memory, for the ranks of other hosts.

    put PATH      writes a file, with the folder that it lies in
    get PATH      its data
    names PATH    of what is in a folder, sorted; none where there is none
    rename PATH to PATH, in place of what has that name
    remove PATH   a file or a folder with all that is in it

Paths are below the folder: `ROOT/STEP/FILE`, of letters, digits, `.`, `-` and `_`.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import socket
import threading

from farspan.launch.memory.wire import CHUNK_BYTES, KEEPER, RANK, Message, receive, send
from farspan.launch.tcp.exact import receive_into
from farspan.launch.tcp.listening import listen_everywhere
from farspan.launch.tcp.secret import prove

__all__ = ["Keeper", "is_path"]

_PROVING_S = 10.0
_SILENCE_S = 300.0
_PATH = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,99}(?:/[A-Za-z0-9_][A-Za-z0-9._-]{0,99}){0,2}")


class Keeper:
    """Serves one folder until it is closed.

    Args:
        folder: Which.

    Attributes:
        port: Where it listens, on all addresses.
        secret: What those know who are let in; "" lets nobody in.
    """

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self.secret = ""
        self._listener = listen_everywhere()
        self.port = int(self._listener.getsockname()[1])
        threading.Thread(target=self._accept, name="farspan-keeper", daemon=True).start()

    def close(self) -> None:
        """Takes nobody in any more."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # a thread waits there
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                link, _ = self._listener.accept()
            except OSError:  # it is closed
                return
            threading.Thread(target=self._serve, args=(link,), name="farspan-keeper", daemon=True).start()

    def _serve(self, link: socket.socket) -> None:
        """Does what one rank asks for, until it hangs up or does not ask for long."""
        with link, contextlib.suppress(OSError):  # it is gone: it, or who loads next, finds out
            link.settimeout(_PROVING_S)
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if not self.secret:
                return
            prove(link, self.secret.encode(), KEEPER, RANK)
            link.settimeout(_SILENCE_S)
            while True:
                self._answer(link, receive(link))

    def _answer(self, link: socket.socket, message: Message) -> None:
        action = _ACTIONS.get(str(message.get("do")))
        paths = [message.get("path"), message.get("to", "a")]
        if action is None or not all(map(is_path, paths)):
            raise ConnectionError("it asks for what there is not")
        path, to = (f"{self._folder}/{each}" for each in paths)
        action(link, path, to, message)


def is_path(path: object) -> bool:
    """Returns whether it may be a path below a keeper's folder."""
    return isinstance(path, str) and _PATH.fullmatch(path) is not None


def _put(link: socket.socket, path: str, to: str, message: Message) -> None:
    left = message.get("size")
    if type(left) is not int or left < 0:
        raise ConnectionError("it sends a file without a size")
    error, file = "", -1
    try:
        os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
        file = os.open(f"{path}.part", os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as problem:
        error = problem.strerror or str(problem)
    try:
        buffer = memoryview(bytearray(min(left, CHUNK_BYTES)))
        while left:
            part = buffer[: min(left, CHUNK_BYTES)]
            receive_into(link, part)
            left -= len(part)
            try:
                while part and not error:
                    part = part[os.write(file, part) :]
            except OSError as problem:  # no memory is left; the rest is still to be received
                error = problem.strerror or str(problem)
    finally:
        if file >= 0:
            os.close(file)
    if not error:
        os.replace(f"{path}.part", path)  # a file that has its name is whole
    send(link, {"error": error} if error else {})


def _get(link: socket.socket, path: str, to: str, message: Message) -> None:
    try:
        file = open(path, "rb")  # noqa: SIM115
    except OSError as problem:
        send(link, {"error": problem.strerror})
        return
    with file:
        size = os.fstat(file.fileno()).st_size
        send(link, {"size": size})
        if size and link.sendfile(file, count=size) != size:
            raise ConnectionError("the file has become shorter")


def _names(link: socket.socket, path: str, to: str, message: Message) -> None:
    try:
        send(link, {"names": sorted(os.listdir(path))})
    except (FileNotFoundError, NotADirectoryError):
        send(link, {"names": []})


def _rename(link: socket.socket, path: str, to: str, message: Message) -> None:
    try:
        os.replace(path, to)
        send(link, {})
    except OSError as problem:
        send(link, {"error": problem.strerror})


def _remove(link: socket.socket, path: str, to: str, message: Message) -> None:
    if os.path.isdir(path):
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
    send(link, {})


_ACTIONS = {"put": _put, "get": _get, "names": _names, "rename": _rename, "remove": _remove}
