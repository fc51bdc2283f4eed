"""Compares each call with its prediction: not only the first one of its kind, as `observe` does.

structure of the result | metadata | which argument a result is, or shares memory with | which arguments are
written | whether random numbers are drawn
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import torch

from farspan.call.draws.generators import is_as_in_python, states_in_python
from farspan.call.draws.mersenne import is_same_state
from farspan.call.infer.entry import Entry, Unknown
from farspan.call.infer.observe import aliases
from farspan.call.infer.watch import is_switched_off, storage_id
from farspan.call.naming import format_where
from farspan.call.side_effects.changes import describe_result
from farspan.errors import SanitizeError
from farspan.execute.step import segment
from farspan.graph import Call, Value
from farspan.torch_private import DisableTorchFunction, TorchDispatchMode, is_fake, no_dispatch

__all__ = ["check_calls", "digest_of"]


class _Checking(Protocol):
    seed: int
    rank: int

    @property
    def has_generators(self) -> bool: ...


def check_calls(current: Callable[[], _Checking | None]) -> None:
    """Compare from now on, where `current` returns something, what calls do with what was predicted."""
    call_target = segment.call_target

    def checked(call: Call, tensors: list[torch.Tensor]) -> Any:
        checking, entry = current(), call.entry
        if checking is None or type(entry) is Unknown or any(map(is_fake, tensors)):
            return call_target(call, tensors)
        before = list(map(_state_of, tensors))
        draws = _Draws()
        with draws.noted(call, by_state=checking.has_generators):
            result, arguments = call_target(call, tensors)
        if draws.have_happened and not entry.is_random and not getattr(call.target, "is_resolved", False):
            raise _broken(checking, call, "draws random numbers, and was predicted to draw none", "draws")
        described = describe_result(result, arguments.objects, arguments.changed())
        if described.template != entry.template:
            raise _broken(checking, call, "returns another structure than predicted", "structure of the result")
        _check_written(checking, call, tensors, before)
        _check_results(checking, call, tensors, described.tensors, before)
        return result, arguments

    segment.call_target = checked


def digest_of(tensor: torch.Tensor) -> bytes:
    """Returns a digest of a tensor's elements."""
    with no_dispatch(), DisableTorchFunction(), torch.no_grad():
        copy = tensor.detach().resolve_conj().resolve_neg().cpu().clone(memory_format=torch.contiguous_format)
        flat = (
            copy.reshape(-1).view(torch.uint8).numpy().tobytes()
        )  # of a copy: it marks the memory as an array's for good
        return hashlib.blake2b(flat, digest_size=8).digest()


class _State(NamedTuple):
    version: int
    storage: int
    digest: bytes


def _state_of(tensor: torch.Tensor) -> _State | None:
    """Returns what changes when a tensor is written into; None for what has no memory of its own."""
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.layout is not torch.strided or tensor.is_meta:
        return None
    return _State(0 if tensor.is_inference() else tensor._version, storage_id(tensor), digest_of(tensor))


def _check_written(
    checking: _Checking, call: Call, tensors: Sequence[torch.Tensor], before: Sequence[_State | None]
) -> None:
    """Raise if an argument has been written into that was not to be."""
    entry: Entry = call.entry
    written = {storage_id(tensors[number]) for number in entry.mutated}
    for number, (tensor, known) in enumerate(zip(tensors, before, strict=True)):
        if known is None or number in entry.mutated or known.storage in written:
            continue
        if _state_of(tensor) != known:
            what = f"writes into {_argument(call, number)}, and was predicted not to"
            raise _broken(checking, call, what, "arguments written")


def _check_results(
    checking: _Checking,
    call: Call,
    tensors: Sequence[torch.Tensor],
    results: Sequence[torch.Tensor],
    before: Sequence[_State | None],
) -> None:
    """Raise if a result is not like its prediction, or another argument's memory."""
    entry: Entry = call.entry
    for number, (result, meta) in enumerate(zip(results, entry.metas, strict=False)):
        if result.dtype != meta.dtype or tuple(result.shape) != meta.shape:
            what = f"returns {result.dtype}{list(result.shape)} as result {number}, predicted was {meta}"
            raise _broken(checking, call, what, "metadata")
    same_as, shares = aliases(results, tensors)
    for number, result in enumerate(results):
        if result.layout is not torch.strided or not result.numel():
            continue
        arguments = {entry.same_as[number], entry.shares[number]} - {-1}
        if any(before[argument] is None for argument in arguments):
            continue  # a parameter that is away: what it gives lies in a copy
        found, wanted = same_as[number], entry.same_as[number]
        if found != wanted and (wanted < 0 or result is not tensors[wanted]):
            raise _broken(checking, call, _aliasing(call, number, "is", found, wanted), "arguments returned")
        found, wanted = shares[number], entry.shares[number]
        if found != wanted and (wanted < 0 or storage_id(result) != storage_id(tensors[wanted])):
            raise _broken(checking, call, _aliasing(call, number, "shares memory with", found, wanted), "shared memory")


def _aliasing(call: Call, number: int, verb: str, found: int, wanted: int) -> str:
    def named(argument: int) -> str:
        return "no argument" if argument < 0 else _argument(call, argument)

    return f"returns a result {number} that {verb} {named(found)}, predicted was {named(wanted)}"


def _argument(call: Call, number: int) -> str:
    item = (call.arguments or ())[number]
    return f"its argument {number} ({item.describe() if type(item) is Value else 'a tensor outside the model'})"


def _broken(checking: _Checking, call: Call, what: str, rule: str) -> SanitizeError:
    return SanitizeError(
        f"rank {checking.rank}: {call.entry.name} {what}.",
        why=f"at {format_where(call.where)}, micro-batch {call.graph.index}, call {call.index} (rule: predictions "
        f"hold, {rule}): it depends on the data, or on state that another rank has.",
        hint="let the module do the same in every call, or place it together with its caller; "
        f"FARSPAN_SANITIZE={checking.seed} shows it again",
    )


class _Draws:
    """Whether a call draws from torch's, Python's or numpy's generator."""

    def __init__(self) -> None:
        self.have_happened = False

    @contextmanager
    def noted(self, call: Call, *, by_state: bool) -> Iterator[None]:
        """Note what the body, which runs `call`, draws: by the states of the generators; where ranks are threads that
        share these, by the operations.
        """
        if call.entry.is_random:
            yield
            return
        if not by_state:
            with _Drawing(self):
                yield
            return
        states, state = states_in_python(), torch.default_generator.get_state()
        yield
        self.have_happened = not is_as_in_python(states) or not is_same_state(
            state, torch.default_generator.get_state()
        )


class _Drawing(TorchDispatchMode):
    def __init__(self, draws: _Draws) -> None:
        super().__init__()
        self._draws = draws

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags:
            given = {item.name: value for item, value in zip(func._schema.arguments, args, strict=False)}
            given.update(kwargs or {})
            is_own = given.get("generator") not in (None, torch.default_generator)
            self._draws.have_happened |= not is_own and not is_switched_off(func, given)
        return func(*args, **(kwargs or {}))
