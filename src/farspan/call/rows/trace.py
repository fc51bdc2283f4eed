"""Following the rows of a batch through a whole model, forward and backward, without data.

The number of rows is a symbol. What the run has assumed of it (`if len(x) > 8`) must hold for the whole batch and for
its parts; then the same operations run for all of them, and rules say of each that it keeps rows apart.
"""

from __future__ import annotations

import contextlib
import inspect
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from farspan.call.autograd_reach import out_of_autograds_reach
from farspan.call.infer.predict import fake_like, fake_of, no_casts_left
from farspan.call.infer.symbolic import Numbers
from farspan.call.infer.watch import untouched_generators
from farspan.call.leaf import LeakError, Placed
from farspan.call.module_tables import Tables
from farspan.call.pytree.template import flatten, rebuild
from farspan.call.rows.follow import Follow, RowsError
from farspan.call.rows.layout import Layout, Mixed, Partial, Replicate, Shard
from farspan.call.rows.work import RowsWork
from farspan.call.side_effects.registered import Registered, torch_tables_kept
from farspan.call.surroundings.around import nothing_changed_around
from farspan.call.wire.users_line import place_now, place_of_error
from farspan.graph import Meta
from farspan.torch_private import (
    SYMBOLS,
    Symbols,
    call_without_compiling,
    compiling_nothing,
    on_fakes,
    silent_fakes,
    with_sizes_kept,
)
from farspan.torch_private.flags import transformation

if TYPE_CHECKING:
    from farspan.graph import Template

__all__ = ["SAME", "RowsApart", "follow_rows"]

SAME = -1
"""Stands in place of a dimension for a result that is the same for all parts of a batch, and to which no gradient
flows."""


@dataclass(frozen=True, slots=True)
class RowsApart:
    """The results of a model whose rows stay apart.

    Attributes:
        dims: Of each tensor that it returns the dimension along which the parts of a batch lie behind each other; None
            where it is the sum of what the parts give, `SAME` where all give the same.
        is_mean: Whether such a sum is a loss that is still to be divided by what the batch counts.
        is_random: Whether random numbers are drawn.
        precision: Of the least precise numbers that are computed: the difference of 1 and the next larger one.
        holds: Whether all that holds for other numbers of a call like this one: of rows, and those that vary.
        work: Of each operation of its forward and backward, and of adding up its gradients.
    """

    dims: tuple[int | None, ...]
    is_mean: bool
    is_random: bool
    precision: float
    holds: Callable[[Sequence[int]], bool]
    work: Sequence[RowsWork]


def follow_rows(
    module: nn.Module,
    placed: Sequence[Placed],
    numbers: Numbers,
    metas: Sequence[Meta],
    positions: Sequence[int],
    varying: Sequence[int],
    losses: frozenset[Any],
) -> RowsApart:
    """Call `module` without data, forward and backward, and follow the rows of the batch.

    Args:
        module: A model that trains.
        placed: Its parameters and buffers.
        numbers: Of its arguments.
        metas: Of the tensors among them.
        positions: Which tensors carry the batch, along their first dimension.
        varying: The places of those numbers that are to stand for others, too.
        losses: Functions whose mean over the rows is left to the caller: their sums are taken instead.

    Raises:
        RowsError: It is not certain that rows stay apart.
    """
    with SYMBOLS:
        symbols = Symbols()
        given: list[Any] = list(numbers.values)
        places = [numbers.place_of(metas, number) for number in positions]
        rows = symbols.make(given[places[0]], is_size=True)
        for place in places:
            given[place] = rows
        for place in varying:
            given[place] = symbols.make(numbers.values[place], is_size=place >= numbers.first_size)
        template, changed = numbers.with_others(metas, given)
        follow = Follow(rows, {id(item.tensor) for item in placed}, lambda: place_now(follow_rows.__code__))
        try:
            return _followed(module, placed, template, changed, positions, losses, symbols, follow)
        except Exception as error:  # whatever the model raises where sizes are symbols and there are no data
            raise _as_rows_error(follow.error or error) from error


def _as_rows_error(error: Exception) -> RowsError:
    if isinstance(error, (RowsError, LeakError)):
        what = str(error) if isinstance(error, RowsError) else error.what.rstrip(".")
    else:
        first = str(error).strip().splitlines()
        what = f"it cannot be followed without data ({type(error).__name__}: {first[0] if first else ''})"
    return RowsError(what + place_of_error(error))


def _followed(
    module: nn.Module,
    placed: Sequence[Placed],
    template: Template,
    metas: Sequence[Meta],
    positions: Sequence[int],
    losses: frozenset[Any],
    symbols: Symbols,
    follow: Follow,
) -> RowsApart:
    with (
        no_casts_left(),
        compiling_nothing(),
        torch.inference_mode(False),
        silent_fakes(),
        on_fakes(symbols=symbols),
        untouched_generators() as generators,
    ):
        given = [fake_like(meta) for meta in metas]
        for number, item in enumerate(given):
            follow.begin(item, Shard(0) if number in positions else Replicate())
        owned = [(item, fake_of(item)) for item in placed]
        for _, item in owned:
            follow.begin(item, Replicate())
        tables = Tables(module.modules(), {id(item.tensor) for item, _ in owned})
        if tables.slots:
            raise RowsError("tensors have been put in the place of its weights")
        with follow, with_sizes_kept(), tables.holding({id(item.tensor): fake for item, fake in owned}, []):
            outputs = _outputs(module, owned, template, given, follow, losses)
            _check_gradients(owned, given, positions, outputs, follow)
    if follow.error is not None:
        raise follow.error
    if generators.have_drawn:
        raise RowsError("it draws random numbers in Python")
    layouts = [follow.of(item) for item in outputs]
    sums = [item for item in layouts if isinstance(item, Partial)]
    if len({item.is_mean for item in sums}) > 1:
        raise RowsError("it returns sums and means of rows")
    dims = tuple(
        [item.dim if isinstance(item, Shard) else None if isinstance(item, Partial) else SAME for item in layouts]
    )
    is_random = follow.is_random or any(_drops_between_layers(part) for part in module.modules())
    is_mean = any(item.is_mean for item in sums)
    trained = [item for _, item in owned if item.requires_grad]
    added = (0.0, 0.0, 3.0 * sum(item.numel() * item.dtype.itemsize for item in trained))
    return RowsApart(dims, is_mean, is_random, follow.precision, _assumed(symbols), [*follow.work, added])


def _drops_between_layers(module: nn.Module) -> bool:
    """Returns whether it is an RNN that draws a mask between its layers, which torch's rules for symbols leave out."""
    return isinstance(module, nn.RNNBase) and module.training and module.num_layers > 1 and module.dropout > 0


def _outputs(
    module: nn.Module,
    owned: Sequence[tuple[Placed, torch.Tensor]],
    template: Template,
    given: Sequence[torch.Tensor],
    follow: Follow,
    losses: frozenset[Any],
) -> list[torch.Tensor]:
    """Returns the tensors that the model returns.

    Raises:
        RowsError: They are not made of the rows of the batch one by one.
    """
    modules = tuple(module.modules())
    args, kwargs = rebuild(template, given)
    with (
        nothing_changed_around(modules, must_copy=False),
        torch_tables_kept(modules),
        out_of_autograds_reach(),
        contextlib.redirect_stdout(io.StringIO()) as printed,
        Sums(losses, follow) as sums,
    ):
        registered = Registered(modules, "", {id(fake) for item, fake in owned if not item.is_parameter})
        result = call_without_compiling(module, *args, **kwargs)
        sums.check()
        if registered.check():
            raise RowsError("it replaces its buffers")
    after, tensors = flatten((args, kwargs))
    if after != template or len(tensors) != len(given) or any(a is not b for a, b in zip(tensors, given, strict=True)):
        raise RowsError("it changes the lists, dictionaries or objects that it is given")
    if printed.getvalue():
        raise RowsError("it prints")
    structure, outputs = flatten(result)
    if _holds_symbols(structure):
        raise RowsError("it returns a number that depends on the number of rows, or on other sizes")
    for item in outputs:
        layout = follow.of(item)
        is_sum = isinstance(layout, Partial) and not item.dim()
        is_same = isinstance(layout, Replicate) and not item.requires_grad
        if not is_sum and not is_same and not (isinstance(layout, Shard) and layout.outer == 1 and not layout.is_index):
            raise RowsError(_reason(layout, "what it returns"))
    return outputs


def _holds_symbols(part: Any) -> bool:
    """Returns whether plain values in a template depend on sizes."""
    if isinstance(part, tuple):
        return any(map(_holds_symbols, part))
    return isinstance(part, (torch.SymInt, torch.SymFloat, torch.SymBool))


def _check_gradients(
    owned: Sequence[tuple[Placed, torch.Tensor]],
    given: Sequence[torch.Tensor],
    positions: Sequence[int],
    outputs: Sequence[torch.Tensor],
    follow: Follow,
) -> None:
    """Raise unless the gradients of parameters are sums over the rows, and those of arguments the rows' own."""
    roots = [item for item in outputs if item.requires_grad]
    if not roots:
        raise RowsError("nothing that it returns requires grad")
    seeds: list[torch.Tensor] = []
    for item in roots:
        seed, layout = torch.empty_like(item).detach(), follow.of(item)
        follow.set(seed, layout if isinstance(layout, Shard) else Replicate())
        seeds.append(seed)
    wanted = [(item.name, fake, False) for item, fake in owned if fake.requires_grad]
    wanted += [("an argument", item, number in positions) for number, item in enumerate(given) if item.requires_grad]
    gradients = torch.autograd.grad(roots, [item for _, item, _ in wanted], seeds, allow_unused=True)
    for (name, _, is_batch), gradient in zip(wanted, gradients, strict=True):
        layout = Replicate(is_zero=True) if gradient is None else follow.of(gradient)
        if layout == Replicate(is_zero=True) or (layout == Shard(0) if is_batch else isinstance(layout, Partial)):
            continue
        raise RowsError(_reason(layout, f"the gradient of {name}"))


def _reason(layout: Layout, what: str) -> str:
    if isinstance(layout, Mixed):
        return f"the rows of a batch mix, or may mix, in {layout.why}{layout.where or ''}"
    return f"{what} does not follow the rows of the batch"


def _assumed(symbols: Symbols) -> Callable[[Sequence[int]], bool]:
    """Returns whether what was assumed of the symbols holds for other numbers."""
    try:
        holds = symbols.function_of([])
    except ValueError as error:
        raise RowsError("it makes tensors whose sizes depend on data") from error
    return lambda numbers: holds(list(numbers)) is not None


class Sums(TorchFunctionMode):
    """Losses inside a model: sums over the rows, in the place of means, which the caller divides.

    Args:
        losses: These functions.
        follow: Gets to know which tensors are such sums.
    """

    def __init__(self, losses: frozenset[Any], follow: Follow) -> None:
        super().__init__()
        self.losses = losses
        self.follow = follow
        self.num_losses = 0
        self.has_mean = False
        self.has_gradients = False

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == _SET_DATA:
            raise RowsError("it puts other data into a tensor")
        self.has_gradients |= func in _GRADIENTS
        if func not in self.losses:
            return func(*args, **(kwargs or {}))
        self.num_losses += 1
        if transformation() is not None:  # its tensors are not those that are followed
            return func(*args, **(kwargs or {}))
        bound = inspect.signature(func).bind(*args, **(kwargs or {}))
        bound.apply_defaults()
        given = bound.arguments
        is_weighted = given.get("weight") is not None  # what a mean is divided by is known for weights of classes only
        is_weighted &= func not in _BY_CLASS or given["target"].is_floating_point()
        if given["reduction"] != "mean" or given.get("size_average") is not None or is_weighted:
            return func(*args, **(kwargs or {}))
        given["reduction"] = "sum"
        total = func(*bound.args, **bound.kwargs)
        if self.follow.of(total) == Partial():
            self.has_mean = True
            self.follow.set(total, Partial(is_mean=True))
        return total

    def check(self) -> None:
        """Raise if the sum of a loss is used otherwise than as its mean, but for a factor."""
        if self.has_mean and self.num_losses > 1:
            raise RowsError("it makes several losses")
        if self.has_mean and self.has_gradients:
            raise RowsError("it takes the gradient of its own loss")


_SET_DATA: Any = torch.Tensor.data.__set__  # type: ignore[attr-defined]
_GRADIENTS = frozenset([torch.autograd.grad, torch.Tensor.backward, torch.autograd.backward])
_BY_CLASS = frozenset([F.cross_entropy, F.nll_loss])
