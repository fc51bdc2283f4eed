"""The import table of the library (DESIGN.md, section 8), and the few rules on its form, enforced by reading its files.

cli > api > place > adapters, services > state > execute > comm > control > record > call > torch_private > profile
    > report, launch > devices > planner > program > plan > schedule > graph, cluster
    > documents, locks, settings, outputs, progress > errors, units

( > : may import)
"""

from __future__ import annotations

import ast
import functools
import graphlib
import os
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "src" / "farspan"

FLOORS = (
    {"__init__", "__main__"},
    {"cli"},
    {"api"},
    {"place"},
    {"adapters", "services"},
    {"state"},
    {"execute"},
    {"comm"},
    {"control"},
    {"record"},
    {"call"},
    {"torch_private"},
    {"profile"},
    {"report", "launch"},
    {"devices"},
    {"planner"},
    {"program"},
    {"plan"},
    {"schedule"},
    {"graph", "cluster"},
    {"documents", "locks", "settings", "outputs", "progress"},
    {"errors", "units"},
)
FLOOR_OF = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}
FORBIDDEN = {(room, "planner") for room in ("execute", "comm", "control", "record", "call")}
WITHOUT_TORCH = (
    {"control", "planner", "program", "schedule", "plan", "graph", "cluster", "report"} | FLOORS[-2] | FLOORS[-1]
)
TORCH_IN_FUNCTIONS = {"__init__", "__main__", "cli", "launch"}
PRIVATE_TORCH = PACKAGE / "torch_private"
MAX_LINES = 600


def test_each_room_imports_only_what_stands_below() -> None:
    problems: list[str] = []
    for file in sources():
        room = room_of(file)
        if room not in FLOOR_OF:
            problems.append(f"{show(file)}: {room} is not in the import table")
            continue
        for node, name in imports(file):
            other = room_named(name)
            if other is None or other == room:
                continue
            if other not in FLOOR_OF:
                problems.append(f"{show(file, node)}: {other} is not in the import table")
            elif FLOOR_OF[other] <= FLOOR_OF[room] or (room, other) in FORBIDDEN:
                problems.append(f"{show(file, node)}: {room} must not import {name}")
    assert not problems, "\n".join(problems)


def test_the_planning_half_and_the_start_up_do_not_import_torch() -> None:
    problems: list[str] = []
    for file in sources():
        room = room_of(file)
        if room in WITHOUT_TORCH or room in TORCH_IN_FUNCTIONS:
            in_functions = set[ast.AST]() if room in WITHOUT_TORCH else deferred(file)
            problems += [
                f"{show(file, node)}: {room} must not import {name}" + (" at module level" if in_functions else "")
                for node, name in imports(file)
                if name.split(".")[0] == "torch" and node not in in_functions
            ]
    assert not problems, "\n".join(problems)


def test_torch_is_not_loaded_by_way_of_another_module() -> None:
    rooms = WITHOUT_TORCH | TORCH_IN_FUNCTIONS - {"__main__"}
    modules = [module_of(file) for file in sources() if room_of(file) in rooms]
    program = "import importlib, sys\nfor name in sys.argv[1:]:\n    importlib.import_module(name)\n"
    program += "    if 'torch' in sys.modules:\n        sys.exit('torch is loaded by ' + name)\n"
    command = [sys.executable, "-c", program, *modules]
    environment = {**os.environ, "PYTHONPATH": str(PACKAGE.parent)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_no_circles_between_modules() -> None:
    """Inside rooms neither, and imports that are for the type checker alone count too."""
    modules = {module_of(file) for file in sources()}
    edges: dict[str, set[str]] = {}
    for file in sources():
        for _, name in imports(file):
            module = name if name in modules else name.rpartition(".")[0]
            if module in modules and module != module_of(file):
                edges.setdefault(module_of(file), set()).add(module)
    graphlib.TopologicalSorter(edges).prepare()  # raises CycleError, which shows the circle


def test_torch_names_that_are_private_are_used_in_one_folder_only() -> None:
    problems: list[str] = []
    for file in sources():
        if PRIVATE_TORCH in file.parents:
            continue
        names: dict[str, str] = {}  # what this file calls the parts of torch
        for node, name in imports(file):
            if name.split(".")[0] == "torch":
                if any(is_private(part) for part in name.split(".")):
                    problems.append(f"{show(file, node)}: {name}")
                names |= local_names(node)
        for node in ast.walk(tree_of(file)):
            if isinstance(node, ast.Attribute) and is_private(node.attr):
                path = dotted(node)
                if path and path.split(".")[0] in names:
                    problems.append(f"{show(file, node)}: {path}")
    assert not problems, f"these belong in {show(PRIVATE_TORCH)}:\n" + "\n".join(problems)


def test_every_module_says_what_it_is_for_and_what_it_offers() -> None:
    problems: list[str] = []
    for file in sources():
        if not ast.get_docstring(tree_of(file)):
            problems.append(f"{show(file)}: no docstring")
        if not any(is_all(node) for node in tree_of(file).body):
            problems.append(f"{show(file)}: no __all__")
    assert not problems, "\n".join(problems)


def test_files_stay_of_a_size() -> None:
    problems: list[str] = []
    for top in (PACKAGE, ROOT / "tests"):
        for file in top.rglob("*.py"):
            num_lines = len(file.read_text().splitlines())
            if num_lines > MAX_LINES:
                problems.append(f"{show(file)}: {num_lines} lines, more than {MAX_LINES}")
    assert not problems, "\n".join(problems)


def sources() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


@functools.cache
def tree_of(file: Path) -> ast.Module:
    with warnings.catch_warnings(action="ignore"):  # about escapes in strings: for ruff to say
        return ast.parse(file.read_text(), str(file))


def imports(file: Path) -> Iterator[tuple[ast.Import | ast.ImportFrom, str]]:
    """All imports of a file, those in functions too, each with the full dotted name of what it imports."""
    package = module_of(file.with_name("__init__.py")).split(".")
    for node in ast.walk(tree_of(file)):
        if isinstance(node, ast.Import):
            yield from ((node, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            prefix = ".".join([*base, *([node.module] if node.module else [])])
            yield from ((node, f"{prefix}.{alias.name}") for alias in node.names)


def deferred(file: Path) -> set[ast.AST]:
    """The imports that do not run when the module is imported: in functions, or for the type checker alone."""
    found: set[ast.AST] = set()
    for node in ast.walk(tree_of(file)):
        is_function = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        if is_function or (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)):
            found.update(ast.walk(node))
    return found


def room_of(file: Path) -> str:
    return file.relative_to(PACKAGE).with_suffix("").parts[0]


def room_named(name: str) -> str | None:
    """The room that a dotted name lies in; None if it is not of this library."""
    parts = name.split(".")
    if parts[0] != "farspan":
        return None
    known = len(parts) > 1 and (parts[1] in FLOOR_OF or path_of(".".join(parts[:2])).is_dir())
    return parts[1] if known else "__init__"


def module_of(file: Path) -> str:
    parts = file.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def path_of(module: str) -> Path:
    return PACKAGE.parent.joinpath(*module.split("."))


def local_names(node: ast.Import | ast.ImportFrom) -> dict[str, str]:
    if isinstance(node, ast.Import):
        found = [alias for alias in node.names if alias.name.split(".")[0] == "torch"]
        return {alias.asname or "torch": alias.name for alias in found}
    return {alias.asname or alias.name: alias.name for alias in node.names}


def dotted(node: ast.expr) -> str:
    """`a.b.c` of an attribute chain that starts at a name, else an empty string."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        start = dotted(node.value)
        return f"{start}.{node.attr}" if start else ""
    return ""


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__")


def is_all(node: ast.stmt) -> bool:
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return any(isinstance(target, ast.Name) and target.id == "__all__" for target in targets)


def show(file: Path, node: ast.AST | None = None) -> str:
    return f"{file.relative_to(ROOT)}" + (f":{getattr(node, 'lineno', '?')}" if node else "")
