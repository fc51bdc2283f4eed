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

_Distribute = Callable[..., nn.Module]
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
    with pytest.raises(farspan.FarspanError, match=r"step\(\), with hooks, of Adam"):
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


def test_a_hook_on_one_rank_from_the_beginning_where_the_whole_view_asks_the_others() -> None:
    """The hook's rank had the whole view, whose step asks for norms; the other took its share, and never answered."""

    def program(rank: int, model: nn.Module) -> list[float]:
        farspan.distribute(model)
        optimizer = torch.optim.Adafactor(model.parameters(), lr=0.01)
        if rank == 0:
            optimizer.register_step_post_hook(lambda *args: None)
        return [_step(model, optimizer, number) for number in range(3)]

    models = [mlp() for _ in range(2)]
    found = run_threads(2, lambda rank: program(rank, models[rank]))
    assert found[0] == found[1] == program(1, mlp())


def test_other_parameters_in_the_place_of_those_that_were_known() -> None:
    """As many as before, and all of them new: their owners alone knew what was kept for them."""

    def program(model: nn.Module, distribute: _Distribute) -> Any:
        parameters = list(model.parameters())
        distribute(model)
        optimizer = torch.optim.SGD([{"params": parameters[:2]}, {"params": parameters[2:6], "momentum": 0.9}], lr=0.01)
        seen: list[Any] = []
        for number in range(6):
            if number == 2:
                optimizer.param_groups[0]["params"] = parameters[6:8]
            if number == 4:
                first, second = optimizer.param_groups
                first["params"], second["params"] = second["params"], first["params"]
            seen.append(_step(model, optimizer, number))
        momenta = [optimizer.state[p].get("momentum_buffer") for p in parameters]
        return seen, [None if item is None else item.sum().item() for item in momenta], weights(model)

    same_everywhere(program, 2)


def test_what_the_program_has_set_to_none_is_made_anew_on_every_rank() -> None:
    def program(model: nn.Module, distribute: _Distribute) -> Any:
        distribute(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        seen: list[Any] = []
        for number in range(5):
            seen.append(_step(model, optimizer, number))
            if number == 2:
                for state in optimizer.state.values():
                    state["momentum_buffer"] = None
        return seen, [state["momentum_buffer"].sum().item() for state in optimizer.state.values()], weights(model)

    same_everywhere(program, 2)


def test_state_that_the_program_goes_on_holding() -> None:
    """Tensors of the state, and its dictionaries: both show what they show in one process, at any later time."""

    def program(model: nn.Module, distribute: _Distribute) -> Any:
        if distribute is farspan.distribute:
            distribute(model, plan={"layers": "rank:0", "head": "rank:1"})  # which no measurement changes
        parameters = list(model.parameters())
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        seen: list[Any] = [_step(model, optimizer, 0)]
        state = optimizer.state
        numbers = [state[parameter]["step"] for parameter in parameters]
        for number in range(4):
            seen.append(_step(model, optimizer, number + 1))
            seen.append([item.item() for item in numbers])
            seen.append([(state[p]["step"] + 1).item() + state[p]["exp_avg"].sum().item() for p in parameters])
            if number == 2:
                state.clear()
                numbers.clear()
        return seen, weights(model), _kept(optimizer)

    same_everywhere(program, 2)


def test_a_step_that_is_given_no_closure_by_name_is_a_share(monkeypatch: pytest.MonkeyPatch) -> None:
    views = _Views(monkeypatch)

    def program(model: nn.Module, distribute: _Distribute) -> Any:
        distribute(model)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        losses: list[float] = []
        for number in range(6):
            optimizer.zero_grad()
            loss = model(X + number).square().mean()
            loss.backward()
            if number == 3:
                optimizer.step(lambda: 0.0)  # the whole view again, once
            else:
                optimizer.step(closure=None) if number % 2 else optimizer.step(None)
            losses.append(loss.item())
        return (losses, weights(model), _kept(optimizer)), views.seen()

    plain, ranks = _on_two_ranks(program)
    assert [numbers for numbers, _ in ranks] == [plain[0]] * 2
    assert [shares for _, (_, shares) in ranks] == [3] * 2


def test_a_scaler_that_gives_each_step_its_scale() -> None:
    """What it gave to all but the first step was one rank's: so became the numbers of steps, of all parameters."""

    def program(model: nn.Module, distribute: _Distribute) -> Any:
        distribute(model)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01, fused=True)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
        seen: list[Any] = []
        for number in range(7):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(X + number), Y) * (float("inf") if number == 4 else 1.0)
            if number == 5:
                loss.backward()
                optimizer.step()
            else:
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
            seen += [loss.item(), scaler.get_scale()]
        return seen, weights(model), _kept(optimizer)

    same_everywhere(program, 2)


def test_another_optimizer_is_given_the_state_while_the_first_steps_are_measured() -> None:
    """What is kept is measured, also where it is shown as recorded tensors at that time."""

    def program(model: nn.Module, distribute: _Distribute) -> Any:
        distribute(model)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        losses = [_step(model, optimizer, number) for number in range(3)]
        other = torch.optim.Adam(model.parameters(), lr=0.02)
        other.load_state_dict(optimizer.state_dict())
        losses += [_step(model, other, number) for number in range(3)]
        return losses, weights(model), _kept(other)

    same_everywhere(program, 2)
