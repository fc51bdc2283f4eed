"""Modules whose activations are computed again, wherever they are called: as a leaf, or somewhere inside one.

A call keeps its arguments and where it stands (modes, random numbers, what its modules hold besides parameters), so
that it can be made once more in the backward, as it was made and without a trace.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from farspan.call.buffer_versions import copies_of
from farspan.call.draws.scope import active, way_back
from farspan.call.leaf import Leaf, swapped
from farspan.call.modes import apply_modes, current_modes
from farspan.call.pytree.template import Flattener, rebuild
from farspan.call.remat.unit import Unit
from farspan.call.side_effects.attributes import HeldState
from farspan.call.side_effects.reachable import State
from farspan.torch_private import is_compiled
from farspan.torch_private.flags import hooks_on_what_is_saved

__all__ = ["ModuleUnits", "written_attributes"]


class ModuleUnits:
    """Follows the module calls of a forward, and makes a unit of each outermost one of the chosen modules.

    Args:
        modules: Ids of the chosen modules and of all below them.
        written: Ids of the buffers and parameters that calls write into.
        attributes: By id of a module, the names of the attributes that calls write.
        writes_arguments: Whether calls write into what they are given.
        draws_in_python: Whether random numbers may come from Python's or numpy's generator.
        made: Is given each unit.
    """

    def __init__(
        self,
        modules: Collection[int],
        written: set[int],
        attributes: Mapping[int, Collection[str]],
        writes_arguments: bool,
        draws_in_python: bool,
        made: Callable[[Unit], None],
    ) -> None:
        self.modules = modules
        self.written = written
        self.attributes = attributes
        self.writes_arguments = writes_arguments
        self.draws_in_python = draws_in_python
        self.made = made

    def call_module(self, module: nn.Module, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run `call(module, ...)`, a module call of the model."""
        is_unit = id(module) in self.modules and not torch.compiler.is_compiling()
        is_unit = is_unit and hooks_on_what_is_saved() is None  # the innermost hooks alone are asked: they keep it
        if not is_unit and not is_compiled(module):
            return call(module, *args, **kwargs)
        active.units = None  # the outermost counts; and compiled code is not followed
        try:
            return self._as_unit(module, call, args, kwargs) if is_unit else call(module, *args, **kwargs)
        finally:
            active.units = self

    def _as_unit(self, module: nn.Module, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        flattener = Flattener()
        template = flattener.walk((args, kwargs))
        modules = tuple(module.modules())
        parameters = [item for part in modules for item in part._parameters.values() if item is not None]
        if flattener.has_opaque or any(id(item) in self.written for item in parameters):
            return call(module, *args, **kwargs)  # not to be had a second time
        tensors = flattener.tensors
        unit = Unit(type(module).__name__, [*tensors, *parameters, *_plain_attributes(modules)])
        inputs = [item.detach().requires_grad_(item.requires_grad) for item in tensors]
        buffers = _WrittenBuffers(modules, self.written)
        tables = [_tables_of(part) for part in modules]
        held = HeldState(modules)
        kept = State(part.__dict__.get(name) for part in modules for name in self.attributes.get(id(part), ()))
        written = [item for item in kept.tensors.values() if type(item) is torch.Tensor]
        values = [(item, item.detach().clone()) for item in (*written, *(tensors if self.writes_arguments else ()))]
        moment = (
            contextlib.nullcontext if active.recorder is None else active.recorder.held_objects.moments.present.being
        )
        modes, back, num_own_draws = current_modes(), way_back(in_python=self.draws_in_python), active.num_own_draws
        with unit.saving():
            result = call(module, *args, **kwargs)

        def again() -> None:
            args, kwargs = rebuild(template, inputs)
            with (
                _with_tables(modules, tables),
                held.present(),
                moment(),
                buffers.put_back(),
                apply_modes(modes),
                back(),
            ):
                call(module, *args, **kwargs)

        is_written = not all(torch.equal(item.detach(), value) for item, value in values)  # `.data` has no versions
        if active.num_own_draws == num_own_draws and not active.draws_from_own and not is_written:
            unit.release(again, inputs)
            self.made(unit)
        return result


def written_attributes(leaves: Iterable[Leaf]) -> dict[int, list[str]]:
    """Returns by id of a module the names of those of its attributes that calls of `leaves` have been seen to write."""
    found: dict[int, list[str]] = {}
    for leaf in leaves:
        for key in leaf.attributes:
            number, _, name = key.partition(".")
            found.setdefault(id(leaf.modules[int(number)]), []).append(name)
    return found


class _WrittenBuffers:
    """The buffers of some modules that calls write into (running statistics), as they are now."""

    def __init__(self, modules: Sequence[nn.Module], written: Collection[int]) -> None:
        self.modules = tuple(modules)
        buffers = (
            [item for module in modules for item in module._buffers.values() if id(item) in written] if written else []
        )
        self.copies = copies_of([item for item in buffers if item is not None])

    def put_back(self) -> contextlib.AbstractContextManager[None]:
        """Let the body find, and write into, these instead of what has become of them."""
        return swapped(self.modules, self.copies) if self.copies else contextlib.nullcontext()


def _plain_attributes(modules: Sequence[nn.Module]) -> list[torch.Tensor]:
    """Returns the tensors that modules hold as nothing but attributes."""
    return [item for module in modules for item in module.__dict__.values() if isinstance(item, torch.Tensor)]


_Tables = tuple[dict[str, Any], dict[str, Any], Any]


def _tables_of(module: nn.Module) -> _Tables:
    return dict(module._parameters), dict(module._buffers), module.__dict__.get("_flat_weights")


def _put_tables(module: nn.Module, tables: _Tables) -> None:
    for table, content in ((module._parameters, tables[0]), (module._buffers, tables[1])):
        table.clear()
        table.update(content)
    if tables[2] is not None:
        module.__dict__["_flat_weights"] = tables[2]


@contextlib.contextmanager
def _with_tables(modules: Sequence[nn.Module], tables: Sequence[_Tables]) -> Iterator[None]:
    """Let `modules` have the parameters and buffers that they had, in the body."""
    tables_now = [_tables_of(module) for module in modules]
    try:
        for module, table in zip(modules, tables, strict=True):
            _put_tables(module, table)
        yield
    finally:
        for module, table in zip(modules, tables_now, strict=True):
            _put_tables(module, table)
