"""State dictionaries of what other ranks have: nothing is fetched before it is used, and a file gets one at a time."""

from __future__ import annotations

import copy
import io
import pickle
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.support.ranks import run_threads
from torch import nn

import farspan
from farspan.execute.process.world import current_engine
from farspan.record.saving.reserved import Reserved, fill_reserved, reserved_memory

WIDTH = 300


def build(*, is_moved: bool = True) -> nn.Sequential:
    """Four layers; the weight of one lies in memory in another order than its shape."""
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, WIDTH) for _ in range(4)]
    if is_moved:
        layers[2].weight = nn.Parameter(layers[2].weight.detach().t())
    return nn.Sequential(*layers)


def trained(model: nn.Module, num_steps: int = 1, optimizer: Any = None) -> Any:
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(num_steps):
        optimizer.zero_grad()
        model(torch.ones(2, WIDTH)).square().mean().backward()
        optimizer.step()
    return optimizer


def on_two_ranks(program: Callable[[nn.Module], Any], *, is_moved: bool = True) -> list[Any]:
    """What a program returns on each of two ranks that have two of four layers each."""
    models = [build(is_moved=is_moved) for _ in range(2)]

    def run(rank: int) -> Any:
        return program(farspan.distribute(models[rank], plan={"0": 0, "1": 0, "2": 1, "3": 1}))

    return run_threads(2, run)


def num_unfilled() -> int:
    """Tensors of this rank's program that have no memory yet."""
    return sum(
        not item.is_filled and not item.storage.expired() and item.thread == threading.get_ident()
        for item in reserved_memory.values()
    )


@contextmanager
def most_filled_at_once(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The largest number of tensors of one rank that are filled at the same time within the body."""
    most, lock, filled = [0], threading.Lock(), dict[int, set[int]]()
    fill, empty = Reserved.fill, Reserved._empty

    def filling(item: Reserved) -> None:
        with lock:
            own = filled.setdefault(item.thread, set())
            own.add(id(item))
            most[0] = max(most[0], len(own))
        fill(item)

    def emptying(item: Reserved) -> None:
        with lock:
            filled.setdefault(item.thread, set()).discard(id(item))
        empty(item)

    with monkeypatch.context() as patch:
        patch.setattr(Reserved, "fill", filling)
        patch.setattr(Reserved, "_empty", emptying)
        yield most


def test_torch_save_writes_the_bytes_of_one_process_and_holds_one_tensor_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def saved(model: nn.Module) -> list[bytes]:
        optimizer = trained(model)
        files = [io.BytesIO(), io.BytesIO()]
        torch.save(model.state_dict(), files[0])
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 1}, files[1])
        return [file.getvalue() for file in files]

    wanted = saved(build())
    with most_filled_at_once(monkeypatch) as most:
        assert on_two_ranks(saved) == [wanted, wanted]
    assert most == [1]


def test_a_whole_model_is_pickled_one_tensor_at_a_time_and_by_pickle_itself_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def saved(model: nn.Module) -> Any:
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        state = pickle.loads(pickle.dumps(model.state_dict()))
        return torch.load(file, weights_only=False).state_dict(), state

    wanted = build().state_dict()
    with most_filled_at_once(monkeypatch) as most:
        found = on_two_ranks(saved)
    assert most == [2]  # by pickle itself, which has no file to wait for
    for states in found:
        for state in states:
            assert all(torch.equal(item, wanted[name]) for name, item in state.items())
            assert all(item.stride() == wanted[name].stride() for name, item in state.items())


def test_safetensors_get_the_bytes_of_one_process_and_one_tensor_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def saved(model: nn.Module) -> bytes:
        path = tmp_path / f"{threading.get_ident()}.safetensors"
        save_file({**model.state_dict(), "\u00e9": torch.ones(3, dtype=torch.float16)}, path, {"format": "pt"})
        assert load_file(path).keys() == {*model.state_dict(), "\u00e9"}
        return path.read_bytes()

    wanted = saved(build(is_moved=False))
    with most_filled_at_once(monkeypatch) as most:
        assert on_two_ranks(saved, is_moved=False) == [wanted, wanted]
    assert most == [1]


def test_a_state_dictionary_that_is_used_is_as_alive_as_in_one_process() -> None:
    def program(model: nn.Module) -> Any:
        optimizer = trained(model)
        state = model.state_dict()
        unfilled = num_unfilled()
        seen = [float(state[name].sum()) for name in ("0.weight", "3.weight")]
        trained(model, optimizer=optimizer)
        torch.save(state, file := io.BytesIO())
        file.seek(0)
        later = torch.load(file)
        copied = copy.deepcopy(state)
        return unfilled, seen, *[[float(one[name].sum()) for name in one] for one in (state, later, copied)]

    plain = program(build())
    assert plain[0] == 0
    for found in on_two_ranks(program):
        assert found[0] == 2 and found[1:] == plain[1:]


def test_what_an_optimizer_keeps_is_fetched_before_it_changes() -> None:
    def program(model: nn.Module) -> Any:
        optimizer = trained(model)
        state = optimizer.state_dict()["state"]
        unfilled = num_unfilled()
        wanted = {key: float(item["exp_avg_sq"].sum()) for key, item in copy.deepcopy(state).items()}
        held = optimizer.state_dict()["state"]
        trained(model, optimizer=optimizer)
        assert num_unfilled() == 0
        engine = current_engine()
        others = () if engine is None else ((4, 6), (0, 2))[engine.rank]
        assert all(float(held[key]["exp_avg_sq"].sum()) == wanted[key] for key in others)
        return unfilled, wanted

    (first, own), (second, other) = on_two_ranks(program)
    plain = program(build())
    assert first == second == 4 and plain[0] == 0  # two moments of two weights that another rank has
    assert own == other == plain[1]


def test_nothing_is_without_memory_when_another_thread_gets_it() -> None:
    def program(model: nn.Module) -> Any:
        state = model.state_dict()
        assert num_unfilled() > 0
        sums: list[float] = []
        thread = threading.Thread(target=lambda: sums.extend(float(item.sum()) for item in state.values()))
        thread.start()
        thread.join()
        assert num_unfilled() == 0
        return sums

    wanted = [float(item.sum()) for item in build().state_dict().values()]
    assert on_two_ranks(program) == [wanted, wanted]


def test_hooks_of_state_dictionaries_and_other_models_see_data() -> None:
    def program(model: nn.Module) -> Any:
        model.register_state_dict_post_hook(
            lambda _, state, *__: state.update(total=sum(map(torch.sum, state.values())))
        )
        state = model.state_dict()
        total = float(state.pop("total"))
        other = build()
        other.load_state_dict(state, assign=True)
        assert num_unfilled() == 0
        return total, float(other(torch.ones(2, WIDTH)).sum().detach())

    assert on_two_ranks(program) == [program(build())] * 2


def test_a_flush_fills_what_the_program_holds() -> None:
    def program(model: nn.Module) -> Any:
        state = model.state_dict()
        assert num_unfilled() == 2
        model(torch.ones(2, WIDTH)).sum().item()
        assert num_unfilled() == 0
        del state
        fill_reserved()
        return True

    assert on_two_ranks(program) == [True, True]


def test_farspan_save_has_the_data_of_what_it_is_given(tmp_path: Path) -> None:
    def program(model: nn.Module) -> Any:
        path = farspan.save(tmp_path, extra={"state": dict(model.state_dict())}, step=1, wait=True).path
        return path, farspan.load(path).extra["state"]

    wanted = build().state_dict()
    for _, found in on_two_ranks(program):
        assert found.keys() == wanted.keys() and all(torch.equal(item, wanted[name]) for name, item in found.items())


def test_the_state_of_a_model_built_without_data_stays_where_it_is() -> None:
    """What keeps the memory of a deferred model was taken for a name of the program's, which must have the data."""

    def run(rank: int) -> tuple[int, list[bool]]:
        state = farspan.distribute(models[rank], plan={"0": 0, "1": 0, "2": 1, "3": 1}).state_dict()
        found = num_unfilled()
        return found, [torch.equal(item, wanted[name]) for name, item in state.items()]

    wanted = build(is_moved=False).state_dict()
    with farspan.deferred_init():
        models = [build(is_moved=False) for _ in range(2)]
    assert run_threads(2, run) == [(2, [True] * 8)] * 2
