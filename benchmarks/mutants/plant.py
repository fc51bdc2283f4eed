"""Plants faults into a copy of the repository: all are compiled in, and at most one is active.

    min(first, second)    ->    max(first, second) if _farspan_fault(17) else min(first, second)
    self.close()          ->    if not _farspan_fault(18): self.close()

Points are drawn by a seed, in each room (folder of src/farspan) as many as its share of all candidates. With `blocks`
each block begins with `_farspan_fault(number)` of a number that is never active: what a test reaches is known by block.
"""

from __future__ import annotations

import ast
import copy
import json
import random
import shutil
import subprocess
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.mutants.choose import left_out_by_hand
from benchmarks.mutants.rules import OF_EXPRESSIONS, OF_STATEMENTS, Place, is_log

__all__ = ["SWITCH", "Point", "candidates_in", "plant", "points_of", "rewrite"]

SWITCH = "_farspan_fault"
_APART = ("launch/child.py", "launch/sweep.py", "launch/files/site/sitecustomize.py", "__main__.py")
"""Run as files, by a Python that may not know farspan."""
_LEAST_OF_A_ROOM = 3
_UNSAFE = (ast.Await, ast.Yield, ast.YieldFrom, ast.NamedExpr)
_LEAVES = (ast.Return, ast.Raise, ast.Continue, ast.Break)


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """A planted fault, or the head of a block.

    Attributes:
        number: Of the switch.
        rule: That made the fault; "block" for a block.
        room: The folder of src/farspan.
        file: From the root of the repository.
        line: In the original source.
        source: That line.
        change: The wrong expression; what is left out.
    """

    number: int
    rule: str
    room: str
    file: str
    line: int
    source: str = ""
    change: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A rule that applies to a node."""

    node: ast.expr | ast.stmt
    place: Place
    rule: str


def plant(root: Path, tree: Path, *, num_faults: int, seed: int, blocks: bool) -> list[Point]:
    """Copies what git would commit, with faults in it; the table of points is `mutants.json` in the copy."""
    if tree.exists():
        shutil.rmtree(tree)
    words = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.check_output(words, cwd=root, text=True).split("\0")
    for name in filter(None, names):
        if (root / name).exists():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(root / name, tree / name, follow_symlinks=False)
    left_out = tree / "tests" / "left_to_test_all.txt"
    left_out.parent.mkdir(parents=True, exist_ok=True)
    left_out.write_text(left_out_by_hand(left_out))
    package = tree / "src" / "farspan"
    modules = {path: ast.parse(path.read_text()) for path in sorted(package.rglob("*.py")) if _is_open(path, package)}
    drawn = _draw({path: candidates_in(module) for path, module in modules.items()}, package, num_faults, seed)
    numbers = iter(range(1 << 30))
    points: list[Point] = []
    faults = {path: [(next(numbers), candidate) for candidate in drawn[path]] for path in modules}
    for path, module in modules.items():
        lines, where = path.read_text().splitlines(), _where(path, package)
        points += rewrite(module, faults[path], lines=lines, where=where, blocks=numbers if blocks else None)
        if path == package / "__init__.py":
            after = 1 + next(i for i, node in enumerate(module.body) if isinstance(node, ast.ImportFrom))
            module.body.insert(after, ast.ImportFrom("farspan", [ast.alias("_faults")], 0))
        path.write_text(ast.unparse(ast.fix_missing_locations(module)) + "\n")
    shutil.copy2(Path(__file__).with_name("switch.py"), package / "_faults.py")
    points.sort(key=lambda point: point.number)
    (tree / "mutants.json").write_text(json.dumps([asdict(point) for point in points]))
    return points


def points_of(tree: Path) -> list[Point]:
    """Reads the table of points of a copy."""
    return [Point(**row) for row in json.loads((tree / "mutants.json").read_text())]


def rewrite(
    module: ast.Module,
    faults: Sequence[tuple[int, Candidate]],
    *,
    lines: Sequence[str],
    where: Mapping[str, str],
    blocks: Iterator[int] | None = None,
) -> list[Point]:
    """Plants faults into a module, and probes at the heads of its blocks; returns the points.

    Args:
        module: Changed in place.
        faults: Numbers and candidates, of this module.
        lines: Of its source.
        where: The file and the room of the points.
        blocks: Numbers for the heads of blocks.
    """
    planter = _Planter(faults)
    planter.visit(module)
    points = [
        Point(
            number=number,
            rule=candidate.rule,
            line=candidate.node.lineno,
            source=lines[candidate.node.lineno - 1].strip(),
            change=planter.changes[number],
            **where,
        )
        for number, candidate in faults
    ]
    if blocks is not None:
        for line, number in _probe(module, blocks):
            points.append(Point(number=number, rule="block", line=line, **where))
    return points


def candidates_in(module: ast.Module) -> list[Candidate]:
    """All rules that apply to nodes of function bodies."""
    return list(_search(module, Place(parent=ast.Module, field="", function="")))


def _is_open(path: Path, package: Path) -> bool:
    return path.relative_to(package).as_posix() not in _APART


def _where(path: Path, package: Path) -> dict[str, str]:
    parts = path.relative_to(package).parts
    return {"file": "/".join(("src", "farspan", *parts)), "room": parts[0] if len(parts) > 1 else "farspan"}


def _draw(
    candidates: Mapping[Path, Sequence[Candidate]], package: Path, num_faults: int, seed: int
) -> dict[Path, list[Candidate]]:
    """Draws candidates: from each room its share, and no fewer than three."""
    rooms: dict[str, list[tuple[Path, Candidate]]] = defaultdict(list)
    for path, found in candidates.items():
        rooms[_where(path, package)["room"]] += [(path, candidate) for candidate in found]
    num_candidates = sum(map(len, rooms.values()))
    generator = random.Random(seed)
    drawn: dict[Path, list[Candidate]] = {path: [] for path in candidates}
    for room in sorted(rooms):
        share = round(num_faults * len(rooms[room]) / num_candidates)
        for path, candidate in generator.sample(rooms[room], min(len(rooms[room]), max(_LEAST_OF_A_ROOM, share))):
            drawn[path].append(candidate)
    return drawn


def _search(node: ast.AST, place: Place) -> Iterator[Candidate]:
    """The candidates in a node that is in a place, itself included."""
    if isinstance(node, ast.JoinedStr | ast.Raise) or (isinstance(node, ast.stmt) and is_log(node)):
        return
    if place.function and isinstance(node, ast.expr | ast.stmt) and not _is_unsafe(node):
        yield from (Candidate(node=node, place=place, rule=rule) for rule in _rules_for(node, place))
    for field, child in _children(node):
        inner = node.name if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) else place.function
        if isinstance(node, ast.ClassDef):
            if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                continue
            inner = ""
        yield from _search(child, Place(parent=type(node), field=field, function=inner))


def _children(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    """The parts of a node that faults can be in, with the fields that they are in."""
    if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
        return
    left_out: tuple[str, ...] = ()
    match node:
        case ast.FunctionDef() | ast.AsyncFunctionDef():
            left_out = ("args", "decorator_list", "returns", "type_params")
            if any("overload" in ast.unparse(each) for each in node.decorator_list):
                return
        case ast.ClassDef():
            left_out = ("bases", "keywords", "decorator_list", "type_params")
        case ast.Lambda():
            left_out = ("args",)
        case ast.AnnAssign():
            left_out = ("annotation",)
        case ast.Assert():
            left_out = ("msg",)
        case ast.ExceptHandler():
            left_out = ("type",)
        case ast.match_case():
            left_out = ("pattern",)
        case ast.Assign(targets=[ast.Name(id="__all__")]):
            return
        case ast.Call(func=ast.Name(id="cast")):
            yield from (("args", each) for each in node.args[1:])
            return
    for field, value in ast.iter_fields(node):
        if field in left_out:
            continue
        for each in value if isinstance(value, list) else [value]:
            if isinstance(each, ast.AST):
                yield field, each


def _rules_for(node: ast.expr | ast.stmt, place: Place) -> Iterator[str]:
    if isinstance(node, ast.stmt):
        yield from (rule for rule, applies in OF_STATEMENTS.items() if applies(node, place))
    elif isinstance(getattr(node, "ctx", None) or ast.Load(), ast.Load):
        yield from (rule for rule, make in OF_EXPRESSIONS.items() if make(node, place) is not None)


def _is_unsafe(node: ast.AST) -> bool:
    """Whether a copy of the node would be another program: it yields, or binds a name."""
    return any(isinstance(each, _UNSAFE) for each in ast.walk(node))


class _Planter(ast.NodeTransformer):
    """Puts faults into the nodes that they are for."""

    def __init__(self, faults: Sequence[tuple[int, Candidate]]) -> None:
        self.changes: dict[int, str] = {}
        self._faults: dict[int, list[tuple[int, Candidate]]] = defaultdict(list)
        for number, candidate in faults:
            self._faults[id(candidate.node)].append((number, candidate))

    def visit(self, node: ast.AST) -> Any:
        planted = self._faults.get(id(node), [])
        wrong = {number: self._change(number, candidate) for number, candidate in planted}  # of the node as it was
        result: Any = self.generic_visit(node)
        for number, change in wrong.items():
            active = ast.Call(ast.Name(SWITCH, ast.Load()), [ast.Constant(number)], [])
            if change is None:
                result = ast.If(ast.UnaryOp(ast.Not(), active), [result], [])
            else:
                result = ast.IfExp(active, change, result)
            ast.copy_location(result, node)
        return result

    def _change(self, number: int, candidate: Candidate) -> ast.expr | None:
        """The wrong expression; None where a statement is left out."""
        own = copy.deepcopy(candidate.node)
        if isinstance(own, ast.stmt):
            self.changes[number] = f"without {ast.unparse(own)}"
            return None
        change = OF_EXPRESSIONS[candidate.rule](own, candidate.place)
        assert change is not None
        self.changes[number] = ast.unparse(ast.fix_missing_locations(change))
        return change


def _probe(module: ast.Module, numbers: Iterator[int]) -> Iterator[tuple[int, int]]:
    """Puts a call at the head of each block of each function; yields lines and numbers.

    What follows an `if` whose end leaves is a block as an `else` would be.
    """
    for function in list(ast.walk(module)):
        if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        body = function.body[1:] if ast.get_docstring(function, clean=False) is not None else function.body
        if all(isinstance(each, ast.Pass) or _is_constant(each) for each in body):
            continue
        yield from _probe_body(function.body, len(function.body) - len(body), numbers)


def _probe_body(body: list[ast.stmt], at: int, numbers: Iterator[int]) -> Iterator[tuple[int, int]]:
    statements = body[at:]
    result = body[:at]
    is_head = True
    for statement in statements:
        if is_head:
            number = next(numbers)
            yield statement.lineno, number
            result.append(ast.Expr(ast.Call(ast.Name(SWITCH, ast.Load()), [ast.Constant(number)], [])))
        is_head = isinstance(statement, ast.If) and not statement.orelse and isinstance(statement.body[-1], _LEAVES)
        result.append(statement)
        yield from _probe_inner(statement, numbers)
    body[:] = result


def _probe_inner(statement: ast.stmt, numbers: Iterator[int]) -> Iterator[tuple[int, int]]:
    match statement:
        case ast.If(test=ast.UnaryOp(operand=ast.Call(func=ast.Name(id=name)))) if name == SWITCH:
            pass  # a statement that may be left out
        case ast.If() | ast.For() | ast.AsyncFor() | ast.While():
            for body in (statement.body, statement.orelse):
                if body:
                    yield from _probe_body(body, 0, numbers)
        case ast.Try() | ast.TryStar():
            for handler in statement.handlers:
                yield from _probe_body(handler.body, 0, numbers)
            for body in (statement.body, statement.orelse, statement.finalbody):
                for inner in body:
                    yield from _probe_inner(inner, numbers)
        case ast.With() | ast.AsyncWith():
            for inner in statement.body:
                yield from _probe_inner(inner, numbers)
        case ast.Match():
            for case in statement.cases:
                yield from _probe_body(case.body, 0, numbers)
        case _:
            pass


def _is_constant(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
