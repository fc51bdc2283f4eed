"""What docs/limits.md used to list as noticed by nobody: the numbers of one process, or an error with a name."""

from __future__ import annotations

import contextvars
import gzip
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.support.plainly import X, Y, assert_same_as_plainly, train
from tests.support.ranks import run_processes, run_threads
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import farspan
from farspan.errors import RecordError
from farspan.record import recorder
from farspan.record.surgery.opened import call_parts

FACTOR = contextvars.ContextVar("factor", default=1.0)
BARE: contextvars.ContextVar[float] = contextvars.ContextVar("bare")


def layers() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 5))


def on_two_ranks(build: Callable[[], nn.Module], program: Callable[[Any], Any]) -> list[Any]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        models = [build() for _ in range(2)]
        models[1].load_state_dict(models[0].state_dict())
    return run_threads(2, lambda rank: program(farspan.distribute(models[rank])))


# Modules, and what they read.


class ClearsOnItsWay(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        if x.mean() > 2.2:  # in the last of the four micro-batches
            self.linear.weight.grad = None
            return self.linear(x) * 2
        return self.linear(x)


def test_a_gradient_that_a_module_clears_for_its_data_before_it_is_whole_is_an_error() -> None:
    with pytest.raises(RecordError, match=r"uses 0.linear.weight.grad in its forward, before an earlier micro-batch"):
        on_two_ranks(lambda: nn.Sequential(ClearsOnItsWay(), nn.Linear(8, 5)), train)


def test_a_gradient_that_a_module_clears_for_its_data_is_right_where_its_backwards_have_run() -> None:
    def program(model: Any) -> Any:
        for shift in range(4):
            F.cross_entropy(model(X + shift), Y).backward()
            farspan.flush()
        return [parameter.grad.tolist() for parameter in model.parameters()]

    assert_same_as_plainly(lambda: nn.Sequential(ClearsOnItsWay(), nn.Linear(8, 5)), program, 2)


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * FACTOR.get()


class ScaledByBare(Scaled):
    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * BARE.get(1.0)


def losses_while(change: Callable[[float], object], *, late: bool = False) -> Callable[[Any], Any]:
    """Four losses, of which none is read before the last change."""

    def program(model: Any) -> Any:
        losses = []
        for number in range(4):
            if not late:
                change(float(number))
            losses.append(F.cross_entropy(model(X), Y))
            if late:
                change(float(number))
        return [loss.item() for loss in losses]

    return program


def test_a_call_sees_the_context_variable_that_it_was_made_with() -> None:
    assert_same_as_plainly(lambda: nn.Sequential(nn.Linear(8, 8), Scaled()), losses_while(FACTOR.set), 2)


def test_a_context_variable_that_had_no_value_at_the_call_is_an_error() -> None:
    program = losses_while(BARE.set, late=True)
    with pytest.raises(RecordError, match="the context variable bare had no value"):
        on_two_ranks(lambda: nn.Sequential(nn.Linear(8, 8), ScaledByBare()), program)


DEFAULTS = """
import copy, os
import torch
from torch import nn
import farspan

def scaled(x, factor=1.0):
    return x * factor

class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return scaled(self.linear(x))

def losses(model):
    found = []
    for number in range(3):
        found.append(model(torch.ones(2, 4)).sum())
        scaled.__defaults__ = (0.5 + number,)
    scaled.__defaults__ = (1.0,)
    return [loss.item() for loss in found]

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 4), Scaled())
plain = losses(copy.deepcopy(model))
assert losses(farspan.distribute(model)) == plain, plain
"""


def test_a_call_sees_the_defaults_that_it_was_made_with(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(DEFAULTS)
    assert [(each.code, each.stderr[-500:]) for each in run_processes(2, script) if each.code] == []


class Projects(nn.Module):
    """It has drawn a tensor that it has not registered."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 5)
        self.projection = torch.full((5,), value)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.projection


def test_plain_tensors_that_modules_hold_are_those_of_rank_0() -> None:
    def program(rank: int) -> Any:
        torch.manual_seed(0)
        projects = Projects(1.0 + rank)
        model = farspan.distribute(nn.Sequential(nn.Linear(8, 8), projects))
        return model(X).sum().item(), projects.projection.tolist()

    first, second = run_threads(2, program)
    assert first == second
    assert first[1] == [1.0] * 5


class Checkpointed(nn.Module):
    """Its parts are on two ranks; a checkpoint runs two of them."""

    def __init__(self, *, use_reentrant: bool) -> None:
        super().__init__()
        self.use_reentrant = use_reentrant
        self.first, self.norm, self.last = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        def inside(y: Tensor) -> Tensor:
            return self.norm(self.first(y))

        return self.last(checkpoint(inside, x, use_reentrant=self.use_reentrant))


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_checkpoint_in_which_one_process_counts_a_batch_twice_is_an_error(use_reentrant: bool) -> None:
    def program(model: Any) -> None:
        F.cross_entropy(model(X.clone().requires_grad_()), Y).backward()
        farspan.flush()

    with pytest.raises(RecordError, match="its buffers or attributes would count twice"):
        on_two_ranks(lambda: Checkpointed(use_reentrant=use_reentrant), program)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_hook_that_one_process_calls_twice_in_a_checkpoint_may_change_what_a_module_gives_but_keep_nothing(
    use_reentrant: bool,
) -> None:
    def program(model: Any, hook: Callable[..., Any]) -> Any:
        model.norm.eval()
        model.first.register_forward_hook(hook)
        F.cross_entropy(model(X.clone().requires_grad_()), Y).backward()
        return [parameter.grad.tolist() for parameter in model.parameters()]

    def build() -> nn.Module:
        return Checkpointed(use_reentrant=use_reentrant)

    assert_same_as_plainly(build, lambda model: program(model, lambda module, args, result: result * 0.9), 2)
    seen: list[Tensor] = []
    with pytest.raises(RecordError, match="in a checkpoint whose parts"):
        on_two_ranks(build, lambda model: program(model, lambda module, args, result: seen.append(result)))


def test_a_normalisation_in_a_checkpoint_that_nothing_differentiates_is_that_of_one_process() -> None:
    def program(model: Any) -> Any:
        model.norm.eval()
        trained = train(model)
        model.train()
        with torch.no_grad():
            return trained, model(X).tolist(), model.norm.running_mean.tolist()

    assert_same_as_plainly(lambda: Checkpointed(use_reentrant=False), program, 2)


# Steps and parameters.


def steps_in(*, is_one_region: bool) -> Callable[[Any], Any]:
    def program(model: Any) -> Any:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses = []
        with torch.autocast("cpu", torch.bfloat16, enabled=is_one_region):
            for _ in range(3):
                optimizer.zero_grad()
                with torch.autocast("cpu", torch.bfloat16):
                    loss = F.cross_entropy(model(X), Y)
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
        return losses

    return program


def test_a_forward_after_a_step_in_one_autocast_region_is_an_error() -> None:
    with pytest.raises(RecordError, match=r"0.weight is used after optimizer.step\(\) in the same autocast region"):
        on_two_ranks(layers, steps_in(is_one_region=True))


def test_steps_at_the_end_of_autocast_regions_are_those_of_one_process() -> None:
    def program(model: Any) -> Any:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses = []
        for _ in range(3):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                loss = F.cross_entropy(model(X), Y)
                loss.backward()
                optimizer.step()
            losses.append(loss.item())
        return losses

    assert_same_as_plainly(layers, program, 2)


def made_of_another(*, trains_both: bool) -> Callable[[Any], Any]:
    def program(model: Any) -> Any:
        model[1].weight = nn.Parameter(model[0].weight)
        if not trains_both:
            model[0].weight.requires_grad_(False)
        optimizer = torch.optim.SGD([item for item in model.parameters() if item.requires_grad], lr=0.1)
        F.cross_entropy(model(X), Y).backward()
        optimizer.step()
        return model[1].weight.tolist()

    return program


def test_a_parameter_made_of_another_with_both_trained_is_an_error() -> None:
    with pytest.raises(RecordError, match=r"0\.weight and the nn.Parameter that was made of it are both trained"):
        on_two_ranks(layers, made_of_another(trains_both=True))


def test_a_parameter_made_of_another_may_be_trained_alone() -> None:
    assert_same_as_plainly(layers, made_of_another(trains_both=False), 2)


@pytest.mark.filterwarnings("ignore:Using a non-full backward hook")
def test_a_deprecated_hook_that_prints_where_nobody_reads_it_is_an_error() -> None:
    def program(model: Any) -> Any:
        model[2].register_backward_hook(lambda module, given, got: print("backward"))
        return train(model)

    with pytest.raises(RecordError, match="does what only rank 1 would show: it prints"):
        on_two_ranks(layers, program)


# Lines and files.


class Complains(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        print("a line of the module", file=sys.stderr)
        return self.linear(x)


def test_a_line_to_standard_error_is_printed_once_a_call_on_each_rank(capsys: pytest.CaptureFixture[str]) -> None:
    on_two_ranks(lambda: nn.Sequential(Complains(), nn.Linear(8, 5)), train)
    assert capsys.readouterr().err.count("a line of the module") == 2 * 8


class Logs(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        assert logging.lastResort is not None  # what writes where a program has not set up its logs
        logging.lastResort.handle(logging.makeLogRecord({"msg": "a word of the module", "levelno": logging.ERROR}))
        return super().forward(input)


def test_a_module_that_logs_to_standard_error_stays_one_unit(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[Any] = []
    monkeypatch.setattr(recorder, "call_parts", lambda *args: opened.append(args) or call_parts(*args))
    on_two_ranks(lambda: nn.Sequential(Logs(8, 8), nn.Linear(8, 5)), train)
    assert not opened


COMPRESSED = """
import gzip, os, sys
import torch
from torch import nn
import farspan

class Net(nn.Linear):
    pass

model = farspan.distribute(nn.Sequential(Net(4, 4), Net(4, 4)))
log = gzip.open(f"{os.environ['OUR_FILES']}/{os.environ['RANK']}.gz", "wt")
print(model(torch.ones(1, 4)).shape, file=log)
"""


def test_a_compressed_file_that_is_left_open_is_whole(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(COMPRESSED)
    found = run_processes(2, script, environment={"OUR_FILES": str(tmp_path)})
    assert [each.stderr[-500:] for each in found if each.code] == []
    for rank in range(2):
        with gzip.open(tmp_path / f"{rank}.gz", "rt") as file:
            assert file.read() == "torch.Size([1, 4])\n"
