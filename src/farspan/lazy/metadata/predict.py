"""Predicting a call: one run on fake tensors gives structure, metadata, and which output depends on which argument."""

from __future__ import annotations

import hashlib
import random
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from farspan.errors import RecordError
from farspan.graph import Meta
from farspan.lazy.leaf import Leaf, swapped
from farspan.lazy.metadata.entry import Entry, meta_of
from farspan.lazy.metadata.modes import Modes, apply_modes
from farspan.lazy.metadata.template import flatten, rebuild
from farspan.lazy.ops.autograd_function import FunctionCall
from farspan.lazy.ops.functions import name_of
from farspan.lazy.randomness import DRAWS, GENERATORS
from farspan.lazy.torch_private import FakeTensor, TorchDispatchMode, call_without_compiling, fake_mode

__all__ = ["predict"]


def predict(target: Any, template: Any, metas: Sequence[Meta], modes: Modes) -> Entry:
    """Run `target` once on fake tensors."""
    with (
        torch.inference_mode(False),
        _untouched_generators() as generators,
        fake_mode(),
        _Watch() as watch,
        apply_modes(modes),
    ):
        leaves = [_fake(meta) for meta in metas]
        # Not leaves of autograd, so that a call may write into them, as it may into any activation.
        with torch.enable_grad():
            tensors = [
                leaf.clone() if meta.requires_grad and not meta.is_parameter else leaf
                for meta, leaf in zip(metas, leaves, strict=True)
            ]
        versions = [tensor._version for tensor in tensors]
        result = _run(target, template, tensors)
        result_template, results = flatten(result)
        mutated = tuple(
            i
            for i, tensor in enumerate(tensors)
            if tensor._version != versions[i] or _storage_id(tensor) in watch.written
        )
        outputs = [*results, *(tensors[i] for i in mutated)]
        positions = {id(tensor): i for i, tensor in enumerate(tensors)}
        storages = {_storage_id(tensor): i for i, tensor in enumerate(tensors)}
        same_as = tuple(positions.get(id(tensor), -1) for tensor in results)
        shares = tuple(storages.get(_storage_id(tensor), -1) for tensor in results)
        leaf_numbers = {id(leaf): i for i, leaf in enumerate(leaves)}
        depends_on = tuple(_reached(output, leaf_numbers) for output in outputs)
        output_metas = tuple(meta_of(output) for output in outputs)
        if watch.has_drawn:
            _learn(target, template, metas, watch)
    name = name_of(target)
    description = repr((name, template, list(map(repr, metas)), modes, result_template, list(map(repr, output_metas))))
    return Entry(
        name=name,
        template=result_template,
        metas=output_metas,
        num_results=len(results),
        depends_on=depends_on,
        mutated=mutated,
        same_as=same_as,
        shares=shares,
        has_tensors_only=_has_tensors_only(result),
        is_one_new_tensor=type(result) is FakeTensor and not mutated and same_as[0] < 0 and shares[0] < 0,
        is_random=watch.has_drawn or generators.have_drawn,
        is_random_in_python=generators.have_drawn,
        digest=int.from_bytes(hashlib.blake2b(description.encode(), digest_size=7).digest(), "big"),
    )


def _fake(meta: Meta) -> torch.Tensor:
    tensor = torch.empty_strided(meta.shape, meta.stride, dtype=meta.dtype, device=meta.device)
    return tensor.requires_grad_(meta.requires_grad) if meta.requires_grad else tensor


def _storage_id(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata if tensor.layout is torch.strided else id(tensor)


def _run(target: Any, template: Any, tensors: list[torch.Tensor]) -> Any:
    if type(target) is not Leaf:
        args, kwargs = rebuild(template, tensors)
        return target(*args, **kwargs)
    num_arguments = len(tensors) - len(target.foreign)
    args, kwargs = rebuild(template, tensors[:num_arguments])
    fakes: dict[int, torch.Tensor] = {}
    for item in target.placed:
        fake = torch.empty_strided(item.meta.shape, item.meta.stride, dtype=item.meta.dtype, device=item.meta.device)
        fakes[id(item.tensor)] = nn.Parameter(fake, item.tensor.requires_grad) if item.is_parameter else fake
    for item, value in zip(target.foreign, tensors[num_arguments:], strict=True):
        fakes[id(item.tensor)] = value
    with _unchanged_state(target.modules), swapped(target.modules, fakes):
        result = call_without_compiling(target.module, *args, **kwargs)
    _refuse_changed_arguments(target, template, tensors[:num_arguments], (args, kwargs))
    return result


def _refuse_changed_arguments(target: Leaf, template: Any, tensors: list[torch.Tensor], arguments: Any) -> None:
    """The caller's own list or dictionary is on every rank; the module that would fill it runs on one."""
    after, tensors_after = flatten(arguments)
    if after == template and all(now is then for now, then in zip(tensors_after, tensors, strict=True)):
        return
    raise RecordError(
        f"{name_of(target)} changes an argument it was given (a list, a dictionary, an object).",
        why="the change would be seen on one rank only.",
        hint="return what it adds, and let the caller put it into the list or dictionary",
    )


@contextmanager
def _unchanged_state(modules: tuple[nn.Module, ...]) -> Iterator[None]:
    """Put back all that a run leaves on the modules: attributes, and the contents of their lists and dictionaries."""
    before = [
        (
            module,
            dict(module.__dict__),
            [(item, type(item)(item)) for item in module.__dict__.values() if type(item) in (list, dict, set)],
        )
        for module in modules
    ]
    for module in modules:
        for table in ("_forward_hooks", "_forward_pre_hooks"):
            kept = {key: hook for key, hook in module.__dict__[table].items() if _is_of_torch(hook)}
            module.__dict__[table] = OrderedDict(kept)
    try:
        yield
    finally:
        for module, attributes, contents in before:
            module.__dict__.clear()
            module.__dict__.update(attributes)
            for item, content in contents:
                item.clear()
                item.extend(content) if isinstance(item, list) else item.update(content)


def _is_of_torch(hook: Any) -> bool:
    """torch's own hooks (weight norm, spectral norm) belong to the computation; a user's are for real tensors."""
    return (getattr(hook, "__module__", None) or type(hook).__module__).startswith("torch.")


def _learn(target: Any, template: Any, metas: Sequence[Meta], watch: _Watch) -> None:
    """Run `target` once more, to learn which torch functions it draws with."""
    if type(target) is not Leaf and type(target) is not FunctionCall:
        DRAWS.add(target)
        return
    with torch.enable_grad():
        tensors = [_fake(meta) if meta.is_parameter else _fake(meta).clone() for meta in metas]
    with _Learn(watch), suppress(Exception):  # what the mode breaks here teaches nothing; the call itself has run
        _run(target, template, tensors)


class _Learn(TorchFunctionMode):
    """Tells `watch` which torch function is running; a mode changes what some functions do, so it has its own run."""

    def __init__(self, watch: _Watch) -> None:
        super().__init__()
        self.watch = watch

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.watch.function = func
        try:
            return func(*args, **(kwargs or {}))
        finally:
            self.watch.function = None


class _Watch(TorchDispatchMode):
    """Note whether an operation draws random numbers, and which memory is written (by schema: fakes do not count
    the versions of `_foreach_*` arguments).
    """

    def __init__(self) -> None:
        super().__init__()
        self.has_drawn = False
        self.function: Any = None
        """The torch function that is running, where this is known."""
        self.written: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        schema = func._schema.arguments
        if func._schema.is_mutable or torch.Tag.nondeterministic_seeded in func.tags:
            given = {item.name: value for item, value in zip(schema, args, strict=False)} | (kwargs or {})
            if torch.Tag.nondeterministic_seeded in func.tags and not _is_switched_off(schema, given):
                self.has_drawn = True
                if self.function is not None:
                    DRAWS.add(self.function)
            for item in schema:
                if item.alias_info is not None and item.alias_info.is_write and given.get(item.name) is not None:
                    value = given[item.name]
                    self.written.update(map(_storage_id, value if isinstance(value, (list, tuple)) else (value,)))
        return func(*args, **(kwargs or {}))


class _Generators:
    have_drawn = False


def _is_switched_off(schema: Any, given: dict[str, Any]) -> bool:
    """Whether an operation that may draw random numbers does not: dropout of probability 0, or not in training."""
    values = {item.name: given.get(item.name, item.default_value) for item in schema}
    return any(values.get(name, 1) == 0 for name in ("dropout_p", "p", "dropout", "train", "training"))


@contextmanager
def _untouched_generators() -> Iterator[_Generators]:
    """Leave Python's, numpy's and torch's generators as they were, and note whether the first two were used."""
    noted = _Generators()
    with GENERATORS, torch.random.fork_rng(devices=[]):
        python, numpy_state = random.getstate(), np.random.get_state()
        try:
            yield noted
        finally:
            after = np.random.get_state()
            noted.have_drawn = random.getstate() != python or not all(map(np.array_equal, after, numpy_state))
            random.setstate(python)
            np.random.set_state(numpy_state)


def _reached(output: torch.Tensor, leaf_numbers: dict[int, int]) -> tuple[int, ...]:
    """Which arguments the gradient of `output` flows to: a walk over its autograd graph."""
    if not output.requires_grad:
        return ()
    if output.grad_fn is None:
        number = leaf_numbers.get(id(output))
        return () if number is None else (number,)
    found: set[int] = set()
    seen = {output.grad_fn}
    stack = [output.grad_fn]
    while stack:
        node = stack.pop()
        variable = getattr(node, "variable", None)
        if variable is not None and id(variable) in leaf_numbers:
            found.add(leaf_numbers[id(variable)])
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                stack.append(following)
    return tuple(sorted(found))


def _has_tensors_only(result: Any) -> bool:
    if isinstance(result, torch.Tensor) or result is None:
        return True
    if isinstance(result, (bool, int, float, complex)) or type(result).__module__ == "numpy":
        return False
    if isinstance(result, dict):
        return all(map(_has_tensors_only, result.values()))
    if isinstance(result, (list, tuple)) and not isinstance(result, torch.Size):
        return all(map(_has_tensors_only, result))
    return True
