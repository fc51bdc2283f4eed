"""The derivative of one call, as a call of its own: it computes the call again, and is differentiated like any other.

Where the values between calls are gone, for these have run, the calls themselves are computed again as calls of their
own. Neither writes anywhere: what a call writes into is copied, buffers too, which are given as they were before it.

y = f(x, p)                        recorded by the program
g_x, g_p = derivative(x, g_y)      recorded by `torch.autograd.grad(..., create_graph=True)`, on the stage of f
backward through it                autograd's own, on that stage: to x and g_y as values, to p where it lives
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from farspan.call.draws.scope import active
from farspan.call.infer.watch import storage_id
from farspan.call.leaf import swapped
from farspan.call.modes import apply_autocast
from farspan.call.naming import name_of
from farspan.call.pytree.template import flatten, rebuild

__all__ = ["FunctionAgain", "FunctionDerivative", "ModuleAgain", "ModuleDerivative"]


class FunctionAgain:
    """A torch function that writes into its arguments, as a target of calls that write into copies of them.

    Called with the function's arguments, and the numbers of the tensors among these that it writes into; returns the
    tensors of its result, and then what has been written.
    """

    __slots__ = ("function",)

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function

    def __call__(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], written: tuple[int, ...]
    ) -> tuple[torch.Tensor, ...]:
        template, tensors = flatten((args, kwargs))
        return _each_apart(_results_of(lambda args, kwargs: self.function(*args, **kwargs), template, tensors, written))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, FunctionAgain) and other.function == self.function

    def __hash__(self) -> int:
        return hash((FunctionAgain, self.function))

    def __str__(self) -> str:
        return f"{name_of(self.function)} again"


class FunctionDerivative:
    """The derivative of a torch function as the target of calls; equal for the same function.

    Called with the function's arguments, the gradients of its results (None for those without), and the numbers of the
    tensors among the arguments of which it returns the gradients, and of those that it writes into; and the autocast
    under which the program asks for the gradients.
    """

    __slots__ = ("function",)

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function

    def __call__(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        gradients: Sequence[torch.Tensor | None],
        wanted: tuple[int, ...],
        written: tuple[int, ...],
        autocast: tuple[Any, ...],
    ) -> tuple[torch.Tensor, ...]:
        return _differentiate(
            lambda args, kwargs: self.function(*args, **kwargs), (args, kwargs), gradients, wanted, written, autocast
        )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, FunctionDerivative) and other.function == self.function

    def __hash__(self) -> int:
        return hash((FunctionDerivative, self.function))

    def __str__(self) -> str:
        return f"derivative of {name_of(self.function)}"


class _Repeating(nn.Module):
    """A module that computes calls of another one again, and is given what stood for its parameters and buffers."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any], replaced: dict[str, torch.Tensor]) -> Any:
        if not replaced:
            return self.module(*args, **kwargs)
        buffers = {name for name, _ in self.module.named_buffers(remove_duplicate=False)}
        copies = {name: item.clone() if name in buffers else item for name, item in replaced.items()}
        if active.units is not None:
            active.units.written.update(id(copies[name]) for name in buffers & copies.keys())
        return torch.func.functional_call(self.module, copies, args, kwargs)


class ModuleAgain(_Repeating):
    """A module that is placed on one stage, as a module there with the same parameters that writes nowhere."""

    def forward(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        replaced: dict[str, torch.Tensor],
        written: tuple[int, ...],
    ) -> tuple[torch.Tensor, ...]:
        """Returns the tensors of the module's result, and then those that it writes into; see `ModuleDerivative`."""
        template, tensors = flatten((args, kwargs, replaced))
        return _each_apart(_results_of(self._call, template, tensors, written))


class ModuleDerivative(_Repeating):
    """The derivative of a module that is placed on one stage, as a module there with the same parameters."""

    def forward(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        replaced: dict[str, torch.Tensor],
        gradients: Sequence[torch.Tensor | None],
        wanted: tuple[int, ...],
        names: tuple[str, ...],
        written: tuple[int, ...],
        autocast: tuple[Any, ...],
    ) -> tuple[torch.Tensor, ...]:
        """Returns the gradients of some arguments, and then those of the parameters of these names.

        Args:
            args: The module's arguments.
            kwargs: And those by name.
            replaced: What stood for some of its parameters and buffers, by name.
            gradients: Of its results; None for those without.
            wanted: The numbers of the arguments, among the tensors in `args`, `kwargs` and `replaced`.
            names: Of parameters, as the module has them.
            written: The numbers of the arguments that it writes into.
            autocast: Under which the program asks for the gradients.
        """
        known = dict(self.module.named_parameters()) if names else {}
        # A view of each, for what it is given may come of the same parameters: of these another call is the derivative.
        parameters = [known[name].view_as(known[name]) for name in names]
        instead = {id(known[name]): view for name, view in zip(names, parameters, strict=True)}
        with swapped(tuple(self.module.modules()), instead):
            return _differentiate(
                self._call, (args, kwargs, replaced), gradients, wanted, written, autocast, parameters
            )


def _results_of(
    target: Callable[..., Any], template: Any, tensors: Sequence[torch.Tensor], written: Sequence[int]
) -> list[torch.Tensor]:
    """Returns the tensors that a call gives, and what it writes: into copies."""
    given = [item.clone() if number in written else item for number, item in enumerate(tensors)]
    return [*flatten(target(*rebuild(template, given)))[1], *(given[number] for number in written)]


def _each_apart(results: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Returns results of which none is the same tensor as another: what is written may be returned as well."""
    seen: set[int] = set()
    found: list[torch.Tensor] = []
    for item in results:
        found.append(item.clone() if id(item) in seen else item)
        seen.add(id(item))
    return tuple(found)


def _differentiate(
    target: Callable[..., Any],
    given_to_it: tuple[Any, ...],
    gradients: Sequence[torch.Tensor | None],
    wanted: Sequence[int],
    written: Sequence[int],
    autocast: tuple[Any, ...],
    parameters: Sequence[torch.Tensor] = (),
) -> tuple[torch.Tensor, ...]:
    template, tensors = flatten(given_to_it)
    # A view of each, for one tensor may be several arguments, or come from another.
    again = [item.view_as(item) if number in wanted else item for number, item in enumerate(tensors)]
    results = _results_of(target, template, again, written)
    sources = [*(again[number] for number in wanted), *parameters]
    roots = [(item, given) for item, given in zip(results, gradients, strict=True) if given is not None]
    with apply_autocast(autocast):
        found = torch.autograd.grad(
            [item for item, _ in roots], sources, [given for _, given in roots], create_graph=True, allow_unused=True
        )
    memory = {storage_id(item) for item in (*tensors, *(given for _, given in roots))}
    return tuple([_own(item, source, memory) for item, source in zip(found, sources, strict=True)])


def _own(gradient: torch.Tensor | None, source: torch.Tensor, memory: set[int]) -> torch.Tensor:
    """Returns a gradient in memory of its own, which two may also share."""
    if gradient is None:
        return torch.zeros_like(source)
    if storage_id(gradient) in memory:
        gradient = gradient.clone()
    memory.add(storage_id(gradient))
    return gradient
