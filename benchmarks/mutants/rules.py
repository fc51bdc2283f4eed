"""The kinds of faults: each rule turns an expression or a statement into a wrong one, where it applies.

A rule of an expression is given a node of its own (a copy), and the name of the field of its parent that it is in; it
returns the wrong expression, or None. A rule of a statement says whether the statement can be left out.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping
from dataclasses import dataclass

__all__ = ["OF_EXPRESSIONS", "OF_STATEMENTS", "Place", "is_log"]

_OPPOSITE: Mapping[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
_ORDERS = (ast.Lt, ast.LtE, ast.Gt, ast.GtE)
_LOGS = frozenset({"_log", "log", "logger", "_logger", "logging", "warnings"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a node is."""

    parent: type[ast.AST]
    field: str
    function: str


def _condition_turned(node: ast.expr, place: Place) -> ast.expr | None:
    if place.field != "test" or isinstance(node, ast.Constant):
        return None
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and not isinstance(node.ops[0], _ORDERS):
        return None  # the comparison changed is the same
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        return node.operand
    return ast.UnaryOp(ast.Not(), node)


def _comparison_changed(node: ast.expr, place: Place) -> ast.expr | None:
    if not isinstance(node, ast.Compare) or len(node.ops) != 1:
        return None
    return ast.Compare(node.left, [_OPPOSITE[type(node.ops[0])]()], node.comparators)


def _and_or(node: ast.expr, place: Place) -> ast.expr | None:
    if not isinstance(node, ast.BoolOp):
        return None
    return ast.BoolOp(ast.Or() if isinstance(node.op, ast.And) else ast.And(), node.values)


def _order_reversed(node: ast.expr, place: Place) -> ast.expr | None:
    if place.parent is ast.For and place.field == "iter":
        return _call("reversed", _call("list", node))
    if _is_call_of(node, "sorted") and isinstance(node, ast.Call) and node.args:
        backwards = ast.Slice(step=ast.UnaryOp(ast.USub(), ast.Constant(1)))
        return ast.Subscript(_call("list", node.args[0]), backwards, ast.Load())
    return None


def _arguments_swapped(node: ast.expr, place: Place) -> ast.expr | None:
    if not isinstance(node, ast.Call) or len(node.args) < 2:
        return None
    first, second = node.args[:2]
    if not (isinstance(first, ast.Name) and isinstance(second, ast.Name)) or first.id == second.id:
        return None
    if _is_call_of(node, "isinstance", "issubclass", "cast", "min", "max"):
        return None  # an error at once, or the same
    return ast.Call(node.func, [second, first, *node.args[2:]], node.keywords)


def _copy_left_out(node: ast.expr, place: Place) -> ast.expr | None:
    if not isinstance(node, ast.Call) or node.keywords:
        return None
    function, arguments = node.func, node.args
    if isinstance(function, ast.Attribute):
        if function.attr in ("clone", "detach", "copy") and not arguments:
            return function.value
        is_copy = function.attr == "copy" and isinstance(function.value, ast.Name) and function.value.id == "copy"
        return arguments[0] if is_copy and len(arguments) == 1 else None
    if not _is_call_of(node, "list", "dict", "tuple") or len(arguments) != 1:
        return None
    return None if isinstance(arguments[0], ast.GeneratorExp | ast.Starred) else arguments[0]


def _constant_plus_one(node: ast.expr, place: Place) -> ast.expr | None:
    if not isinstance(node, ast.Constant) or type(node.value) is not int:
        return None
    return ast.Constant(node.value + 1)


def _plus_minus(node: ast.expr, place: Place) -> ast.expr | None:
    if not isinstance(node, ast.BinOp) or not isinstance(node.op, ast.Add | ast.Sub):
        return None
    sides = (node.left, node.right)
    if any(isinstance(side, ast.JoinedStr | ast.List | ast.Tuple | ast.ListComp) for side in sides):
        return None  # an error at once
    if any(isinstance(side, ast.Constant) and isinstance(side.value, str | bytes) for side in sides):
        return None
    return ast.BinOp(node.left, ast.Sub() if isinstance(node.op, ast.Add) else ast.Add(), node.right)


def _min_max(node: ast.expr, place: Place) -> ast.expr | None:
    if not isinstance(node, ast.Call) or not _is_call_of(node, "min", "max") or not isinstance(node.func, ast.Name):
        return None
    return ast.Call(ast.Name("max" if node.func.id == "min" else "min", ast.Load()), node.args, node.keywords)


def _returned_flag_turned(node: ast.expr, place: Place) -> ast.expr | None:
    if place.parent is not ast.Return or not isinstance(node, ast.Constant) or not isinstance(node.value, bool):
        return None
    return ast.Constant(not node.value)


def _call_left_out(node: ast.stmt, place: Place) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and not is_log(node)


def _assignment_left_out(node: ast.stmt, place: Place) -> bool:
    if isinstance(node, ast.AugAssign):
        return True
    if place.function == "__init__" or not isinstance(node, ast.Assign) or len(node.targets) != 1:
        return False
    target = node.targets[0]
    return isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name) and target.value.id == "self"


OF_EXPRESSIONS: Mapping[str, Callable[[ast.expr, Place], ast.expr | None]] = {
    "condition turned": _condition_turned,
    "comparison changed": _comparison_changed,
    "and for or": _and_or,
    "order reversed": _order_reversed,
    "arguments swapped": _arguments_swapped,
    "copy left out": _copy_left_out,
    "constant plus one": _constant_plus_one,
    "plus for minus": _plus_minus,
    "min for max": _min_max,
    "returned flag turned": _returned_flag_turned,
}
OF_STATEMENTS: Mapping[str, Callable[[ast.stmt, Place], bool]] = {
    "call left out": _call_left_out,
    "assignment left out": _assignment_left_out,
}


def is_log(node: ast.stmt) -> bool:
    """Returns whether a statement only logs or warns."""
    if not isinstance(node, ast.Expr) or not isinstance(node.value, ast.Call):
        return False
    function = node.value.func
    return isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name) and function.value.id in _LOGS


def _call(name: str, *arguments: ast.expr) -> ast.Call:
    return ast.Call(ast.Name(name, ast.Load()), list(arguments), [])


def _is_call_of(node: ast.expr, *names: str) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in names
