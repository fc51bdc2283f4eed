"""Draws a model, and writes it as text: blocks, what holds them, cells with state, input, head and results.

blocks   a tree: {"kind": "Residual", "parts": [{"kind": "Layer", "parts": []}]}
reuse    numbers of blocks that are called once more, after the last
cells    kinds of cells whose state the loop carries from micro-batch to micro-batch
"""

from __future__ import annotations

import ast
import functools
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
DEPTH = 2
RARE = (
    *("Slow", "Printing", "Spectral", "Experts", "LongShort", "ClassCount", "KeptNumbers", "Encoder", "Reentrant"),
    "Solver",
)
DRAWING = ("Dropped", "Noise", "OwnGenerator")
"""Kinds that draw random numbers."""
CALLED = (
    ("OwnFunction", "Doubled"), ("Configured", "Gain"), ("Logged", "Logs"), ("Noted", "Notes"), ("Solver", "Adjoint"),
    ("BufferSolver", "Adjoint"),
)  # fmt: skip
"""Kinds whose text needs another one's."""
WEIGHTLESS = ("Activation", "Dropped", "Noise", "Slow")
REPEATING = ("Crossed", "Twice", "Tied", "Unrolled")
"""Kinds that use a weight several times."""
BATCH_WIDE = ("BatchNorm",)
HOLDERS = ("list", "sequential", "dict", "own")
CELLS = {"GRUCell": 1, "RNNCell": 1, "LSTMCell": 2}
"""How many tensors the state of each kind has."""

Node = dict[str, Any]


@functools.cache
def kinds() -> dict[str, tuple[str, int]]:
    """The text of each class of parts.py and stateful.py, and how many blocks its constructor takes (-1: no block)."""
    found: dict[str, tuple[str, int]] = {}
    for name in ("parts.py", "stateful.py"):
        text = (HERE / name).read_text()
        for item in ast.parse(text).body:
            if isinstance(item, ast.ClassDef):
                makers = [part for part in item.body if isinstance(part, ast.FunctionDef) and part.name == "__init__"]
                is_block = "Function" not in ast.unparse(item.bases[0])
                number = len(makers[0].args.args) - 1 if makers else 0
                found[item.name] = (ast.get_source_segment(text, item) or "", number if is_block else -1)
    return found


def draw_node(rng: random.Random, depth: int = DEPTH) -> Node:
    names = [name for name, (_, number) in kinds().items() if 0 <= number <= (2 if depth else 0)]
    kind = rng.choice(names)
    if kind in RARE and rng.random() < 0.6:
        kind = "Layer"
    return {"kind": kind, "parts": [draw_node(rng, depth - 1) for _ in range(max(0, kinds()[kind][1]))]}


def draw_model(rng: random.Random) -> dict[str, Any]:
    """A model of two to six blocks."""
    blocks = [draw_node(rng) for _ in range(rng.choice((0, 1, 2, 3, 3, 4, 5)))]
    blocks.insert(rng.randrange(len(blocks) + 1), {"kind": "Layer", "parts": []})
    return {
        "blocks": blocks,
        "reuse": [rng.randrange(len(blocks))] if rng.random() < 0.35 else [],
        "skip": rng.random() < 0.2,
        "ties": rng.random() < 0.2,
        "time": rng.choice((1, 3)),
        "holder": rng.choice(HOLDERS),
        "cells": [rng.choice(sorted(CELLS)) for _ in range(rng.choice((1, 2, 2)))] if rng.random() < 0.25 else [],
        "state": rng.choice(("tuple", "list", "dict")),
        "cells at": rng.choice(("join", "end", "start")),
        "input": rng.choice(("floats", "ids")),
        "head": rng.choice(("linear", "tied", "bare")),
        "head at": rng.choice(("last", "last", "first")),
        "result": rng.choice(("tensor", "tensor", "pair", "dict")),
    }


def nodes_of(nodes: list[Node]) -> Iterator[Node]:
    """All nodes of trees."""
    for node in nodes:
        yield node
        yield from nodes_of(node["parts"])


def kinds_of(model: dict[str, Any]) -> set[str]:
    return {node["kind"] for node in nodes_of(model["blocks"])}


def is_called_twice(model: dict[str, Any]) -> bool:
    return bool(model["reuse"] or kinds_of(model) & {*REPEATING})


def names_of(model: dict[str, Any]) -> list[str]:
    """Names of the modules that a plan by hand places, in the order of their calls."""
    numbers = range(len(model["blocks"]))
    pattern = {"list": "blocks.{}", "sequential": "blocks.{}", "dict": "blocks.b{}", "own": "block{}"}[model["holder"]]
    names = ["embed", *(pattern.format(number) for number in numbers)]
    names += [f"cells.{number}" for number in range(len(model["cells"]))]
    return names if model["head"] == "tied" and model["input"] == "ids" else [*names, "head"]


def num_placed(model: dict[str, Any]) -> int:
    """How many of them have weights, and so how many stages there can be."""
    own = [
        kind for kind, (_, number) in kinds().items() if (number == 0 and kind not in WEIGHTLESS) or kind == "ByName"
    ]
    without = [node for node in model["blocks"] if not kinds_of({"blocks": [node]}) & {*own}]
    return len(names_of(model)) - len(without)


def constructor(node: Node) -> str:
    return f"{node['kind']}({', '.join(map(constructor, node['parts']))})"


def classes_text(model: dict[str, Any]) -> str:
    """The classes of the blocks."""
    used = kinds_of(model)
    texts = [text for name, (text, _) in kinds().items() if name in used]
    for name, other in CALLED:
        if name in used and other not in used:
            used.add(other)
            texts.insert(0, kinds()[other][0])
    return "\n\n\n".join(texts)


def net_text(model: dict[str, Any]) -> str:
    """The class of the whole model."""
    return "\n".join(["class Net(nn.Module):", *_constructor_lines(model), "", *_forward_lines(model)])


def _constructor_lines(model: dict[str, Any]) -> list[str]:
    made = [constructor(node) for node in model["blocks"]]
    lines = ["self.embed = " + ("nn.Embedding(V, W)" if model["input"] == "ids" else "nn.Linear(W, W)")]
    match model["holder"]:
        case "list" | "sequential" as holder:
            kind = "nn.ModuleList([{}])" if holder == "list" else "nn.Sequential({})"
            lines.append(f"self.blocks = {kind.format(', '.join(made))}")
            lines += [f"self.blocks.append(self.blocks[{number}])" for number in model["reuse"]]
        case "dict":
            entries = ", ".join(f'"b{number}": {text}' for number, text in enumerate(made))
            lines.append(f"self.blocks = nn.ModuleDict({{{entries}}})")
        case _:
            lines += [f"self.block{number} = {text}" for number, text in enumerate(made)]
    if model["cells"]:
        lines.append(f"self.cells = nn.ModuleList([{', '.join(f'nn.{kind}(W, W)' for kind in model['cells'])}])")
    lines += _tie_lines(model)
    tied = model["head"] == "tied" and model["input"] == "ids"
    if not tied:
        at = 1 if model["head at"] == "first" else len(lines)
        lines.insert(at, f"self.head = nn.Linear(W, V{', False' if model['head'] == 'bare' else ''})")
    return ["    def __init__(self):", "        super().__init__()", *(f"        {line}" for line in lines)]


def _tie_lines(model: dict[str, Any]) -> list[str]:
    """Two blocks with one weight, if the model has two that have such a layer."""
    path = {"list": "self.blocks[{}]", "sequential": "self.blocks[{}]", "dict": 'self.blocks["b{}"]'}
    texts = [kinds()[node["kind"]][0] for node in model["blocks"]]
    with_layer = [number for number, text in enumerate(texts) if re.search(r"self\.f(, self\.\w+)* = nn\.Lin", text)]
    if not model["ties"] or len(with_layer) < 2:
        return []
    first, second = [path.get(model["holder"], "self.block{}").format(number) for number in with_layer[-2:]]
    return [f"{second}.f.weight = {first}.f.weight"]


def _forward_lines(model: dict[str, Any]) -> list[str]:
    where = model["cells at"] if model["cells"] else ""
    is_first = where == "start" and model["input"] == "floats"
    lines = [*(_cell_lines(model, "x[:, 0]") if is_first else []), "h = self.embed(x)"]
    lines += ["h = h + c.unsqueeze(1)"] if is_first else []
    skip = model["skip"]
    if skip:
        lines.append("first = h")
    match model["holder"]:
        case "list":
            lines += ["for block in self.blocks:", "    h = block(h)"]
        case "sequential":
            lines.append("h = self.blocks(h)")
        case "dict":
            lines += ["for block in self.blocks.values():", "    h = block(h)"]
            lines += [f'h = self.blocks["b{number}"](h)' for number in model["reuse"]]
        case _:
            numbers = [*range(len(model["blocks"])), *model["reuse"]]
            lines += [f"h = self.block{number}(h)" for number in numbers]
    if skip:
        lines.append("h = h + first")
    if where and not is_first:
        lines += _cell_lines(model, "h.mean(1)")
        lines.append("h = c.unsqueeze(1).expand_as(h)" if where == "end" else "h = h + c.unsqueeze(1)")
    tied = model["head"] == "tied" and model["input"] == "ids"
    lines.append("out = F.linear(h, self.embed.weight)" if tied else "out = self.head(h)")
    result = {"tensor": "out", "pair": "(out, h)", "dict": '{"out": out, "hidden": h}'}[model["result"]]
    lines.append(f"return {result}, state" if model["cells"] else f"return {result}")
    arguments = "self, x, state" if model["cells"] else "self, x"
    return [f"    def forward({arguments}):", *(f"        {line}" for line in lines)]


def _cell_lines(model: dict[str, Any], start: str) -> list[str]:
    """Each cell takes what the cell before gave, the first one `start`, and its own part of the state."""
    lines, parts, at = [f"c = {start}"], [], 0
    key = (lambda number: f'state["{number}"]') if model["state"] == "dict" else (lambda number: f"state[{number}]")
    for number, kind in enumerate(model["cells"]):
        if CELLS[kind] == 1:
            lines += [f"c = s{at} = self.cells[{number}](c, {key(at)})"]
        else:
            lines += [f"c, d = self.cells[{number}](c, ({key(at)}, {key(at + 1)}))", f"s{at}, s{at + 1} = c, d"]
        parts += [f"s{at + offset}" for offset in range(CELLS[kind])]
        at += CELLS[kind]
    made = {
        "tuple": f"({', '.join(parts)},)",
        "list": f"[{', '.join(parts)}]",
        "dict": "{" + ", ".join(f'"{number}": {part}' for number, part in enumerate(parts)) + "}",
    }[model["state"]]
    return [*lines, f"state = {made}"]


def state_size(model: dict[str, Any]) -> int:
    return sum(CELLS[kind] for kind in model["cells"])
