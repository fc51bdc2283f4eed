"""Optimizers that treat each parameter by itself: each rank steps its own ones, and everything is as in one process."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.support.loop import X, Y, mlp, on_ranks, same_everywhere, weights
from tests.support.ranks import run_threads
from torch import nn

import farspan
from farspan.execute.optimizers.own import is_own
from farspan.execute.optimizers.own_share import OwnShares
from farspan.execute.optimizers.step_view import StepView
from farspan.record.tensor import LazyTensor

_Distribute = Callable[[nn.Module], nn.Module]
_Make = Callable[[list[nn.Parameter]], torch.optim.Optimizer]

_OPTIMIZERS: dict[str, _Make] = {
    "adam": lambda params: torch.optim.Adam(params, lr=0.01),
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.01, amsgrad=True),
    "sgd": lambda params: torch.optim.SGD(params, lr=0.01),
    "momentum": lambda params: torch.optim.SGD(params, lr=0.01, momentum=0.9, foreach=True),
    "asgd": lambda params: torch.optim.ASGD(params, lr=0.01),
    "adadelta": lambda params: torch.optim.Adadelta(params),
    "adafactor": lambda params: torch.optim.Adafactor(params, lr=0.01),
    "adagrad": lambda params: torch.optim.Adagrad(params, lr=0.01),
    "adamax": lambda params: torch.optim.Adamax(params, lr=0.01),
    "muon": lambda params: torch.optim.Muon([p for p in params if p.dim() == 2], lr=0.01),
    "nadam": lambda params: torch.optim.NAdam(params, lr=0.01),
    "radam": lambda params: torch.optim.RAdam(params, lr=0.01),
    "rmsprop": lambda params: torch.optim.RMSprop(params, lr=0.01, centered=True),
    "rprop": lambda params: torch.optim.Rprop(params, lr=0.01),
    "fused": lambda params: torch.optim.AdamW(params, lr=0.01, fused=True),
}


class _Views:
    """Counts, by thread, steps in the view of the whole model and those that were asked to be a share."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.whole: Counter[int] = Counter()
        self.shares: Counter[int] = Counter()
        begin, take = StepView.begin, OwnShares.take

        def counting_begin(view: StepView) -> None:
            self.whole[threading.get_ident()] += 1
            begin(view)

        def counting_take(*args: Any, **kwargs: Any) -> Any:
            share = take(*args, **kwargs)
            self.shares[threading.get_ident()] += share is not None
            return share

        monkeypatch.setattr(StepView, "begin", counting_begin)
        monkeypatch.setattr(OwnShares, "take", counting_take)

    def seen(self) -> tuple[int, int]:
        """Of this thread: steps in the whole view, and shares."""
        return self.whole[threading.get_ident()], self.shares[threading.get_ident()]


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, shift: int) -> float:
    optimizer.zero_grad()
    loss = F.cross_entropy(model(X + shift), Y)
    loss.backward()
    optimizer.step()
    return loss.item()


def _kept(optimizer: torch.optim.Optimizer) -> Any:
    state = optimizer.state_dict()["state"]
    return {key: {name: torch.as_tensor(item).tolist() for name, item in state[key].items()} for key in sorted(state)}


def _on_two_ranks(program: Callable[[nn.Module, _Distribute], Any]) -> tuple[Any, list[Any]]:
    """What it gives in the plain loop, and by rank."""
    plain = program(mlp(), lambda model: model)
    return plain, on_ranks(2, lambda model: program(model, farspan.distribute))


@pytest.mark.parametrize("name", list(_OPTIMIZERS))
def test_all_but_the_first_step_are_shares_and_give_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    views = _Views(monkeypatch)

    def program(model: nn.Module, distribute: _Distribute) -> Any:
        distribute(model)
        optimizer = _OPTIMIZERS[name](list(model.parameters()))
        losses = [_step(model, optimizer, shift) for shift in range(4)]
        if distribute is farspan.distribute:  # of what is kept, every tensor is its owner's
            tensors = [
                item for state in vars(optimizer)["state"].values() for item in state.values() if item is not None
            ]
            assert all(type(tensor) is LazyTensor or is_own(tensor) for tensor in tensors)
        return (losses, weights(model), _kept(optimizer)), views.seen()

    plain, ranks = _on_two_ranks(program)
    assert [numbers for numbers, _ in ranks] == [plain[0]] * 2
    assert [seen for _, seen in ranks] == [(1, 3)] * 2


def test_what_may_be_kept_anew_is_seen_by_the_whole_view(monkeypatch: pytest.MonkeyPatch) -> None:
    views = _Views(monkeypatch)

    def program(model: nn.Module, distribute: _Distribute) -> Any:
        parameters = list(model.parameters())
        distribute(model)
        parameters[0].requires_grad_(False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        seen: list[Any] = []
        losses: list[float] = []
        for number in range(10):
            if number == 2:
                parameters[0].requires_grad_(True)
            if number == 4:
                optimizer.param_groups[0]["momentum"] = 0.9
            if number == 6:
                optimizer.param_groups[0]["lr"] = 0.05  # what is kept does not depend on it
            if number == 7:
                optimizer.register_step_pre_hook(lambda *args: None)
            losses.append(_step(model, optimizer, number))
            seen.append(views.seen())
        kept = [(item["momentum_buffer"] ** 2).sum().item() for item in optimizer.state.values()]
        return (losses, weights(model), kept), [whole for whole, _ in seen]

    plain, ranks = _on_two_ranks(program)
    assert [numbers for numbers, _ in ranks] == [plain[0]] * 2
    assert [seen for _, seen in ranks] == [[1, 1, 2, 2, 3, 3, 3, 4, 5, 6]] * 2


def test_numbers_are_known_to_all_again_when_the_whole_view_returns(monkeypatch: pytest.MonkeyPatch) -> None:
    """It reads them: a question between the ranks for each parameter in each step, if they were not."""
    views = _Views(monkeypatch)

    def program(model: nn.Module, distribute: _Distribute) -> Any:
        distribute(model)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        losses = [_step(model, optimizer, shift) for shift in range(3)]
        optimizer.register_step_post_hook(lambda *args: None)
        losses.append(_step(model, optimizer, 3))
        steps = [item["step"] for item in vars(optimizer)["state"].values()]
        assert {type(step) for step in steps} == {torch.Tensor}
        return (losses, [step.item() for step in steps], weights(model), _kept(optimizer)), views.seen()

    plain, ranks = _on_two_ranks(program)
    assert [numbers for numbers, _ in ranks] == [plain[0]] * 2
    assert [seen for _, seen in ranks] == [(2, 2)] * 2


def test_one_rank_may_have_a_hook_from_the_beginning_and_not_suddenly() -> None:
    def program(rank: int, model: nn.Module, first: int) -> list[float]:
        farspan.distribute(model)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        losses: list[float] = []
        for number in range(4):
            if rank == 0 and number == first:
                optimizer.register_step_post_hook(lambda *args: None)
            losses.append(_step(model, optimizer, number))
        return losses

    models = [mlp() for _ in range(2)]
    found = run_threads(2, lambda rank: program(rank, models[rank], 0))
    assert found[0] == found[1] == program(1, mlp(), 0)
    others = [mlp() for _ in range(2)]
    with pytest.raises(farspan.FarspanError, match=r"step\(\), with new hooks, of Adam"):
        run_threads(2, lambda rank: program(rank, others[rank], 2))


def test_state_that_is_read_written_replaced_and_loaded_between_shares() -> None:
    def program(model: nn.Module, distribute: _Distribute) -> Any:
        distribute(model)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        seen: list[Any] = []
        saved: Any = None
        for number in range(12):
            seen.append(_step(model, optimizer, number))
            states = list(optimizer.state.values()) if number % 2 else []
            seen.append([(int(state["step"]), state["exp_avg"].sum().item()) for state in states])
            if number == 3:
                for state in states:
                    state["step"] = torch.tensor(1.0)
            if number == 5:
                saved = optimizer.state_dict()
            if number == 6:
                optimizer.state.clear()
            if number == 8:
                optimizer.load_state_dict(saved)
            if number == 9:
                del optimizer.state[next(iter(model.parameters()))]
        return seen, weights(model), _kept(optimizer)

    same_everywhere(program)


def test_groups_of_which_a_rank_has_nothing() -> None:
    def program(model: nn.Module, distribute: _Distribute) -> Any:
        distribute(model)
        groups = [{"params": [p], "lr": 0.01 * (n + 1)} for n, p in enumerate(model.parameters())]
        optimizer = torch.optim.AdamW(groups)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=8)
        seen: list[Any] = []
        for number in range(6):
            seen.append(_step(model, optimizer, number))
            scheduler.step()
        return seen, scheduler.get_last_lr(), weights(model), _kept(optimizer)

    same_everywhere(program, 4)
