"""A drawn program: a model, a loop and ways to run them, from (seed, number) alone, and its text."""

from __future__ import annotations

import json
import pprint
import random
from typing import Any

from benchmarks.fuzz.loops import draw_loop, helpers_text, train_text
from benchmarks.fuzz.models import DRAWING, classes_text, draw_model, kinds_of, names_of, net_text, num_placed

ROUNDED = ("micro_batches", "tensor_parallel")
"""Options with which numbers are those of one process up to rounding."""

Drawn = dict[str, Any]
"""{"model": .., "loop": .., "ways": [..]}, all of it data that JSON can hold."""

Way = dict[str, Any]
"""{"ranks": 2, "options": {..}, "from_rank": False, "deferred": False}"""

_HEAD = """\
import collections
import contextvars
import copy
import queue
import sys

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

W, V, T = 8, 5, %d
DTYPE = torch.float32
CALLS = contextvars.ContextVar("CALLS", default=0)
COUNTS = []
SETTINGS = {"gain": 1.0}


def GIVEN(read):
    return read()


def rounded(item):
    return item.float().round(decimals=2).to(item.dtype) if item.is_floating_point() else item


class Noisy(torch.optim.Optimizer):
    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.add_(p.grad + 0.01 * torch.randn_like(p), alpha=-group["lr"])
"""

_BUILD = """\
def build():
    torch.manual_seed(5)
    return Net()
"""

_MAIN = """\
def plain(value):
    if isinstance(value, torch.Tensor):
        return [round(number, 9) for number in value.detach().double().flatten()[:4].tolist()], digest(value.tolist())
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, (list, tuple)) else value


def digest(value):
    return hashlib.sha256(repr(value).encode()).hexdigest()[:8]


def main():
    if "--farspan" in sys.argv:
        import farspan

%(farspan)s
    else:
        model = build()
    train(model, lambda name, value: print(name, value))
    for name, tensor in model.state_dict().items():
        print(name, *plain(tensor))
    for name, module in model.named_modules():
        for key, value in vars(module).items():
            if key not in vars(nn.Module()) and isinstance(value, (int, float, str, list, tuple, dict, torch.Tensor)):
                print(f"{name}.{key}", plain(value))
    print("generator", digest(torch.get_rng_state().tolist()))


main()
"""


def draw(seed: int, number: int, attempt: int = 0) -> Drawn:
    """The program of that number; another `attempt` where the plain program of the one before raises."""
    rng = random.Random(f"fuzz/{seed}/{number}/{attempt}")
    model = draw_model(rng)
    loop = draw_loop(rng, model)
    return {"model": model, "loop": loop, "ways": draw_ways(rng, model, loop)}


def draw_ways(rng: random.Random, model: dict[str, Any], loop: dict[str, Any]) -> list[Way]:
    """Two ways: one with the first step measured, as by default, and another."""
    draws = bool(kinds_of(model) & {*DRAWING}) or "draws" in loop["features"] or loop["drawn"]
    exact = draws or loop["optimizer"] in ("LBFGS", "Noisy")
    default: Way = {"ranks": rng.choice((2, 2, 2, 2, 3, 3, 4)), "options": {}}
    for way in (ways := [default, _draw_other(rng, model, loop, exact=exact)]):
        if not {"data_parallel", "plan"} & {*way["options"]}:
            way["ranks"] = min(way["ranks"], num_placed(model))
        if loop["optimizer"] == "Noisy":  # runs in processes
            way.pop("from_rank", None)
            way.pop("deferred", None)
    return ways


def _draw_other(rng: random.Random, model: dict[str, Any], loop: dict[str, Any], *, exact: bool) -> Way:
    ranks = rng.choice((1, 2, 2, 2, 3, 3, 4))
    way: Way = {"ranks": ranks, "options": {}}
    options = way["options"]
    kinds = ["measure", "plan", "plan", "schedule", "remat"]
    # Ranks of `data_parallel` are processes, and cuts of batches are tried: they cost five times the others.
    if not exact:
        kinds.append(rng.choice(("micro_batches", "tensor", "tensor", rng.choice(("data", "shard")))))
    if loop["backward"] == "grad":
        kinds = [kind for kind in kinds if kind != "tensor"]  # an error: docs/limits.md
    kind = rng.choice(kinds)
    match kind:
        case "measure":
            options["measure"] = False
        case "plan":
            names = names_of(model)
            if model["cells"] and rng.random() < 0.5:
                names = [*(name for name in names if not name.startswith("cells")), "cells"]
            ranks = way["ranks"] = min(ranks, len(names))
            places = [*range(ranks), *(rng.randrange(ranks) for _ in names[ranks:])]
            rng.shuffle(places)
            options["plan"] = {name: f"rank:{place}" for name, place in zip(names, places, strict=True)}
            if ranks > 1 and rng.random() < 0.25:
                first = [name for name, place in options["plan"].items() if place in ("rank:0", "rank:1")]
                options["plan"][rng.choice(first)] = "rank:0+rank:1"  # no other rank is left without a stage
        case "schedule":
            options |= {"schedule": rng.choice(("auto", "zero-bubble", "1f1b", "gpipe")), "measure": False}
        case "remat":
            names = [name for name in names_of(model) if "block" in name]
            options["remat"] = rng.choice((True, rng.sample(names, (len(names) + 1) // 2), names))
        case "data":
            way["ranks"] = rng.choice((2, 4))
            options["data_parallel"] = 2
        case "shard":
            way["ranks"] = rng.choice((2, 4))
            options |= {"data_parallel": 2, "shard": rng.choice(("optimizer", "parameters"))}
        case "micro_batches":
            way["ranks"] = max(2, ranks)
            options["micro_batches"] = 2
        case _:
            way["ranks"] = 2
            options["tensor_parallel"] = 2
    if kind in ("plan", "measure", "schedule"):
        way["from_rank"] = rng.random() < 0.15
        way["deferred"] = rng.random() < 0.15
    return way


def is_rounded(way: Way) -> bool:
    return any(name in way["options"] for name in ROUNDED)


def in_words(way: Way) -> str:
    """A way on one line."""
    parts = [f"{way['ranks']} ranks", *(f"{key}={value!r}" for key, value in way["options"].items())]
    return ", ".join([*parts, *(key for key in ("from_rank", "deferred") if way.get(key))])


def source(drawn: Drawn) -> str:
    """The text of the program: a module with `build()` and `train(model, record)`."""
    model, loop = drawn["model"], drawn["loop"]
    parts = [
        _HEAD % model["time"],
        classes_text(model),
        net_text(model),
        helpers_text(model),
        _BUILD,
        train_text(model, loop),
    ]
    return "\n\n\n".join(part.strip("\n") for part in parts if part) + "\n"


def standalone(drawn: Drawn, way: dict[str, Any], head: str) -> str:
    """A file that runs alone: plainly, and with --farspan under `farspan run`."""
    options = pprint.pformat(way["options"], width=100, sort_dicts=False)
    lines = []
    if way.get("from_rank"):
        lines += ["global GIVEN", "GIVEN = lambda read: farspan.from_rank(0, read() if farspan.rank() == 0 else None)"]
    made = "build()"
    if way.get("deferred"):
        lines += ["with farspan.deferred_init():", "    model = build()"]
        made = "model"
    lines.append(f"model = farspan.distribute({made}, **{options})".replace("\n", "\n" + " " * 12))
    body = "\n".join(f"        {line}" for line in lines)
    text = source(drawn).replace("import copy\n", "import copy\nimport hashlib\n")
    start = f'"""{head.strip()}\n\nstart with   farspan run -n {way["ranks"]} FILE --farspan   ({in_words(way)})\n"""\n'
    return f"{start}{text}\n\n{_MAIN % {'farspan': body}}\n# drawn: {json.dumps({**drawn, 'ways': [way]})}\n"
