"""What torch's formulas say of a function is what a run on fakes says, for all that a rank wants to know of it."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from farspan.call.infer import fallbacks
from farspan.call.infer import predict as predictions
from farspan.call.infer.entry import Entry, meta_of
from farspan.call.infer.formulas import FORMULAS, device_of_formula
from farspan.call.modes import current_modes
from farspan.call.naming import name_of
from farspan.call.pytree.template import flatten_arguments

_NUM_DRAWN = 40
_PRODUCTS = ("__matmul__", "addmm", "bmm", "linear", "matmul", "mm", "mv")
_SHAPES = [(), (1,), (5,), (4, 6), (1, 6), (2, 3, 4), (2, 1, 4), (0, 3), (2, 3, 4, 5)]
_DTYPES = [torch.float32, torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool]

Drawn = tuple[tuple[Any, ...], dict[str, Any]]


def tensor_of(draw: random.Random, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> torch.Tensor:
    """Returns a tensor of that shape, with strides of many kinds, that may require grad."""
    dtype = draw.choice(_DTYPES) if dtype is None else dtype
    order = draw.sample(range(len(shape)), len(shape)) if draw.random() < 0.4 else range(len(shape))
    strides, step = [0] * len(shape), draw.choice((1, 1, 1, 2))
    for dim in reversed(order):
        strides[dim] = 0 if draw.random() < 0.05 else step
        step *= max(1, shape[dim])
    tensor = torch.empty_strided(shape, strides, dtype=dtype)
    return tensor.requires_grad_(dtype.is_floating_point and draw.random() < 0.5)


def arguments_of(draw: random.Random, name: str) -> Iterator[Drawn]:
    """Yields arguments for a function of that name; some of them are wrong for it."""
    while True:
        shape = draw.choice(_SHAPES)
        tensor = tensor_of(draw, shape)
        number: Any = draw.choice((0, 1, 2, -1, 0.5))
        dim = draw.randrange(-1, max(1, len(shape)))
        like = tensor_of(draw, draw.choice((shape, shape, shape[-1:], draw.choice(_SHAPES))))
        plain = [
            ((tensor,), {}),
            ((tensor, like), {}),
            ((tensor, number), {}),
            ((tensor, dim), {}),
            ((tensor, like, like), {}),
            ((tensor, like, number), {}),
            ((tensor, -1, 1), {}),
            ((tensor, dim), {"keepdim": True}),
            ((tensor, like), {"alpha": 2}),
            ((tensor, tuple(range(len(shape)))), {}),
            ((tensor, *reversed(range(len(shape)))), {}),
            ((tensor, (slice(None), None)), {}),
            ((tensor, dim, 0, 1), {}),
            ((tensor, shape[-1:]), {}),
            (([tensor, like],), {}),
            (([tensor, tensor], dim), {}),
            ((tensor, 1.0), {"dtype": torch.float64}),
            ((tensor, tensor_of(draw, (4, 6), torch.bool), 0.5), {}),
            ((tensor, dim, tensor_of(draw, shape, torch.int64)), {}),
            ((tensor_of(draw, shape, torch.bool), tensor, like), {}),
        ]
        rows, columns, inner = draw.choice((1, 3, 4)), draw.choice((2, 5)), draw.choice((1, 4))
        kind = draw.choice(_DTYPES[:4])
        batch = draw.choice(((), (2,), (2, 3)))
        products = [
            ((tensor_of(draw, (*batch, rows, inner), kind), tensor_of(draw, (inner, columns), kind)), {}),
            ((tensor_of(draw, (2, rows, inner), kind), tensor_of(draw, (2, inner, columns), kind)), {}),
            ((tensor_of(draw, (rows, inner), kind), tensor_of(draw, (inner,), kind)), {}),
            ((tensor_of(draw, (*batch, inner), kind), tensor_of(draw, (columns, inner), kind)), {}),
            (
                (
                    tensor_of(draw, (*batch, inner), kind),
                    tensor_of(draw, (columns, inner), kind),
                    tensor_of(draw, (columns,), kind),
                ),
                {},
            ),
            (
                (
                    tensor_of(draw, (columns,), kind),
                    tensor_of(draw, (rows, inner), kind),
                    tensor_of(draw, (inner, columns), kind),
                ),
                {},
            ),
        ]
        scores, targets = tensor_of(draw, (4, 6), kind), tensor_of(draw, (4,), torch.int64)
        norms = [
            ((scores, targets), {"reduction": draw.choice(("mean", "sum", "none"))}),
            ((scores, tensor_of(draw, (4, 6), kind)), {"reduction": draw.choice(("mean", "sum", "none"))}),
            ((tensor_of(draw, (2, 4, 6), kind), (6,), tensor_of(draw, (6,), kind), tensor_of(draw, (6,), kind)), {}),
            ((tensor_of(draw, (2, 4, 6), kind), 2), {}),
            ((targets, tensor_of(draw, (5, 3), kind)), {}),
            ((targets,), {"num_classes": 7}),
            ((scores, (1, 1)), {}),
        ]
        yield draw.choice(products if name in _PRODUCTS else [*plain, *norms])


def on_fakes(target: Any, template: Any, metas: Any, monkeypatch: pytest.MonkeyPatch) -> Entry:
    with monkeypatch.context() as patch:
        patch.setattr(predictions, "device_of_formula", lambda *_: None)
        return predictions.predict(target, template, metas, current_modes())


def differing(one: Entry, other: Entry) -> list[str]:
    names = [field.name for field in dataclasses.fields(Entry)]
    return [
        f"{name}: {getattr(one, name)} by formula, {getattr(other, name)} on fakes"
        for name in names
        if name != "draws" and getattr(one, name) != getattr(other, name)
    ]


def functions() -> list[Callable[..., Any]]:
    return sorted(FORMULAS, key=lambda function: (name_of(function), str(function)))


@pytest.mark.parametrize("part", range(4))
def test_a_formula_says_what_fakes_say(part: int, monkeypatch: pytest.MonkeyPatch) -> None:
    tried = 0
    for function in functions()[part::4]:
        draw = random.Random(name_of(function))
        several = arguments_of(draw, name_of(function).rpartition(".")[2])
        for _ in range(_NUM_DRAWN):
            args, kwargs = next(several)
            template, tensors = flatten_arguments(args, kwargs)
            metas = [meta_of(tensor) for tensor in tensors]
            device = device_of_formula(function, template, metas, current_modes())
            if device is None:
                continue
            try:
                found = predictions._by_formula(function, template, metas, current_modes(), device)
            except Exception:  # wrong arguments for it: fakes tell
                continue
            tried += 1
            wanted = on_fakes(function, template, metas, monkeypatch)
            assert differing(found, wanted) == [], f"{name_of(function)}{args} {kwargs}"
    assert tried > 350


def test_a_listed_function_goes_by_its_formula_and_others_do_not() -> None:
    x = torch.randn(4, 6)
    for function, is_by_formula in ((torch.Tensor.add, True), (F.dropout, False), (torch.nonzero, False)):
        template, tensors = flatten_arguments((x, x) if is_by_formula else (x,), {})
        metas = [meta_of(tensor) for tensor in tensors]
        assert (device_of_formula(function, template, metas, current_modes()) is not None) == is_by_formula
    with torch.autocast("cpu", dtype=torch.bfloat16):
        template, tensors = flatten_arguments((x, x), {})
        metas = [meta_of(tensor) for tensor in tensors]
        assert device_of_formula(torch.matmul, template, metas, current_modes()) is None


def test_a_wrong_call_raises_what_fakes_raise() -> None:
    template, tensors = flatten_arguments((torch.randn(4, 6), torch.randn(4, 6)), {})
    metas = [meta_of(tensor) for tensor in tensors]
    with pytest.raises(RuntimeError, match=r"a and b must have same reduction dim|shapes cannot be multiplied"):
        predictions.predict(torch.matmul, template, metas, current_modes())


def test_what_one_recorder_has_found_out_of_a_function_of_torchs_others_know(monkeypatch: pytest.MonkeyPatch) -> None:
    """A function of the program's, and one that draws, each recorder asks for itself."""
    found: list[Any] = []
    find_out = fallbacks._find_out

    def counting(target: Any, *args: Any) -> Any:
        found.append(target)
        return find_out(target, *args)

    def of_program(x: torch.Tensor) -> torch.Tensor:
        return x + 1

    monkeypatch.setattr(fallbacks, "_find_out", counting)
    x = torch.randn(3, 1013)
    template, tensors = flatten_arguments((x,), {})
    metas = [meta_of(tensor) for tensor in tensors]
    for _ in range(2):
        cache = fallbacks.MetadataCache(lambda function, *args: function(*args), ())
        for target in (torch.Tensor.exp, F.dropout, of_program):
            assert cache.lookup(target, template, metas, current_modes()).metas[0].shape == (3, 1013)
    assert found == [torch.Tensor.exp, F.dropout, of_program, F.dropout, of_program]
