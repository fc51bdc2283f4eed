"""Makes a finding small: deletes parts of a drawn program while its outcome stays."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator
from typing import Any

from benchmarks.fuzz.models import Node, names_of, nodes_of, num_placed

Drawn = dict[str, Any]
Way = dict[str, Any]
LAYER: Node = {"kind": "Layer", "parts": []}
MOST_TRIES = 110
_PLAIN_MODEL = {
    "reuse": [], "skip": False, "ties": False, "time": 3, "holder": "list", "cells": [], "state": "tuple",
    "cells at": "join", "input": "floats", "head": "linear", "head at": "last", "result": "tensor",
}  # fmt: skip
_PLAIN_LOOP = {
    "optimizer": "SGD", "split": False, "backward": "plain", "loss": "mse", "carry": "detach", "fresh": True,
    "autocast": False, "mean": True, "keeps": False, "packs": False, "drawn": False, "region": False,
}  # fmt: skip


def shrink(drawn: Drawn, way: Way, stays: Callable[[Drawn, Way], bool], most: int = MOST_TRIES) -> tuple[Drawn, Way]:
    """The smallest program and way that deletions lead to.

    Args:
        drawn: A program.
        way: How it is run.
        stays: Whether the outcome of another program, run in another way, is that of the first.
        most: How many programs are tried.
    """
    tried: set[str] = set()
    smaller = True
    while smaller:
        smaller = False
        for candidate in _candidates(drawn, way):
            text = repr(candidate)
            if text in tried:
                continue
            if len(tried) >= most:
                return drawn, way
            tried.add(text)
            if stays(*candidate):
                drawn, way = candidate
                smaller = True
                break
    return drawn, way


def features_of(drawn: Drawn, way: Way) -> set[str]:
    """What a program has that the plainest one has not."""
    model, loop = drawn["model"], drawn["loop"]
    idle = {"cells", "reuse", *(() if model["cells"] else ("state", "cells at", "carry", "fresh"))}
    found = {f"block {node['kind']}" for node in nodes_of(model["blocks"]) if node["kind"] != "Layer"}
    for part, plain in (("model", _PLAIN_MODEL), ("loop", _PLAIN_LOOP)):
        found |= {
            f"{part} {key} {drawn[part][key]}" for key in plain if drawn[part][key] != plain[key] and key not in idle
        }
    found |= {"model reuse"} if model["reuse"] else set()
    found |= {f"cell {kind}" for kind in model["cells"] if kind != "GRUCell"} | ({"cells"} if model["cells"] else set())
    found |= {f"feature {name}" for name in loop["features"]}
    found |= {"micro-batches"} if len(loop["micro_batches"]) > 1 else set()
    found |= {f"way {key}" for key in way["options"] if key != "measure"}
    found |= {f"way {key}" for key in ("deferred", "from_rank") if way.get(key)}
    if not {"measure", "plan", "remat"} & {*way["options"]} and way["ranks"] > 1:
        found.add("way measured")
    return found


def without(drawn: Drawn, features: set[str]) -> Drawn | None:
    """The program without some features; None where it has none that can be left out."""
    new = copy.deepcopy(drawn)
    for node in nodes_of(new["model"]["blocks"]):
        if f"block {node['kind']}" in features:
            node |= copy.deepcopy(LAYER)
    new["loop"]["features"] = [name for name in new["loop"]["features"] if f"feature {name}" not in features]
    for part, plain in (("model", _PLAIN_MODEL), ("loop", _PLAIN_LOOP)):
        for key, value in plain.items():
            if f"{part} {key} {new[part][key]}" in features:
                new[part][key] = value
    if "model reuse" in features:
        new["model"]["reuse"] = []
    if "cells" in features:
        new["model"]["cells"] = []
    return None if new == drawn else new


def same_kind(text: str) -> str:
    """An error's line without what changes from program to program."""
    return re.sub(r"'[^']*'|\d+|rank \w+", "", text)[:60]


def _candidates(drawn: Drawn, way: Way) -> Iterator[tuple[Drawn, Way]]:
    """Much at once first, then single parts."""
    model, loop = drawn["model"], drawn["loop"]
    short = {**loop, "steps": min(2, loop["steps"]), "micro_batches": loop["micro_batches"][:2]}
    plain_loop = {**loop, **_PLAIN_LOOP, "features": []}
    plain_model = {**model, **_PLAIN_MODEL}
    bare = [LAYER for _ in model["blocks"]]
    if way["options"] != {"measure": False}:
        yield drawn, {**way, "ranks": max(2, way["ranks"]), "options": {"measure": False}}
    if plain_loop != loop:
        yield {**drawn, "loop": plain_loop}, way
    if plain_model != model:
        yield {**drawn, "model": plain_model}, fitting(way, plain_model)
    if model["blocks"] != bare:
        yield {**drawn, "model": {**model, "blocks": bare}}, way
    half = len(model["blocks"]) // 2
    for blocks in (model["blocks"][:half], model["blocks"][half:]):
        if half > 1:
            halved = {**model, "blocks": blocks, "reuse": [0] if model["reuse"] else []}
            yield {**drawn, "model": halved}, fitting(way, halved)
    for node in model["blocks"]:
        if len(model["blocks"]) > 2 and node != LAYER:
            only = {**model, "blocks": [LAYER, node], "reuse": []}
            yield {**drawn, "model": only}, fitting(way, only)
    if short != loop:
        yield {**drawn, "loop": short}, way
    for model in _models(drawn["model"]):
        yield {**drawn, "model": model}, fitting(way, model)
    for loop in _loops(drawn["loop"]):
        yield {**drawn, "loop": loop}, way
    for other in _ways(way, drawn["model"]):
        yield drawn, other


def _models(model: dict[str, Any]) -> Iterator[dict[str, Any]]:
    blocks = model["blocks"]
    for number in range(len(blocks) - 1, -1, -1):
        if len(blocks) > 1:
            reuse = [min(at, len(blocks) - 2) for at in model["reuse"]]
            yield {**model, "blocks": blocks[:number] + blocks[number + 1 :], "reuse": reuse}
    for key, value in _PLAIN_MODEL.items():
        if model[key] != value:
            yield {**model, key: value}
    for number in range(len(model["cells"])):
        yield {**model, "cells": model["cells"][:number] + model["cells"][number + 1 :]}
        if model["cells"][number] != "GRUCell":
            yield {**model, "cells": [*model["cells"][:number], "GRUCell", *model["cells"][number + 1 :]]}
    for number, node in enumerate(blocks):
        for other in _nodes(node):
            yield {**model, "blocks": [*blocks[:number], other, *blocks[number + 1 :]]}


def _nodes(node: Node) -> Iterator[Node]:
    if node != LAYER:
        yield LAYER
    yield from node["parts"]
    for number, part in enumerate(node["parts"]):
        for other in _nodes(part):
            yield {**node, "parts": [*node["parts"][:number], other, *node["parts"][number + 1 :]]}


def _loops(loop: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for name in loop["features"]:
        yield {**loop, "features": [other for other in loop["features"] if other != name]}
    for key, value in _PLAIN_LOOP.items():
        if loop[key] != value:
            yield {**loop, key: value}
    if loop["steps"] > 1:
        yield {**loop, "steps": loop["steps"] - 1}
    sizes = loop["micro_batches"]
    for other in ([2], [2, 2]):
        if len(other) < len(sizes) or (len(other) == len(sizes) and other != sizes):
            yield {**loop, "micro_batches": other}


def _ways(way: Way, model: dict[str, Any]) -> Iterator[Way]:
    options = way["options"]
    for key in ("from_rank", "deferred"):
        if way.get(key):
            yield {**way, key: False}
    if way["ranks"] > 2 and "data_parallel" not in options:
        yield fitting({**way, "ranks": 2}, model)
    if options != {"measure": False}:
        yield {**way, "options": {"measure": False}}
    for key in options:
        if key != "measure":
            yield {**way, "options": {name: value for name, value in options.items() if name != key}}
    if "plan" in options:
        for name, place in options["plan"].items():
            if place != "rank:0":
                other = {**options["plan"], name: "rank:0"}
                if len({*other.values()}) == way["ranks"]:
                    yield {**way, "options": {**options, "plan": other}}


def fitting(way: Way, model: dict[str, Any]) -> Way:
    """A plan by hand for another model or fewer ranks."""
    names = names_of(model)
    if "data_parallel" not in way["options"]:
        way = {**way, "ranks": min(way["ranks"], num_placed(model))}
    again = way["options"].get("remat")
    if isinstance(again, list):
        kept = [name for name in again if name in names]
        way = {**way, "options": {**way["options"], "remat": kept or True}}
    plan = way["options"].get("plan")
    if plan is None:
        return way
    if model["cells"] and "cells" in plan:
        names = [name for name in names if not name.startswith("cells")] + ["cells"]
    wide = {name: place for name, place in plan.items() if "+" in place and name in names and way["ranks"] > 1}
    places = {name: min(int(plan.get(name, "rank:0").split(":")[-1]), way["ranks"] - 1) for name in names}
    missing = [rank for rank in range(way["ranks"]) if rank not in places.values()]
    places |= dict(zip(reversed(places), missing, strict=False))  # each rank has something
    return {
        **way,
        "options": {**way["options"], "plan": {name: f"rank:{rank}" for name, rank in places.items()} | wide},
    }
