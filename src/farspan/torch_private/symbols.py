"""Symbols for whole numbers, in runs on fake tensors that stand for many sizes."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from farspan.locks import Lock

__all__ = ["SYMBOLS", "Symbols"]

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
        """What `results` (numbers, or what has been computed from symbols) are for other numbers.

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
