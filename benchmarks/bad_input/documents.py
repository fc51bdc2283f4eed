"""Documents that are right, and ways to make them wrong, each of which knows whether the result still is right.

What a document may hold is said here once more, apart from the library: by the path of a value, of which kind it is,
and by kind what is not of it.
"""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

__all__ = ["CLUSTER_TEXT", "GRAPH", "PLAN", "STEP", "Broken", "Document", "break_document", "break_toml", "text_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Broken:
    """A text made from a right one.

    Attributes:
        what: What was done to it.
        data: The bytes of the file.
        is_right: Whether it is still right; None where nobody knows.
    """

    what: str
    data: bytes
    is_right: bool | None = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """A kind of JSON file.

    Attributes:
        name: Of the file.
        value: A right one.
        kinds: By path the kind of what is there; `*` is any index or name.
        fixed: Paths of objects that have no other keys than are known.
        needed: Paths of keys that must be there.
        spoils: What makes sense of each value, but not of the whole: changes a copy of `value`.
    """

    name: str
    value: Any
    kinds: dict[str, str]
    fixed: tuple[str, ...]
    needed: tuple[str, ...]
    spoils: dict[str, Callable[[Any], object]]


class Raw(str):
    """A piece of JSON as it is to be written."""


class Members(list[tuple[str, Any]]):
    """An object whose keys may be there twice."""


WRONG: dict[str, list[Any]] = {
    "name": ["", "   ", "\t", 5, None, True, [], {}, ["a"], Raw('"\\ud800"'), Raw('"\x01"')],
    "name?": ["", "   ", 5, True, [], {}, Raw('"\\udfff"')],
    "text": [5, None, True, [], {}, 1.5, Raw('"\n"')],
    "place": [
        *("", "rank", "rank:-1", "rank:x", "cuda:0", "rank:0/gpu:0", "rank:" + "9" * 20, "rank:" + "9" * 5000),
        *("rank:\u0663", "rank:0/", " rank:0", "rank:0\n", "rank:1e3", 0, None, True, [], ["rank:0"]),
    ],
    "stage": [-1, 2, 10**6, 0.0, 1.5, "0", "rank:0", True, None, [], Raw("1e999"), Raw("NaN"), Raw("9" * 5000)],
    "count": [-5, 1.5, 2.0, "1", True, None, [], {}, 10**12, Raw("1e999"), Raw("NaN"), Raw("9" * 5000), Raw("0x10")],
    "time": [1.5, "1", True, None, [], 10**30, -(10**30), Raw("1e999"), Raw("-Infinity"), Raw("1e3")],
    "number": [
        *(-1, -1e-300, "1", "nan", True, None, [], Raw("1e999"), Raw("NaN"), Raw("Infinity"), Raw("-Infinity")),
        *(10**39, 1e300, Raw("9" * 400), Raw("0." + "1" * 5000), Raw("01"), Raw(".5"), Raw("1_0"), Raw("\u0661")),
    ],
    "number?": [-1, "1", False, [], {}, Raw("1e999"), Raw("NaN"), 1e300],
    "seconds": [-1, "1 s", True, None, [], [1], {"": 1}, {"gpu": None}, {"gpu": -1}, {"gpu": "1"}, Raw("1e999"), 1e300],
    "flag": [0, 1, "true", None, [], 1.0],
    "remat": [0, 1, "blocks.0", None, {}, [1], ["a", None]],
    "schedule": ["", "fastest", "1F1B ", 5, None, True, [], ["auto"]],
    "format": ["", "farspan-plan/0", "farspan-graph/9", 1, None, True, []],
    "version": [0, 2, "1", True, None, 1.0, []],
    "word": ["", "X", "f", 5, None, True, ["F"], {}],
    "list": [{}, 5, "a", None, True, {"0": 1}],
    "list?": [{}, 5, "a", True],
    "object": [[], 5, "a", None, True, [["a", 1]]],
}


def text_of(value: Any) -> str:
    """A value as JSON, with raw pieces and repeated keys as they are."""
    if isinstance(value, Raw):
        return value
    if isinstance(value, Members):
        return "{" + ",".join(f"{json.dumps(key)}:{text_of(inner)}" for key, inner in value) + "}"
    if isinstance(value, dict):
        return text_of(Members(value.items()))
    if isinstance(value, list):
        return "[" + ",".join(map(text_of, value)) + "]"
    return json.dumps(value)


def break_document(document: Document, rng: random.Random) -> Broken:
    """One of all ways to break it."""
    ways = (_wrong_value,) * 8 + (_without, _with_more, _twice, _spoiled) * 2 + (_cut, _with_end, _flipped, _hostile)
    return rng.choice(ways)(document, rng)


def _paths(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(found for key, each in inner for found in _paths(each, (*path, key)))]


def _matches(path: tuple[Any, ...], pattern: str) -> bool:
    parts = pattern.split("/") if pattern else []
    return len(parts) == len(path) and all(part in ("*", str(key)) for part, key in zip(parts, path, strict=True))


def _at(value: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        value = value[key]
    return value


def _with(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    if not path:
        return new
    value = copy.copy(value)
    value[path[0]] = _with(value[path[0]], path[1:], new)
    return value


def _pick(document: Document, patterns: tuple[str, ...], rng: random.Random) -> tuple[Any, ...]:
    """A path that one of the patterns means; each pattern is as likely as another."""
    pattern = rng.choice(patterns)
    return rng.choice([path for path in _paths(document.value) if _matches(path, pattern)])


def _made(document: Document, what: str, path: tuple[Any, ...], value: Any) -> Broken:
    where = "/".join(map(str, path)) or "all"
    return Broken(what=f"{document.name}: {where}: {what}", data=text_of(value).encode("utf-8", "surrogatepass"))


def _wrong_value(document: Document, rng: random.Random) -> Broken:
    path = _pick(document, tuple(document.kinds), rng)
    kind = next(kind for pattern, kind in document.kinds.items() if _matches(path, pattern))
    wrong = rng.choice(WRONG[kind])
    return _made(document, f"{kind} {text_of(wrong)[:30]}", path, _with(document.value, path, wrong))


def _without(document: Document, rng: random.Random) -> Broken:
    path = _pick(document, document.needed, rng)
    members = {key: value for key, value in _at(document.value, path[:-1]).items() if key != path[-1]}
    return _made(document, "taken out", path, _with(document.value, path[:-1], members))


def _with_more(document: Document, rng: random.Random) -> Broken:
    path = _pick(document, document.fixed, rng)
    members = _at(document.value, path)
    known = rng.choice(list(members))
    key = rng.choice([known + "s", known[:-1], known.upper(), "", "x" * 5000, "__class__", known + "\x1b[2J"])
    return _made(document, "unknown key", path, _with(document.value, path, {**members, key: rng.choice([1, None])}))


def _twice(document: Document, rng: random.Random) -> Broken:
    path = rng.choice([path for path in _paths(document.value) if isinstance(_at(document.value, path), dict)])
    members = Members(_at(document.value, path).items())
    key, value = rng.choice(members)
    members.append((key, rng.choice([value, 1, None])))
    return _made(document, f"{key} twice", path, _with(document.value, path, members))


def _spoiled(document: Document, rng: random.Random) -> Broken:
    name = rng.choice(list(document.spoils))
    value = copy.deepcopy(document.value)
    document.spoils[name](value)
    return _made(document, name, (), value)


def _cut(document: Document, rng: random.Random) -> Broken:
    text = text_of(document.value)
    return _made(document, "cut off", (), Raw(text[: rng.randrange(len(text))]))


def _with_end(document: Document, rng: random.Random) -> Broken:
    end = rng.choice(["}", "{}", ",", "\x00", "1", "//", "# comment", '"'])
    return _made(document, f"{end!r} at its end", (), Raw(text_of(document.value) + end))


def _flipped(document: Document, rng: random.Random) -> Broken:
    """Some bytes are others: nobody knows what that makes of it."""
    data = bytearray(text_of(document.value).encode())
    for _ in range(rng.choice([1, 2, 8])):
        data[rng.randrange(len(data))] = rng.choice([rng.randrange(256), ord(rng.choice('{}[],:"0123456789.eE-'))])
    return Broken(what=f"{document.name}: flipped", data=bytes(data), is_right=None)


def _hostile(document: Document, rng: random.Random) -> Broken:
    what, data = rng.choice(HOSTILE)
    return Broken(what=f"{document.name}: {what}", data=data)


HOSTILE = [
    ("empty", b""),
    ("blank", b" \n" * 1000),
    ("null", b"null"),
    ("a text", b'"farspan"'),
    ("zeros", b"\x00" * 4096),
    ("UTF-16", '{"format": 1}'.encode("utf-16")),
    ("not UTF-8", b'{"format": "\xff\xfe"}'),
    ("deep lists", b"[" * 200_000 + b"]" * 200_000),
    ("deep objects", b'{"nodes":' * 100_000),
    ("wide lists", b"[" + b"[]," * 6_000_000 + b"[]]"),
    ("wide objects", b"[" + b'{"":1},' * 2_500_000 + b"{}]"),
    ("as many values as are read", b"[" + b'{"":1},' * 650_000 + b"{}]"),
    ("a long text", b'{"format": "' + b"a" * 30_000_000 + b'"}'),
    ("a long escaped text", b'{"format": "' + b"\\n" * 15_000_000 + b'"}'),
    ("a long number", b'{"format": ' + b"9" * 10_000_000 + b"}"),
    ("larger than 64 MiB", b" " * (64 * 2**20 + 1)),
    ("ELF", b"\x7fELF\x02\x01\x01" + bytes(range(256)) * 20),
]


def _set(*keys: Any, to: Any) -> Callable[[Any], object]:
    """Changes a value deep inside another one."""

    def change(value: Any) -> None:
        _at(value, keys[:-1])[keys[-1]] = to

    return change


PLAN = Document(
    name="plan.json",
    value={
        "format": "farspan-plan/1",
        "stages": ["rank:0", "rank:1/cuda:0"],
        "schedule": "1f1b",
        "lookahead": 2,
        "remat": ["blocks.*"],
        "placement": {"embed": 0, "blocks.*": 1, "head": 1},
        "estimates": {"share": [0.25, 0.75], "peak_bytes": [1e9, 3e9]},
    },
    kinds={
        "": "object",
        "format": "format",
        "stages": "list",
        "stages/*": "place",
        "schedule": "schedule",
        "lookahead": "count",
        "remat": "remat",
        "placement": "object",
        "placement/*": "stage",
        "estimates": "object",
        "estimates/*": "list",
        "estimates/*/*": "number",
    },
    fixed=("",),
    needed=("format", "stages", "placement"),
    spoils={
        "no stage": _set("stages", to=[]),
        "one stage too few": _set("stages", to=["rank:0"]),
        "nothing placed": _set("placement", to={}),
        "an estimate too many": lambda value: value["estimates"]["share"].append(0.5),
        "an estimate without a name": _set("estimates", "", to=[1, 1]),
        "stages without end": _set("stages", to=["rank:0"] * 200_000),
    },
)
_NODES = [
    {
        "name": f"n{index}",
        "forward_s": {"gpu": 0.001, "cpu": 0.02},
        "backward_s": 0.002,
        "memory_bytes": 1e9,
        "saved_bytes": 1e6,
        "parameter_bytes": 5e8,
        "shared_bytes": {"x": 1e5},
        "devices": ["gpu", "cpu"],
        "together": f"w{index}",
        "is_backward": False,
        "options": [
            {"name": "remat", "tensor_parallel": 1, "forward_s": 0.002, "backward_s": 0.002},
            {"name": "split", "tensor_parallel": 2, "forward_s": 0.001, "border_bytes": {"n0": 1e3}},
        ],
    }
    for index in range(5)
]
_EDGES = [
    {
        "source": f"n{index}",
        "target": f"n{index + 1}",
        "bytes": 1e6,
        "seconds": 0,
        "value": "out",
        "gradient_bytes": 1e6,
        "is_saved": True,
    }
    for index in range(4)
]
GRAPH = Document(
    name="graph.json",
    value={"format": "farspan-graph/1", "nodes": _NODES, "edges": _EDGES},
    kinds={
        "": "object",
        "format": "format",
        "nodes": "list",
        "nodes/*": "object",
        "nodes/*/name": "name",
        "nodes/*/forward_s": "seconds",
        "nodes/*/backward_s": "seconds",
        "nodes/*/memory_bytes": "number",
        "nodes/*/saved_bytes": "number",
        "nodes/*/parameter_bytes": "number",
        "nodes/*/shared_bytes": "object",
        "nodes/*/shared_bytes/x": "number",
        "nodes/*/devices": "list?",
        "nodes/*/devices/*": "name",
        "nodes/*/together": "name?",
        "nodes/*/is_backward": "flag",
        "nodes/*/options": "list",
        "nodes/*/options/*": "object",
        "nodes/*/options/*/name": "name",
        "nodes/*/options/*/tensor_parallel": "count",
        "nodes/*/options/*/forward_s": "seconds",
        "nodes/*/options/*/border_bytes": "object",
        "nodes/*/options/*/border_bytes/n0": "number",
        "edges": "list",
        "edges/*": "object",
        "edges/*/source": "name",
        "edges/*/target": "name",
        "edges/*/bytes": "number",
        "edges/*/seconds": "number",
        "edges/*/value": "name",
        "edges/*/gradient_bytes": "number?",
        "edges/*/is_saved": "flag",
    },
    fixed=("", "nodes/*", "nodes/*/options/*", "edges/*"),
    needed=("format", "nodes", "nodes/*/name", "nodes/*/options/*/name", "edges/*/source", "edges/*/target"),
    spoils={
        "no nodes": _set("nodes", to=[]),
        "two nodes alike": lambda value: value["nodes"].append(value["nodes"][0]),
        "an edge from nowhere": _set("edges", 0, "source", to="n9"),
        "an edge to nowhere": _set("edges", 0, "target", to=""),
        "an edge to itself": _set("edges", 0, "target", to="n0"),
        "an edge twice": lambda value: value["edges"].append(value["edges"][0]),
        "a circle": lambda value: value["edges"].append({"source": "n4", "target": "n0"}),
        "runs nowhere": _set("nodes", 0, "devices", to=[]),
        "a kind without a name": _set("nodes", 0, "forward_s", to={"": 1}),
        "a word without a name": _set("nodes", 0, "shared_bytes", to={" ": 1}),
        "a neighbour that is none": _set("nodes", 0, "options", 1, "border_bytes", to={"n9": 1}),
        "degree 0": _set("nodes", 0, "options", 0, "tensor_parallel", to=0),
        "an option twice": lambda value: value["nodes"][0]["options"].append(value["nodes"][0]["options"][0]),
        "one value of two sizes": lambda value: value["edges"].append(
            {"source": "n0", "target": "n2", "value": "out", "bytes": 5}
        ),
    },
)
_SPANS = [
    *([0, "F", "a", 0, 0, 10], [0, "F", "a", 1, 10, 20], [0, "wait", "a", 0, 20, 45], [0, "B", "a", 0, 45, 65]),
    *([0, "B", "a", 1, 100, 120], [1, "F", "b", 0, 12, 22], [1, "B", "b", 0, 22, 42], [1, "F", "b", 1, 42, 52]),
    [1, "B", "b", 1, 60, 80],
]
_TASKS = [
    *(["F", 0, 0, 0, [], True], ["F", 1, 0, 1, [0], True], ["B", 1, 0, 2, [1], False], ["B", 0, 0, 3, [2], False]),
    *(["F", 0, 1, 0, [], True], ["F", 1, 1, 1, [4], True], ["B", 1, 1, 2, [5], False], ["B", 0, 1, 3, [6], False]),
]
STEP = Document(
    name="step.json",
    value={
        "farspan_step": 1,
        "timeline": {"title": "a step", "num_ranks": 2, "spans": _SPANS},
        "tasks": _TASKS,
        "orders": [[0, 4, 3, 7], [1, 2, 5, 6]],
        "plan": "stage 0",
        "environment": ["here"],
    },
    kinds={
        "": "object",
        "farspan_step": "version",
        "timeline": "object",
        "timeline/title": "text",
        "timeline/num_ranks": "count",
        "timeline/spans": "list",
        "timeline/spans/*": "list",
        "timeline/spans/*/0": "count",
        "timeline/spans/*/1": "word",
        "timeline/spans/*/2": "text",
        "timeline/spans/*/3": "count",
        "timeline/spans/*/4": "time",
        "timeline/spans/*/5": "time",
        "tasks": "list",
        "tasks/*": "list",
        "tasks/*/0": "word",
        "tasks/*/1": "count",
        "tasks/*/2": "count",
        "tasks/*/3": "count",
        "tasks/*/4": "list",
        "tasks/*/5": "flag",
        "orders": "list",
        "orders/*": "list",
        "orders/*/*": "count",
        "plan": "text",
        "environment": "list",
        "environment/*": "text",
    },
    fixed=("", "timeline"),
    needed=(
        *("farspan_step", "timeline", "tasks", "orders", "plan", "environment"),
        *("timeline/title", "timeline/num_ranks", "timeline/spans"),
    ),
    spoils={
        "a span that ends before it starts": _set("timeline", "spans", 0, 5, to=-1),
        "a span of a rank that is none": _set("timeline", "spans", 0, 0, to=2),
        "a short span": lambda value: value["timeline"]["spans"][0].pop(),
        "a span that is missing": lambda value: value["timeline"]["spans"].pop(0),
        "a billion ranks": _set("timeline", "num_ranks", to=10**9),
        "no ranks": lambda value: (_set("timeline", "num_ranks", to=0)(value), _set("orders", to=[])(value)),
        "fewer ranks than orders": _set("timeline", "num_ranks", to=1),
        "a task of a rank that is none": _set("tasks", 0, 1, to=2),
        "a task that needs itself": _set("tasks", 0, 4, to=[0]),
        "a task that needs a later one": _set("tasks", 1, 4, to=[6]),
        "a task that needs what is none": _set("tasks", 1, 4, to=[-1]),
        "a task in no order": lambda value: value["orders"][0].pop(),
        "a task in an order twice": lambda value: value["orders"][0].append(0),
        "a task in another rank's order": lambda value: value["orders"][1].append(value["orders"][0].pop()),
        "orders that wait for each other": _set("orders", to=[[7, 4, 3, 0], [6, 5, 2, 1]]),
    },
)

_SIZE = [
    *("-1", "0", '"fast"', "true", "[]", "{}", "nan", "inf", "1e999", '"1e999 GB"', '"\u0665 GB"', '"8 GX"'),
    *('"8,5 GB"', '"-8 GB"', '""', "07:32:00", '"8 GB 8"'),
]
_RATE = [*_SIZE, '"8 GB/min"', '"8 GB/h"']
CLUSTER: dict[str, list[str]] = {
    "links.within": _RATE,
    "links.between": _RATE,
    "links.latency": ['"5 GB"', "-1", '"-5 us"', "true", "nan", "inf", '"5 us/s"', '""', "[5]", "1e30"],
    "kind": ['""', '" "', "5", "true", "[]", "{}", "1979-05-27", '["gpu"]'],
    "name": ['""', '" "', "5", "false", "[]"],
    "count": ["0", "-1", "1.5", "true", '"4"', "[]", "1e3", "1000000000000", "9" * 5000, "nan", "0x" + "f" * 5000],
    "devices": ["0", "-1", "2.0", "true", '"8"', "[]", "1000000000", "9" * 30, "inf", "1__0"],
    "memory": [*_SIZE, '"80 GiB/s"', "1e30"],
    "speed": ["0", "-1", "true", '"1"', "nan", "inf", "1e999", "1e300", "1e-300", "[]"],
    "flops": [*_RATE, '"312 TB/s"'],
    "memory_bandwidth": _RATE,
}
"""By key the values that it must not have."""
_CLUSTER_LINES = [
    *("[links]", 'within = "300 GB/s"', 'between = "25 GB/s"', 'latency = "5 us"', "", "[[hosts]]", 'name = "new"'),
    *('kind = "gpu"', "count = 2", "devices = 2", 'memory = "80 GiB"', "speed = 1.0"),
    *('flops = "312 TFLOP/s"', 'memory_bandwidth = "2 TB/s"', "", "[[hosts]]", 'kind = "cpu"', "devices = 2"),
]
CLUSTER_TEXT = "\n".join(_CLUSTER_LINES) + "\n"
_HOSTILE_TOML = [
    *[hostile for hostile in HOSTILE if hostile[0] not in ("empty", "blank")],
    ("nothing", b""),
    ("no hosts", b"[links]\nlatency = 0\n"),
    ("hosts that are no tables", b"hosts = [1, 2]\n"),
    ("hosts that are a table", b'[hosts]\nkind = "gpu"\n'),
    ("deep keys", b"a" + b".a" * 50_000 + b" = 1\n"),
    ("a deep table", b"[a" + b".a" * 50_000 + b"]\n"),
    ("deep values", b"a = " + b"[" * 50_000),
    ("many keys", b"".join(b"k%d = 1\n" % index for index in range(20_000))),
    ("many hosts", b"".join(b'[[hosts]]\nkind = "k%d"\n' % index for index in range(8000))),
    ("all devices there are", b'[[hosts]]\nkind = "gpu"\ncount = 65000\ndevices = 65000\n'),
    ("two kinds alike", b'[[hosts]]\nkind = "gpu"\n[[hosts]]\nkind = "gpu"\n'),
    ("a table twice", b'[links]\n[links]\n[[hosts]]\nkind = "gpu"\n'),
]


def break_toml(rng: random.Random) -> Broken:
    """One of all ways to break cluster.toml."""
    lines = list(_CLUSTER_LINES)
    way = rng.randrange(12)
    if way < 7:
        key = rng.choice(list(CLUSTER))
        place = next(at for at, line in enumerate(lines) if line.startswith(f"{key.removeprefix('links.')} ="))
        wrong = rng.choice(CLUSTER[key])
        lines[place] = f"{key.removeprefix('links.')} = {wrong}"
        return Broken(what=f"cluster.toml: {key} = {wrong[:30]}", data="\n".join(lines).encode())
    place = rng.choice([at for at, line in enumerate(lines) if "=" in line])
    if way == 7:
        lines.insert(place, lines[place])
        return Broken(what="cluster.toml: a key twice", data="\n".join(lines).encode())
    if way == 8:
        lines[place] = rng.choice(["x", "__class__", "Kind", '""', '"a b"']) + " = 1\n" + lines[place]
        return Broken(what="cluster.toml: unknown key", data="\n".join(lines).encode())
    if way == 9:
        data = bytearray(CLUSTER_TEXT.encode())
        for _ in range(rng.choice([1, 2, 8])):
            data[rng.randrange(len(data))] = rng.randrange(256)
        return Broken(what="cluster.toml: flipped", data=bytes(data), is_right=None)
    if way == 10:
        text = CLUSTER_TEXT[: rng.randrange(len(CLUSTER_TEXT))]
        return Broken(what="cluster.toml: cut off", data=text.encode(), is_right=None)
    what, data = rng.choice(_HOSTILE_TOML)
    return Broken(what=f"cluster.toml: {what}", data=data)
