"""What another rank sends is data: nothing that it names is looked up among what is loaded, and nothing is called."""

from __future__ import annotations

import copy
import enum
import functools
import json
from collections import Counter, OrderedDict, UserDict, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, Self

import numpy as np
import pytest
import torch
from tests.support.ranks import run_processes, run_threads
from torch import nn

import farspan
from farspan.call.infer.entry import meta_of
from farspan.call.pytree.template import flatten, rebuild
from farspan.call.wire.structure import structure_from_json, structure_to_json
from farspan.errors import RecordError

PROGRAM = Path(__file__).resolve().parents[2] / "programs" / "named_classes.py"
CALLED: list[Any] = []
"""What the code of this file's own classes has been called with."""


class Pair(NamedTuple):
    left: Any
    right: Any


@dataclass
class Record:
    tensor: Any
    note: str = ""

    def __post_init__(self) -> None:
        CALLED.append(self.note)


class Guarded:
    """Its constructor and its setter do something."""

    def __new__(cls, *args: Any) -> Self:
        CALLED.append(args)
        return super().__new__(cls)

    @property
    def path(self) -> str:
        return "none"

    @path.setter
    def path(self, value: str) -> None:
        CALLED.append(value)


class Finalized:
    def __init__(self) -> None:
        self.path = "a"

    def __del__(self) -> None:
        CALLED.append(self.path)


class Colour(enum.Enum):
    RED = 1


class Encoding(dict[str, Any]):
    """As a tokenizer's result of old: a dictionary with attributes."""

    def __init__(self, data: dict[str, Any], source: str) -> None:
        super().__init__(data)
        self.source = source


class Held(UserDict[str, Any]):
    pass


@dataclass(frozen=True, slots=True)
class Slotted:
    tensor: Any
    number: int = 3


X = torch.arange(6.0).reshape(2, 3)


def name(text: str) -> dict[str, Any]:
    return {"name": text}


def seq(*parts: Any) -> dict[str, Any]:
    return {"tuple": [*parts]}


def atom(value: Any, kind: str = "builtins:str") -> dict[str, Any]:
    return seq(1, name(kind), value)


def command(path: Path) -> str:
    return f"touch {path}"


ATTACKS: dict[str, Callable[[Path], Any]] = {
    "a function as a named tuple": lambda path: seq(4, name("os:system"), seq(atom(command(path)))),
    "a function as a tuple": lambda path: seq(4, {"by_id": name("os:system")}, seq(atom(command(path)))),
    "a class as a named tuple": lambda path: seq(
        4, name("subprocess:Popen"), seq(seq(3, seq(atom("touch"), atom(str(path)))))
    ),
    "a function as a set": lambda path: seq(6, 0, name("subprocess:check_output"), {"frozenset": [command(path)]}),
    "a function in this file's globals": lambda path: seq(
        4, name(f"{__name__}:subprocess.getoutput"), seq(atom(command(path)))
    ),
    "a factory of defaults": lambda path: seq(
        5, 0, name("collections:defaultdict"), seq(),
        seq(seq("default_factory", seq(1, {"unnamed": "function"}, {"by_id": name("os:getcwd")}))),
    ),
    "a property's setter": lambda path: seq(
        7, 0, name(f"{__name__}:Guarded"), seq(seq("path", atom("from the wire")))
    ),
    "a finalizer": lambda path: seq(
        7, 0, name(f"{__name__}:Finalized"), seq(seq("path", atom("from the wire")))
    ),
    "a class by assignment": lambda path: seq(
        7, 0, name("types:SimpleNamespace"),
        seq(seq("__class__", seq(1, name("builtins:type"), {"by_id": name("subprocess:Popen")}))),
    ),
    "an attribute of torch": lambda path: seq(1, {"torch": "load"}, {"torch": "load"}),
}  # fmt: skip


@pytest.mark.parametrize("attack", ATTACKS)
def test_nothing_that_another_rank_names_is_called(attack: str, tmp_path: Path) -> None:
    """The first one ran a shell command as the user of every rank."""
    mark = tmp_path / "mark"
    hostile = json.dumps([ATTACKS[attack](mark), []]).encode()
    CALLED.clear()

    def program(rank: int) -> str:
        with pytest.raises(RecordError) as caught:
            farspan.from_rank(0, X if rank == 0 else None)
        assert caught.value.why and caught.value.hint
        return str(caught.value)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("farspan.execute.step.inputs.announce", lambda batch: (hostile, [torch.zeros(1)]))
        if attack == "a property's setter":  # the object is made, and the property is not used
            run_threads(2, lambda rank: farspan.from_rank(0, X if rank == 0 else None))
        else:
            assert len(set(run_threads(2, program))) == 1
    assert not mark.exists() and "from the wire" not in CALLED


def test_an_object_is_rebuilt_without_its_own_code() -> None:
    item = [Record(X, "one"), object.__new__(Guarded)]
    CALLED.clear()
    template, tensors = flatten(item)
    text = structure_to_json(template, list(map(meta_of, tensors)))
    again = rebuild(structure_from_json(text)[0], tensors)
    assert again[0].tensor is X and again[0].note == "one" and type(again[1]) is Guarded and CALLED == []


@functools.cache
def kinds() -> dict[str, Any]:
    """What keeps data in some way, by name; not made at import, because transformers takes long to import."""
    from transformers import BatchEncoding
    from transformers.modeling_outputs import BaseModelOutput

    return {
        "pair": Pair(X, 2.5),
        "record": Record(X, "hi"),
        "slotted": Slotted(X, 4),
        "ordered": OrderedDict(b=X, a=1),
        "encoding": Encoding({"x": X}, "here"),
        "held": Held(x=X),
        "tokens": BatchEncoding({"input_ids": X.long()}),
        "output": BaseModelOutput(last_hidden_state=X),
        "factory": defaultdict(list, x=[X]),
        "queue": deque([X, 1], maxlen=3),
        "counts": Counter("abca"),
        "space": SimpleNamespace(x=X),
        "colour": {Colour.RED: Colour.RED},
        "array": [np.arange(6, dtype=np.int16).reshape(2, 3), np.float32(1.5), np.array("2020-01-01", "M8[D]")],
        "largest": torch.max(X, 1),
        "size": [torch.Size([2, 3]), torch.bfloat16, torch.channels_last, {(1, "a"): {None: X}}],
        "path": Path("a") / "b",
        "classes": (Record, int, np.int64, torch.Tensor),
        "slices": [slice(1, None, 2), range(3), ..., b"\x00", 1j],
        "packed": nn.utils.rnn.pack_sequence([X[0], X[1, :2]]),
    }  # fmt: skip


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_what_keeps_data_arrives_as_it_was(num_ranks: int) -> None:
    def shown(item: Any) -> Any:
        template, tensors = flatten(item)
        return structure_to_json(template, list(map(meta_of, tensors))), [tensor.tolist() for tensor in tensors]

    def program(rank: int) -> None:
        model = nn.Sequential(*[nn.Linear(2, 2) for _ in range(3)])
        farspan.distribute(model, plan={str(n): f"rank:{n * num_ranks // 3}" for n in range(3)})
        for key, item in kinds().items():
            got = farspan.from_rank(0, copy.copy(item) if rank == 0 else None)
            assert type(got) is type(item), key
            assert shown(got) == shown(item), key

    run_threads(num_ranks, program)


def test_a_class_that_some_program_does_not_name_is_an_error_on_every_rank() -> None:
    """A rank that only names a class takes its objects; a class that it has loaded and does not name it refuses."""
    finished = run_processes(3, PROGRAM)
    for item in finished:
        assert item.code == 0, item.stderr
        taken, words, after = json.loads(item.stdout.splitlines()[-1])
        assert taken == ["Named", "NamedInside"] and after == 7
        assert words == json.loads(finished[0].stdout.splitlines()[-1])[1]
        assert "Fraction" in words and "ranks 1, 2" in words and "from fractions import Fraction" in words


class Chosen(nn.Module):
    """Which class it gives, and how many rows, its data decide."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> Any:
        rows = self.linear(x)[: int(x.sum()) % 2 + 1]
        return Record(Pair(rows, Colour.RED), "rows") if len(rows) else defaultdict(Counter)


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_what_a_call_gives_is_made_of_what_its_code_names(num_ranks: int) -> None:
    models = [nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), Chosen()) for _ in range(num_ranks)]

    def program(rank: int) -> Any:
        model = farspan.distribute(models[rank], plan={str(n): f"rank:{n * num_ranks // 3}" for n in range(3)})
        out = model(X)
        assert type(out) is Record and type(out.tensor) is Pair and out.tensor.right is Colour.RED
        return list(out.tensor.left.shape)

    assert len({tuple(item) for item in run_threads(num_ranks, program)}) == 1
