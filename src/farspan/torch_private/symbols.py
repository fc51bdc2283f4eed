"""Symbols for whole numbers, in runs on fake tensors that stand for many sizes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from farspan.locks import Lock

__all__ = ["SYMBOLS", "Symbols", "hint_of", "product", "quotient", "units_of", "without_assumptions"]

SYMBOLS = Lock("symbols for sizes")
"""Held while symbols are in use: sympy makes its constants at their first use, which is not safe among threads."""


class Symbols:
    """Symbols that stand for whole numbers in a run on fakes, and what the run has assumed of them."""

    def __init__(self) -> None:
        from torch.fx.experimental.symbolic_shapes import ShapeEnv  # half a second

        self.environment: Any = ShapeEnv()
        self._made: list[tuple[Any, int]] = []

    def make(self, number: int, *, is_size: bool) -> Any:
        """Something that counts as `number` and stands for others; sizes of 0 and 1 stand for themselves only."""
        from torch._dynamo.source import ConstantSource
        from torch.fx.experimental.symbolic_shapes import DimDynamic

        source = ConstantSource(f"number{len(self._made)}")
        make = self.environment.create_symbol if is_size else self.environment.create_unspecified_symbol
        symbol = make(number, source, DimDynamic.DYNAMIC)
        self._made.append((symbol, number))
        return self.environment.create_symintnode(symbol, hint=number, source=source)

    def function_of(self, results: list[Any]) -> Callable[[list[int]], tuple[int, ...] | None]:
        """Returns how `results` (numbers, or computed from symbols) follow from other numbers.

        Returns:
            A function of the numbers for all symbols in the order of their making; it gives None where what the run
            has assumed does not hold.

        Raises:
            ValueError: They depend on data.
        """
        import sympy
        from torch.utils._sympy.printers import PythonPrinter

        write = PythonPrinter().doprint
        env, inputs = self.environment, {symbol for symbol, _ in self._made if isinstance(symbol, sympy.Symbol)}
        expressions = [item.node.expr if isinstance(item, torch.SymInt) else sympy.Integer(item) for item in results]
        assumed = [guard.expr for guard in env.guards]
        assumed += [sympy.Eq(symbol, other) for symbol, other in env.replacements.items()]
        for symbol in inputs:
            bounds = env.var_to_range[symbol]
            assumed += [symbol >= bounds.lower] if isinstance(bounds.lower, sympy.Integer) else []
            assumed += [symbol <= bounds.upper] if isinstance(bounds.upper, sympy.Integer) else []
        if env.deferred_runtime_asserts or any(item.free_symbols - inputs for item in (*expressions, *assumed)):
            raise ValueError("a number depends on data")
        names = ", ".join(str(symbol) if symbol in inputs else f"_{i}" for i, (symbol, _) in enumerate(self._made))
        tests = [f"({write(item)})" for item in assumed]
        tests += [f"_{i} == {number}" for i, (symbol, number) in enumerate(self._made) if symbol not in inputs]
        values = "".join(f"{write(item)}, " for item in expressions)
        text = f"lambda {names}: ({values}) if {' and '.join(tests) or True} else None"
        function = eval(text, {"math": math})
        return lambda numbers: function(*numbers)


def hint_of(size: Any) -> int:
    """Returns what a size is in the call that symbols were made for; nothing is assumed of it."""
    return int(size.node.hint) if isinstance(size, torch.SymInt) else int(size)


def without_assumptions(symbol: Any) -> AbstractContextManager[None]:
    """Let nothing that is asked about sizes in the body count as assumed: torch chooses among kernels there."""
    return symbol.node.shape_env.suppress_guards()


def units_of(size: Any, symbol: Any) -> Any:
    """Returns the factor of a symbol in a size: 0 if the size does not depend on it, -1 if it does in another way."""
    if not isinstance(size, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return 0
    unit = symbol.node.expr
    if unit not in size.node.expr.free_symbols:
        return 0
    found = quotient(size, symbol) if isinstance(size, torch.SymInt) else None
    return -1 if found is None or (not isinstance(found, int) and unit in found.free_symbols) else found


def quotient(one: Any, two: Any) -> Any:
    """Returns a whole number that `one` is `two` times, whatever their symbols stand for; None where there is none."""
    if isinstance(one, int) and isinstance(two, int):
        return one // two if two and one % two == 0 else None
    import sympy

    one, two = [item.node.expr if isinstance(item, torch.SymInt) else sympy.sympify(item) for item in (one, two)]
    if two == 0:
        return None
    found = sympy.expand(sympy.cancel(one / two))
    if not found.is_integer:
        return None
    return int(found) if found.is_Integer else found


def product(sizes: Sequence[Any]) -> Any:
    """Multiplies sizes, which may be symbols or expressions."""
    if all(isinstance(item, int) for item in sizes):
        return math.prod(sizes)
    import sympy

    return sympy.Mul(*[item.node.expr if isinstance(item, torch.SymInt) else sympy.sympify(item) for item in sizes])
