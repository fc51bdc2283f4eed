"""Finds the ranks of this host that let this process use their memory, and makes two connections to each of them.

    exchange        who I am: host, process, name of my listener, token, where my probe lies and what it says
    connect         the higher rank of a pair to the lower one's listener; both ends check user and process
    queues          each gives the other the exit of its queue of chunks (see chunks.py)
    probe           read the other's probe in its memory, and write it; a container or a security module may forbid it
    exchange        whose probe I could use: a pair is one of same-host peers if both ends could

Listeners are sockets in Linux' abstract namespace: no file, so nothing is left behind by a crash.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import logging
import os
import secrets
import signal
import socket
import struct
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from farspan.comm.same_host.chunks import ChunkQueue

__all__ = ["Exchange", "SameHostPeer", "SameHostPeers", "OtherMemory", "find_same_host_peers", "resume"]

Exchange = Callable[[bytes], list[bytes]]
"""Gathers a few bytes of every rank: called with this rank's, returns those of all, by rank."""

_LANES = ("messages", "acks")
_HELLO_BYTES = 1024
_EXIT = b"exit of my queue of chunks"
_MAX_WAITING = 4096
_PR_SET_PTRACER = 0x59616D61
_PR_SET_PTRACER_ANY = -1
_YAMA = Path("/proc/sys/kernel/yama/ptrace_scope")

_log = logging.getLogger(__name__)


class _Span(ctypes.Structure):
    """The C struct iovec."""

    _fields_ = (("address", ctypes.c_void_p), ("size", ctypes.c_size_t))


def _system_call(name: str, *argument_types: type) -> Callable[..., int] | None:
    """Returns a function of the C library that sets errno, or None where there is none of that name."""
    function = getattr(ctypes.CDLL(None, use_errno=True), name, None) if sys.platform == "linux" else None
    if function is not None:
        function.restype = ctypes.c_ssize_t
        function.argtypes = argument_types
    return function


_SPANS = (ctypes.POINTER(_Span), ctypes.c_ulong)
_process_vm_readv = _system_call("process_vm_readv", ctypes.c_int, *_SPANS, *_SPANS, ctypes.c_ulong)
_process_vm_writev = _system_call("process_vm_writev", ctypes.c_int, *_SPANS, *_SPANS, ctypes.c_ulong)
_prctl = _system_call("prctl", ctypes.c_int, *[ctypes.c_ulong] * 4)


class OtherMemory:
    """Another process' memory: copies out of it and into it, in one copy and without the interpreter lock."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._here = _Span()
        self._there = _Span()
        self._here_pointer = ctypes.pointer(self._here)
        self._there_pointer = ctypes.pointer(self._there)

    def read(self, here: int, there: int, size: int) -> None:
        """Copy `size` bytes from the address `there` in that process to the address `here`.

        Raises:
            OSError: Some of it cannot be read, or that process has ended.
        """
        self._copy(_process_vm_readv, here, there, size)

    def write(self, here: int, there: int, size: int) -> None:
        """Copy `size` bytes from the address `here` to the address `there` in that process.

        Raises:
            OSError: Some of it cannot be written, or that process has ended.
        """
        self._copy(_process_vm_writev, here, there, size)

    def _copy(self, copy: Callable[..., int] | None, here: int, there: int, size: int) -> None:
        assert copy is not None
        while size > 0:
            self._here.address, self._there.address = here, there
            self._here.size = self._there.size = size
            count = copy(self.pid, self._here_pointer, 1, self._there_pointer, 1, 0)
            if count <= 0:
                code = ctypes.get_errno() if count < 0 else errno.EFAULT
                if code == errno.EINTR:
                    continue
                raise OSError(code, os.strerror(code))
            here, there, size = here + count, there + count, size - count


@dataclass(frozen=True, slots=True, kw_only=True)
class SameHostPeer:
    """A rank whose memory this one may read and write, and the other way round."""

    rank: int
    pid: int
    messages: socket.socket
    acks: socket.socket
    my_chunks: ChunkQueue
    """Chunks of messages to this rank; the peer copies some of them."""
    its_chunks: socket.socket
    """The exit of the peer's queue."""
    pidfd: int
    """Readable when that process has ended, also where a fork of it keeps the sockets open."""

    def close(self) -> None:
        for closable in (self.messages, self.acks, self.my_chunks, self.its_chunks):
            closable.close()
        os.close(self.pidfd)


@dataclass(frozen=True, slots=True, kw_only=True)
class SameHostPeers:
    """All same-host peers, and whether each rank of this host, this one included, can have a core to itself."""

    peers: list[SameHostPeer]
    has_core_for_each: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class _Card:
    """The facts that a rank shares with the others about itself."""

    host: list[str]
    pid: int
    cores: list[int]
    listener: str
    token: str
    probe_address: int
    probe: str


class _Setup:
    """One rank's steps to its same-host peers, up to the verdict."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.pairs: dict[int, dict[str, socket.socket]] = {}
        self.my_chunks: dict[int, ChunkQueue] = {}
        self.its_chunks: dict[int, socket.socket] = {}
        self.pidfds: dict[int, int] = {}
        self._allow_access()
        probe = secrets.token_bytes(32)
        self._probe = ctypes.create_string_buffer(probe, len(probe))
        name = f"farspan-{secrets.token_hex(16)}"
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self.listener.bind(f"\0{name}")
            self.listener.listen(_MAX_WAITING)
            self.card = _Card(
                host=_host_identity(),
                pid=os.getpid(),
                cores=sorted(os.sched_getaffinity(0)),
                listener=name,
                token=secrets.token_hex(32),
                probe_address=ctypes.addressof(self._probe),
                probe=probe.hex(),
            )
        except BaseException:
            self.listener.close()
            raise

    @staticmethod
    def _allow_access() -> None:
        """Lets every process of this user read and write this one, where Yama allows that to ancestors only."""
        if _YAMA.exists() and _YAMA.read_text().strip() == "1" and _prctl is not None:
            _prctl(_PR_SET_PTRACER, _PR_SET_PTRACER_ANY, 0, 0, 0)

    def connect(self, others: dict[int, _Card], end: float) -> None:
        """Two connections to each of `others`, by `end`; whom that fails with is left out."""
        for rank in sorted(rank for rank in others if rank < self.rank):
            lanes = self.pairs.setdefault(rank, {})
            try:
                for lane in _LANES:
                    lanes[lane] = self._call(others[rank], lane, end)
            except OSError as error:
                _log.debug("rank %d cannot connect to rank %d of its host: %s", self.rank, rank, error)
        higher = {rank: card for rank, card in others.items() if rank > self.rank}
        num_missing = len(higher) * len(_LANES)
        while num_missing:
            try:
                num_missing -= self._answer(higher, end)
            except OSError as error:
                _log.debug("rank %d misses %d connections of its host: %s", self.rank, num_missing, error)
                return

    def _call(self, card: _Card, lane: str, end: float) -> socket.socket:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            connection.settimeout(_left_s(end))
            connection.connect(f"\0{card.listener}")
            if _peer_of(connection) != (card.pid, os.geteuid()):
                raise PermissionError("the listener is another process'")
            connection.send(json.dumps({"rank": self.rank, "lane": lane, "token": card.token}).encode())
        except BaseException:
            connection.close()
            raise
        return connection

    def _answer(self, higher: dict[int, _Card], end: float) -> bool:
        """Take one connection; whether it is one of the wanted."""
        self.listener.settimeout(_left_s(end))
        connection, _ = self.listener.accept()
        is_wanted = False
        try:
            is_wanted = self._admit(connection, higher, end)
        finally:
            if not is_wanted:
                connection.close()
        return is_wanted

    def _admit(self, connection: socket.socket, higher: dict[int, _Card], end: float) -> bool:
        pid, uid = _peer_of(connection)
        if uid != os.geteuid() or pid not in {card.pid for card in higher.values()}:
            return False
        connection.settimeout(_left_s(end))
        try:
            hello = json.loads(connection.recv(_HELLO_BYTES))
            rank, lane, token = hello["rank"], hello["lane"], hello["token"]
            is_meant = higher[rank].pid == pid and lane in _LANES and lane not in self.pairs.get(rank, {})
            if not is_meant or not secrets.compare_digest(token, self.card.token):
                return False
        except (ValueError, KeyError, TypeError, ConnectionError, RecursionError) as error:
            _log.debug("rank %d was greeted wrongly by process %d: %s", self.rank, pid, error)
            return False
        self.pairs.setdefault(rank, {})[lane] = connection
        return True

    def exchange_queues(self, end: float) -> None:
        """Give each connected rank the exit of its queue, and take that of its own."""
        connected = {rank: lanes["acks"] for rank, lanes in self.pairs.items() if len(lanes) == len(_LANES)}
        for rank, lane in connected.items():
            try:
                self.my_chunks[rank] = ChunkQueue()
                socket.send_fds(lane, [_EXIT], [self.my_chunks[rank].exit.fileno()])
            except OSError as error:
                _log.debug("rank %d cannot give rank %d its queue: %s", self.rank, rank, error)
        for rank, lane in connected.items():
            try:
                lane.settimeout(_left_s(end))
                _, descriptors, _, _ = socket.recv_fds(lane, len(_EXIT), 1, socket.MSG_CMSG_CLOEXEC)
                self.its_chunks[rank] = socket.socket(fileno=descriptors[0])
                self.its_chunks[rank].setblocking(False)
            except (OSError, IndexError) as error:
                _log.debug("rank %d has not got the queue of rank %d: %s", self.rank, rank, error)

    def usable(self, others: dict[int, _Card]) -> list[int]:
        """Returns the connected ranks whose probes can be read and written."""
        complete = self.my_chunks.keys() & self.its_chunks.keys()
        return [rank for rank in complete if self._can_use(rank, others[rank])]

    def _can_use(self, rank: int, card: _Card) -> bool:
        expected = bytes.fromhex(card.probe)
        found = ctypes.create_string_buffer(len(expected))
        memory = OtherMemory(card.pid)
        try:
            memory.read(ctypes.addressof(found), card.probe_address, len(expected))
            if found.raw != expected:
                return False
            memory.write(ctypes.addressof(found), card.probe_address, len(expected))
            self.pidfds[rank] = os.pidfd_open(card.pid)
        except OSError as error:
            _log.debug("rank %d cannot use the memory of process %d: %s", self.rank, card.pid, error)
            return False
        return True

    def close(self, *, keep: set[int]) -> None:
        self.listener.close()
        for rank, lanes in self.pairs.items():
            for lane in lanes.values():
                if rank not in keep:
                    lane.close()
        for rank, queue in (*self.my_chunks.items(), *self.its_chunks.items()):
            if rank not in keep:
                queue.close()
        for rank, pidfd in self.pidfds.items():
            if rank not in keep:
                os.close(pidfd)


def find_same_host_peers(rank: int, exchange: Exchange, deadline_s: float) -> SameHostPeers:
    """Finds the same-host peers and connects to them. All ranks call it together; it calls `exchange` twice on every
    rank.

    Args:
        deadline_s: The longest wait for a connection. The waits of `exchange` are its own.
    """
    setup = _begin(rank)
    cards = [_read_card(blob) for blob in exchange(json.dumps(asdict(setup.card) if setup else None).encode())]
    host = setup.card.host if setup else None
    here = {other: card for other, card in enumerate(cards) if card is not None and card.host == host}
    others = {other: card for other, card in here.items() if card.pid != os.getpid()}
    usable: list[int] = []
    if setup is not None:
        end = time.monotonic() + deadline_s
        setup.connect(others, end)
        setup.exchange_queues(end)
        usable = setup.usable(others)
    verdicts = [json.loads(blob) for blob in exchange(json.dumps(usable).encode())]
    if setup is None:
        return SameHostPeers(peers=[], has_core_for_each=False)
    agreed = [other for other in sorted(usable) if rank in verdicts[other]]
    setup.close(keep=set(agreed))
    peers = [
        SameHostPeer(
            rank=other,
            pid=others[other].pid,
            pidfd=setup.pidfds[other],
            my_chunks=setup.my_chunks[other],
            its_chunks=setup.its_chunks[other],
            **setup.pairs[other],
        )
        for other in agreed
    ]
    cores = {core for card in here.values() for core in card.cores}
    return SameHostPeers(peers=peers, has_core_for_each=len(here) <= len(cores))


def _begin(rank: int) -> _Setup | None:
    if _process_vm_readv is None or _process_vm_writev is None:
        return None
    try:
        return _Setup(rank)
    except OSError as error:
        _log.debug("rank %d looks for no same-host peers: %s", rank, error)
        return None


def _read_card(blob: bytes) -> _Card | None:
    fields = json.loads(blob)
    return None if fields is None else _Card(**fields)


def _host_identity() -> list[str]:
    """Returns what two ranks of one host have in common: the running kernel, the two namespaces, the user."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    spaces = [str(os.stat(f"/proc/self/ns/{kind}").st_ino) for kind in ("net", "pid")]
    return [boot, *spaces, str(os.geteuid())]


def _peer_of(connection: socket.socket) -> tuple[int, int]:
    """Process and user at the other end, as the kernel knows them."""
    pid, uid, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return pid, uid


def resume(pidfds: Iterable[int]) -> None:
    """Let processes go on that are stopped."""
    for pidfd in pidfds:
        with contextlib.suppress(OSError):  # it has ended
            signal.pidfd_send_signal(pidfd, signal.SIGCONT)


def _left_s(end: float) -> float:
    """Never 0: that would mean a socket that does not wait."""
    return max(0.001, end - time.monotonic())
