"""A checkpoint never mixes two steps: whoever writes into what an optimizer keeps while it is copied waits for that.

The copier is held until the program either waits for it, or has written past it: then the file would have other values.
"""

from __future__ import annotations

import copy
import functools
import gc
import os
import pickle
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.state.saving.lent_programs import OPTIMIZERS, Own, Program, check_same, first_of, holding, save_twice
from tests.support.ranks import run_threads
from torch import nn
from torch.utils.dlpack import from_dlpack, to_dlpack

import farspan
from farspan.errors import CheckpointError
from farspan.state.saving import writer


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_step_waits_until_what_it_writes_has_been_copied(tmp_path: Path, name: str) -> None:
    program = Program(OPTIMIZERS[name], is_distributed=False)
    with holding() as hold:
        save_twice(program, tmp_path, program.step, hold)
    assert (hold.num_waits, hold.num_lent > 0) == (1, True)


@pytest.mark.parametrize("name", ["AdamW", "Own"])
def test_a_step_of_several_ranks_waits_too(tmp_path: Path, name: str) -> None:
    def run(rank: int) -> None:
        program = Program(OPTIMIZERS[name], is_distributed=True)
        barrier.wait(20)
        save_twice(program, tmp_path, program.step, hold)

    barrier = threading.Barrier(2)
    with holding(2) as hold:
        run_threads(2, run)
    assert (hold.num_waits, hold.num_lent) == (2, 2 * (1 + (name == "AdamW")))


def test_a_step_with_a_closure_waits_too(tmp_path: Path) -> None:
    """What LBFGS keeps is of all parameters together, some of it in lists."""
    program = Program(lambda items: torch.optim.SGD(items, lr=0.1), is_distributed=False)
    program.optimizer = torch.optim.LBFGS(program.model.parameters(), lr=0.1, max_iter=3)

    def closure() -> torch.Tensor:
        program.optimizer.zero_grad()
        loss = program.model(program.inputs).square().mean()
        loss.backward()
        return loss

    program.optimizer.step(closure)  # type: ignore[arg-type]
    with holding() as hold:
        save_twice(program, tmp_path, lambda: program.optimizer.step(closure), hold)  # type: ignore[arg-type]
    assert hold.num_lent > 0 and hold.num_waits >= 1


def through_attributes(program: Program, parameter: Any, name: str) -> None:
    vars(program.optimizer)["state"][parameter][name].zero_()


def through_state(program: Program, parameter: Any, name: str) -> None:
    for kept in program.optimizer.state.values():
        kept[name].zero_()


def through_a_wrapper(program: Program, parameter: Any, name: str) -> None:
    wrapper: Any = object.__new__(type(program.optimizer))
    wrapper.__dict__.update(vars(program.optimizer))
    program.forward_and_backward()
    wrapper.step()


def through_state_dict(program: Program, parameter: Any, name: str) -> None:
    program.optimizer.state_dict()["state"][0][name].zero_()


def by_loading(program: Program, parameter: Any, name: str) -> None:
    program.optimizer.load_state_dict(copy.deepcopy(program.optimizer.state_dict()))
    program.step()


def with_another_group(program: Program, parameter: Any, name: str) -> None:
    program.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))]})
    program.step()


@pytest.mark.parametrize(
    "write", [through_attributes, through_state, through_a_wrapper, through_state_dict, by_loading, with_another_group]
)
def test_who_writes_into_what_is_kept_waits(tmp_path: Path, write: Callable[[Program, Any, str], None]) -> None:
    program = Program(OPTIMIZERS["AdamW"], is_distributed=False)
    parameter, name = first_of(program)
    with holding() as hold:
        save_twice(program, tmp_path, lambda: write(program, parameter, name), hold)
    assert hold.num_lent > 0 and hold.num_waits >= 1


# What the program holds itself, and writes into without any use of the optimizer.

HELD: dict[str, Callable[[Any, Any, str], Any]] = {
    "the state": lambda state, parameter, name: state,
    "what is kept for a parameter": lambda state, parameter, name: state[parameter],
    "the tensor": lambda state, parameter, name: state[parameter][name],
    "a view": lambda state, parameter, name: state[parameter][name].view(-1),
    "its data": lambda state, parameter, name: state[parameter][name].data,
    "an array": lambda state, parameter, name: state[parameter][name].numpy(),
    "a buffer": lambda state, parameter, name: memoryview(state[parameter][name].numpy()),
    "its memory": lambda state, parameter, name: state[parameter][name].untyped_storage(),
    "a weak reference to its memory": lambda state, parameter, name: weakref.ref(
        state[parameter][name].untyped_storage()
    ),
    "a capsule": lambda state, parameter, name: to_dlpack(state[parameter][name]),
    "a weak reference": lambda state, parameter, name: weakref.ref(state[parameter][name]),
    "a function": lambda state, parameter, name: functools.partial(torch.Tensor.zero_, state[parameter][name]),
    "an iterator": lambda state, parameter, name: begun(iter(state[parameter].values())),
}


def begun(items: Iterator[Any]) -> Iterator[Any]:
    """One that stands at the step count, before the first large tensor."""
    next(items)
    return items


def zero(held: Any, parameter: Any, name: str) -> None:
    """Write through it."""
    if isinstance(held, weakref.ref):
        held = held()
    if isinstance(held, dict):
        held = held.get(parameter, held)
    if isinstance(held, dict):
        held = held[name]
    if isinstance(held, Iterator):
        held = next(held)
    if isinstance(held, functools.partial):
        held()
    elif isinstance(held, memoryview):
        held[0, 0] = 0.5
    elif isinstance(held, np.ndarray):
        held[:] = 0
    elif isinstance(held, torch.Tensor):
        held.zero_()
    elif isinstance(held, torch.UntypedStorage):
        held.fill_(0)  # type: ignore[attr-defined]
    else:
        from_dlpack(held).zero_()


@pytest.mark.parametrize("kind", HELD)
def test_what_the_program_holds_itself_is_copied_at_once(tmp_path: Path, kind: str) -> None:
    program = Program(OPTIMIZERS["AdamW"], is_distributed=False)
    parameter, name = first_of(program)
    held = HELD[kind](program.optimizer.state, parameter, name)
    with holding() as hold:
        save_twice(program, tmp_path, lambda: zero(held, parameter, name), hold)
    assert hold.num_waits == 0  # nobody had to


def test_a_list_of_the_optimizers_own_is_copied_at_once(tmp_path: Path) -> None:
    program = Program(functools.partial(Own, beside=True), is_distributed=False)
    optimizer: Any = program.optimizer
    with holding() as hold:
        save_twice(program, tmp_path, lambda: torch._foreach_zero_(optimizer.beside), hold)
    assert (hold.num_waits, hold.num_lent) == (0, 0)


def test_parameters_are_copied_at_once(tmp_path: Path) -> None:
    """A forward reads them, and any code may write into them: there is no gate."""
    program = Program(OPTIMIZERS["AdamW"], is_distributed=False)
    with holding() as hold:
        save_twice(program, tmp_path, lambda: [p.data.zero_() for p in program.model.parameters()], hold)
    assert (hold.num_waits, hold.num_lent > 0) == (0, True)


# What may be done with an optimizer while its state is lent, and after that.


def test_each_save_is_lent_as_much_as_the_first_one(tmp_path: Path) -> None:
    """A loan that was over went with Python's next collection of garbage, and used the state until then."""
    program = Program(OPTIMIZERS["AdamW"], is_distributed=False)
    found: list[int] = []
    gc.disable()
    try:
        for _ in range(3):
            with holding() as hold:
                saved = farspan.save(tmp_path, model=program.model, optimizer=program.optimizer)
                program.step()
                saved.wait()
            found.append(hold.num_lent)
    finally:
        gc.enable()
    assert found == [4, 4, 4]


def test_it_is_the_same_optimizer_whatever_is_asked_of_it_meanwhile(tmp_path: Path) -> None:
    for ask in (copy.deepcopy, lambda item: pickle.loads(pickle.dumps(item)), copy.copy, lambda item: item):
        program = Program(OPTIMIZERS["AdamW"], is_distributed=False)
        state = vars(program.optimizer)["state"]
        expected = [item.clone() for kept in state.values() for item in kept.values()]
        del state
        with holding() as hold:
            saved = farspan.save(tmp_path, model=program.model, optimizer=program.optimizer)
            found = ask(program.optimizer)
            hold.release()
            saved.wait()
        assert type(found.state) is type(program.optimizer.state)
        items = [item for kept in found.state.values() for item in kept.values()]
        assert all(map(torch.equal, expected, items)) and len(expected) == len(items)
        assert vars(program.optimizer)["state"] is program.optimizer.state


def test_the_next_save_and_a_child_process_find_it(tmp_path: Path) -> None:
    program = Program(OPTIMIZERS["AdamW"], is_distributed=False)
    objects = {"model": program.model, "optimizer": program.optimizer}
    with holding() as hold:
        first = farspan.save(tmp_path, **objects, step=1)
        child = os.fork()
        if child == 0:  # where nobody copies: it does not wait
            os._exit(0 if len(program.optimizer.state) == 4 else 1)
        assert os.waitpid(child, 0)[1] == 0
        hold.release()
        second = farspan.save(tmp_path, **objects, step=2)
        check_same(first.wait(), second.wait())


def test_a_save_that_fails_gives_back_what_it_was_lent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = Program(OPTIMIZERS["AdamW"], is_distributed=False)
    objects = {"model": program.model, "optimizer": program.optimizer}
    with pytest.raises(CheckpointError):
        farspan.save(tmp_path, **objects, extra={"f": print})
    program.step()
    with monkeypatch.context() as patched:
        patched.setattr(writer, "copy_bytes", failing)
        saved = farspan.save(tmp_path, **objects)
        program.step()
        with pytest.raises(CheckpointError, match="no memory"):
            saved.wait()
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", failing)
        farspan.save(tmp_path, **objects)
    program.step()


def test_without_another_thread_a_save_is_over_when_it_returns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It raised on that rank alone; the others, and the end of the program, waited for a thread that never ran."""
    program = Program(OPTIMIZERS["AdamW"], is_distributed=False)
    monkeypatch.setattr(threading.Thread, "start", failing)
    saved = farspan.save(tmp_path, model=program.model, optimizer=program.optimizer)
    assert Path(saved.path).is_dir()
    assert saved.wait() == saved.path


def failing(*args: Any) -> None:
    raise MemoryError("no memory")


class Keeper:
    """An object of the program's that keeps what it has seen when its own state was asked for."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.held: Any = None

    def state_dict(self) -> dict[str, Any]:
        parameter, name = next(self.program.model.parameters()), "exp_avg"
        self.held = self.program.optimizer.state[parameter][name]
        return {}

    def load_state_dict(self, state: Any) -> None:
        pass


def test_code_of_the_program_that_a_save_runs_may_keep_what_it_finds(tmp_path: Path) -> None:
    program = Program(OPTIMIZERS["AdamW"], is_distributed=False)
    objects = {"model": program.model, "optimizer": program.optimizer, "extra": {"keeper": Keeper(program)}}
    first = farspan.save(tmp_path, **objects, step=1, wait=True).wait()
    keeper = objects["extra"]["keeper"] = Keeper(program)
    with holding() as hold:
        second = farspan.save(tmp_path, **objects, step=2)
        keeper.held.zero_()
        hold.release()
        check_same(first, second.wait())
    assert (hold.num_waits, hold.num_lent) == (0, 0)
