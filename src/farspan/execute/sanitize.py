"""FARSPAN_SANITIZE: checks, at any cost, what the runtime relies on; for tests, and for people who doubt a number.

    released memory     reads as nan from the moment when nothing uses it any more
    values              are the same each time they are read; what is sent is the same until it has been sent
    predictions         are compared with every call (`execute.sanitized_calls`)
    delays              sends, receives, agreements and releases take a little longer, at random
    order               of each step: any that the dependencies allow, the same on all ranks

It is put around the parts of an engine when that is made; where it is off, nothing of it is even imported.
"""

from __future__ import annotations

import random
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from farspan.call.naming import format_where
from farspan.comm.channels import Channels
from farspan.comm.transport import Transport, Work
from farspan.errors import SanitizeError
from farspan.execute.abort.interruption import Interruption
from farspan.execute.agreement.step_start import StepStart
from farspan.execute.backward import unsaved
from farspan.execute.sanitized_calls import check_calls, digest_of
from farspan.execute.step.executor import Executor
from farspan.graph import BackwardSegment, Edge, Graph, Meta, Segment, Value
from farspan.program.cache import Programs
from farspan.program.options import Settings
from farspan.program.program import Action, Message, Program
from farspan.schedule import drawn_name
from farspan.torch_private import fill_with_poison, is_fake, num_users_of_storage

__all__ = ["Sanitizer"]

_LONGEST_DELAY_S = 3e-3
_DELAYED = 0.3
"""The part of all places at which a rank waits."""
_AGREEMENTS = ("start", "wait_agreed", "contribute", "gathered")
_PLAIN = (torch.Tensor, torch.nn.Parameter)

_thread = threading.local()
_patching = threading.Lock()
_patched: list[bool] = []
_sanitizers: weakref.WeakSet[Sanitizer] = weakref.WeakSet()
"""Those of this process: of several only where ranks are threads, as in tests."""


class Sanitizer:
    """Checks one engine.

    Args:
        seed: Of the delays and orders; the same on all ranks.
        rank: Whose engine.
    """

    def __init__(self, seed: int, rank: int) -> None:
        self.seed = seed
        self.rank = rank
        self._thread_id = threading.get_ident()
        self._draw = random.Random(f"{seed}:{rank}")
        self._released: list[_Released] = []
        self._digests: weakref.WeakKeyDictionary[Value, bytes] = weakref.WeakKeyDictionary()
        """Of the values that more than one segment takes, or that have come from another rank."""
        self._of_gradients: dict[Edge, bytes] = {}
        """Of the gradients that have come from another rank, until they are taken."""
        self.num_poisoned = 0
        self.num_compared = 0
        _sanitizers.add(self)
        _patch()

    @property
    def has_generators(self) -> bool:
        """Returns whether nobody else draws from this process's generators."""
        return all(each._thread_id == self._thread_id for each in _sanitizers)

    @contextmanager
    def checking(self) -> Iterator[None]:
        """Check what this thread does meanwhile; a thread may have more engines than this one, also later."""
        before = current()
        _thread.sanitizer = self
        try:
            yield
        finally:
            _thread.sanitizer = before

    # Set-up.

    def watch_engine(self, engine: Any) -> None:
        """Check what `engine` runs; called when it has been made."""
        engine.programs = _DrawnPrograms(self.seed)
        settle = engine.settle

        def settle_and_sweep(*args: Any) -> None:
            with self.checking():
                settle(*args)
                self.end_step()

        engine.settle = settle_and_sweep
        if engine.side.world_size > 1:
            for name in _AGREEMENTS:
                setattr(engine.side, name, self._delayed(getattr(engine.side, name)))

    def watch_executor(self, executor: Executor) -> None:
        """Check what `executor` runs from now on."""
        kind: Any = type(executor)
        executor.__class__ = type(f"Sanitized{kind.__name__}", (_Watched, kind), {})
        executor.sanitizer = self  # type: ignore[attr-defined]

    def watch_channels(self, channels: Channels) -> None:
        """Check what goes through `channels` from now on."""
        channels.__class__ = _WatchedChannels
        assert isinstance(channels, _WatchedChannels)
        channels.watch(self)

    def _delayed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def run_later(*args: Any, **kwargs: Any) -> Any:
            self.delay()
            return function(*args, **kwargs)

        return run_later

    # Delays.

    def delay(self) -> None:
        """Wait a random short time, or not."""
        seconds = self.draw_delay()
        if seconds:
            threading.Event().wait(seconds)

    def draw_delay(self) -> float:
        """Returns how long to wait, in seconds."""
        return self._draw.uniform(0.0, _LONGEST_DELAY_S) if self._draw.random() < _DELAYED else 0.0

    # Released memory.

    def release(self, tensor: Any) -> None:
        """`tensor` is on its way out: once nothing else uses its memory, that is poisoned."""
        if is_plain(tensor) and tensor.numel():
            storage = tensor.untyped_storage()
            if storage.resizable():  # else it is an array's, or another library's
                self._released.append(_Released(storage, tensor.dtype))

    def sweep(self) -> None:
        """Poison the released memory that nothing else uses, and give it back."""
        if not self._released:
            return
        released: dict[int, _Released] = {item.storage._cdata: item for item in self._released}
        self._released.clear()
        self._released.extend(released.values())
        released.clear()
        kept: list[_Released] = []
        while self._released:
            item = self._released.pop()
            if num_users_of_storage(item.storage) != _ALONE:
                kept.append(item)
                continue
            fill_with_poison(item.storage, item.dtype)
            self.num_poisoned += 1
        self._released.extend(kept)
        if kept:
            self.delay()

    def end_step(self) -> None:
        """A step is over: what is in use now is not looked after any more, as the program may count who uses it."""
        self.sweep()
        self._released.clear()
        self._of_gradients.clear()

    # Values that do not change.

    def note(self, item: Value | Edge, tensor: Any) -> None:
        """`item` is here: its data do not change from now on."""
        if not is_plain(tensor):
            return
        if isinstance(item, Edge):
            self._of_gradients[item] = digest_of(tensor)
        elif not (item.name or item.gradient_of or item.state_of):  # those the program may write into
            self._digests[item] = digest_of(tensor)

    def compare(self, item: Value, user: str) -> None:
        """`item` is read, or has been: its data are what they were."""
        known = self._digests.get(item)
        if known is None or not is_plain(item.data):
            return
        self.num_compared += 1
        if digest_of(item.data) != known:
            raise self._changed(f"{item.describe()}{_micro_batch(item)}", user, item)

    def compare_gradient(self, edge: Edge, gradient: Any, user: str) -> None:
        """The gradient on `edge` is taken: it is what has come."""
        known = self._of_gradients.pop(edge, None)
        if known is not None and is_plain(gradient):
            self.num_compared += 1
            if digest_of(gradient) != known:
                raise self._changed(edge.describe(), user, edge.key)

    def _changed(self, what: str, user: str, item: object) -> SanitizeError:
        line = "" if not isinstance(item, Value) or item.call is None else f", made at {format_where(item.call.where)}"
        return SanitizeError(
            f"rank {self.rank}: a value has changed since it was made or received: {what}.",
            why=f"{user} does not read what was there before{line} (rule: values do not change).",
            hint=f"FARSPAN_SANITIZE={self.seed} shows it again: this is a bug of farspan, please report it",
        )


class _Released:
    __slots__ = ("dtype", "storage")

    def __init__(self, storage: torch.UntypedStorage, dtype: torch.dtype) -> None:
        self.storage = storage
        self.dtype = dtype


_alone = _Released(torch.empty(1, device="cpu").untyped_storage(), torch.float32)
_ALONE = num_users_of_storage(_alone.storage)


def is_plain(tensor: Any) -> bool:
    """Returns whether it is a tensor with memory that can be looked at."""
    return type(tensor) in _PLAIN and tensor.layout is torch.strided and not tensor.is_meta and not is_fake(tensor)


def current() -> Sanitizer | None:
    """Returns what checks this thread's engine."""
    return getattr(_thread, "sanitizer", None)


def _patch() -> None:
    """Let values and calls know the sanitizer of the thread that uses them; once in a process."""
    with _patching:
        if _patched:
            return
        _patched.append(True)
        check_calls(current)
        slot: Any = Value.__dict__["data"]

        def put(value: Value, data: Any) -> None:
            sanitizer = current()
            if sanitizer is not None and (before := getattr(value, "data", None)) is not None and before is not data:
                sanitizer.release(before)
            slot.__set__(value, data)

        setattr(Value, "data", property(slot.__get__, put))  # noqa: B010  a slot, which assignment would not replace
        release_memory = unsaved.release_memory

        def release_and_poison(tensor: torch.Tensor) -> None:
            sanitizer = current()
            if sanitizer is not None:
                sanitizer.release(tensor)
            release_memory(tensor)

        unsaved.release_memory = release_and_poison


def _micro_batch(value: Value) -> str:
    return "" if value.call is None else f", micro-batch {value.call.graph.index}"


class _Watched(Executor):
    """Comes before an executor's class."""

    sanitizer: Sanitizer

    def run(self, program: Program, interruption: Interruption, start: StepStart | None = None) -> None:
        with self.sanitizer.checking():
            super().run(program, interruption, start)
            self.sanitizer.sweep()

    def _run_with_messages(self, action: Action) -> None:
        super()._run_with_messages(action)
        self.sanitizer.sweep()

    def _forward(self, segment: Segment) -> None:
        self._compare_inputs(segment, "before")
        super()._forward(segment)
        self._compare_inputs(segment, "after")
        for value in segment.outputs:
            self.sanitizer.note(value, value.data)

    def _compare_inputs(self, segment: Segment, when: str) -> None:
        for value in segment.inputs:
            self.sanitizer.compare(value, f"rank {self.channels.rank}, {when} the forward of {segment.describe()},")

    def _backward(self, part: BackwardSegment, *, leaves_weights: bool) -> None:
        self._take(part)
        super()._backward(part, leaves_weights=leaves_weights)

    def _reduce(self, parts: Sequence[BackwardSegment]) -> None:
        for part in parts:
            self._take(part)
        super()._reduce(parts)

    def _take(self, part: BackwardSegment) -> None:
        for edge in part.incoming:
            gradient = self.gradients.get(edge)
            self.sanitizer.compare_gradient(edge, gradient, f"rank {self.channels.rank}, in {part.describe()},")
            self.sanitizer.release(gradient)

    def _wait(self, message: Message, where: str) -> None:
        super()._wait(message, where)
        for item in message.items:
            self.sanitizer.note(item, item.data if isinstance(item, Value) else self.gradients.get(item))

    def _to_send(self, item: Value | Edge, message: Message) -> torch.Tensor:
        user = f"rank {self.channels.rank}, sending to rank {message.dst},"
        if isinstance(item, Value):
            self.sanitizer.compare(item, user)
        else:
            self.sanitizer.compare_gradient(item, self.gradients.get(item), user)
        return super()._to_send(item, message)


class _WatchedChannels(Channels):
    """Compares what it sends with what it was, and takes its time."""

    def watch(self, sanitizer: Sanitizer) -> None:
        self._sanitizer = sanitizer
        self._message = ""
        self._watched: dict[int, _WatchedTransport] = {}

    def transport_to(self, peer: int, *, is_between_gpus: bool) -> Transport:
        transport = super().transport_to(peer, is_between_gpus=is_between_gpus)
        if is_between_gpus:
            return transport  # where the host does not know when a transfer ends
        if id(transport) not in self._watched:
            self._watched[id(transport)] = _WatchedTransport(transport, self._sanitizer, lambda: self._message)
        return self._watched[id(transport)]

    def send(self, message: Message, tensors: Sequence[torch.Tensor], metas: Sequence[Meta]) -> None:
        self._sanitizer.delay()
        self._message = f"the message to rank {message.dst} with {message.describe()}"
        super().send(message, tensors, metas)
        self._message = ""


class _WatchedTransport:
    def __init__(self, transport: Transport, sanitizer: Sanitizer, describe: Callable[[], str]) -> None:
        self._transport = transport
        self._sanitizer = sanitizer
        self._describe = describe

    def send(self, flat: torch.Tensor, dst: int, channel: int) -> Work:
        before = digest_of(flat) if is_plain(flat) else None
        return _WatchedWork(self._transport.send(flat, dst, channel), self._sanitizer, flat, before, self._describe())

    def receive(self, flat: torch.Tensor, src: int, channel: int) -> Work:
        if is_plain(flat) and flat.numel():
            fill_with_poison(flat.untyped_storage(), flat.dtype)  # what has yet to come is no number
        return _WatchedWork(self._transport.receive(flat, src, channel), self._sanitizer, flat, None, "")

    def checks_sizes(self, src: int) -> bool:
        return self._transport.checks_sizes(src)

    def abort(self) -> None:
        self._transport.abort()


class _WatchedWork:
    """A transfer that seems to take a little longer, and whose end is looked at."""

    def __init__(
        self, work: Work, sanitizer: Sanitizer, flat: torch.Tensor, before: bytes | None, message: str
    ) -> None:
        self._work = work
        self._sanitizer = sanitizer
        self._flat: torch.Tensor | None = flat
        self._before = before
        self._message = message
        self._ends_at = time.monotonic() + sanitizer.draw_delay()

    def is_done(self) -> bool:
        return time.monotonic() >= self._ends_at and self._work.is_done()

    def wait(self, deadline_s: float) -> None:
        threading.Event().wait(max(0.0, self._ends_at - time.monotonic()))
        self._work.wait(deadline_s)
        flat, self._flat = self._flat, None
        if flat is None:
            return
        if self._before is not None and digest_of(flat) != self._before:
            raise SanitizeError(
                f"rank {self._sanitizer.rank}: a buffer has changed while it was being sent: {flat.dtype}"
                f"{list(flat.shape)}.",
                why=f"{self._message or 'a tensor beside the program'} (rule: buffers in flight do not change).",
                hint=f"FARSPAN_SANITIZE={self._sanitizer.seed} shows it again: this is a bug of farspan, please "
                "report it",
            )
        self._sanitizer.release(flat)


class _DrawnPrograms(Programs):
    """Makes programs whose order is drawn."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._seed = seed
        self._num_made = 0

    def program_of(self, graphs: Sequence[Graph], settings: Settings) -> Program:
        name = drawn_name(f"{self._seed}:{self._num_made}")
        self._num_made += 1
        return super().program_of(graphs, replace(settings, schedule=name))
