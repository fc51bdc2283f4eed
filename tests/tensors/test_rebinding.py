"""`x.data = value` gives x the memory of value; who shared its memory before keeps the old one."""

from __future__ import annotations

from collections import deque
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.support.loop import X, Y, mlp, on_ranks, same_everywhere, weights
from tests.support.ranks import run_threads
from torch import Tensor, nn

import farspan
from farspan.errors import RecordError


class Average:
    """The class that is found in a thousand repositories."""

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.model, self.decay = model, decay
        self.shadow = {name: param.data.clone() for name, param in model.named_parameters()}
        self.backup: dict[str, Tensor] = {}

    def update(self) -> None:
        for name, param in self.model.named_parameters():
            new_average = (1.0 - self.decay) * param.data + self.decay * self.shadow[name]
            self.shadow[name] = new_average.clone()

    def apply_shadow(self) -> None:
        for name, param in self.model.named_parameters():
            self.backup[name] = param.data
            param.data = self.shadow[name]

    def restore(self) -> None:
        for name, param in self.model.named_parameters():
            param.data = self.backup[name]
        self.backup = {}


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> float:
    optimizer.zero_grad()
    loss = F.cross_entropy(model(X), Y)
    loss.backward()
    optimizer.step()
    return loss.item()


def average_that_is_applied_and_restored(model: nn.Module) -> Any:
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    average, seen = Average(model, 0.9), []
    for _ in range(2):
        seen.append(step(model, optimizer))
        average.update()
        average.apply_shadow()
        seen.append(weights(model))
        average.restore()
        seen.append(weights(model))
    average.apply_shadow()
    step(model, optimizer)  # changes the shadow too, whose memory it is
    return seen, [item.tolist() for item in (*average.shadow.values(), *average.backup.values())]


def moving_average_of_gradients(model: nn.Module) -> Any:
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    last = {name: deque(maxlen=2) for name, _ in model.named_parameters()}
    for _ in range(4):
        optimizer.zero_grad()
        F.cross_entropy(model(X), Y).backward()
        for name, param in model.named_parameters():
            assert param.grad is not None
            last[name].append(param.grad.data.detach())
            if len(last[name]) == 2:
                param.grad.data = param.grad.data + sum(last[name]) / 2 * 5.0
        optimizer.step()
    return weights(model), [[item.tolist() for item in items] for items in last.values()]


def aliases(model: Any) -> Any:
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    p, q = model.head.weight, model.layers[0].weight
    old = [p.data, p.detach(), p.data.view(-1), p.view(-1).detach()]
    state = model.state_dict()["head.weight"]
    p.data = p.data * 2
    seen = [item.tolist() for item in (*old, state, p)]
    p.data.add_(1.0)
    old[0].mul_(3)
    seen += [item.tolist() for item in (*old, p)]
    plain, elsewhere = torch.ones(12, 12), model.layers[5].weight.data * 2
    q.data = plain
    model.layers[1].weight.data = elsewhere
    step(model, optimizer)
    plain.add_(1)
    return seen, plain.tolist(), elsewhere.tolist(), weights(model)


def recorded_and_plain(model: nn.Module) -> Any:
    y, z, w, v = model(X).detach(), model(X + 1).detach(), torch.zeros(6, 5), torch.zeros(6, 5)
    old, row = y.view(-1), y[0]
    y.data = z
    y.mul_(2)
    w.data = z
    w.add_(1)
    u = model(X).detach()
    u.data = v
    u.add_(1)
    gradient = model.head.weight.grad  # type: ignore[union-attr]
    assert gradient is None
    return [item.tolist() for item in (y, z, w, v, u, old, row)]


def parts_of_a_vector(model: Any) -> Any:
    """What steps make of the parameters is in the vector whose parts they are, and what is written into it in them."""
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    parameters, seen = list(model.parameters()), []
    start = nn.utils.parameters_to_vector(parameters).detach()
    first = start[:3]
    step(model, optimizer)
    nn.utils.vector_to_parameters(start, parameters)
    seen += [start.norm().item(), step(model, optimizer), start.tolist(), first.tolist()]
    first.zero_()
    seen += [step(model, optimizer), start.tolist()]
    other = torch.linspace(-1, 1, start.numel())
    nn.utils.vector_to_parameters(other, parameters)
    seen += [start.tolist(), step(model, optimizer), other.tolist()]
    other[5:50] = 0.5
    with torch.no_grad():
        parameters[-1].add_(1)
    return [*seen, other.tolist(), step(model, optimizer), start.tolist()]


def memory_of_another_model(model: Any) -> Any:
    optimizer, other, seen = torch.optim.SGD(model.parameters(), 0.1), mlp(), []
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        p.data = q.data
    for _ in range(2):
        seen += [step(model, optimizer), [q.tolist() for q in other.parameters()]]
        with torch.no_grad():
            for q in other.parameters():
                q.mul_(0.5)
    return [*seen, weights(model)]


def state_held_while_memory_goes_and_comes(model: Any) -> Any:
    """Two state dictionaries are the memory that the parameters had when they were made, also while these have other
    memory, and are written by either of them or by what the program has kept of it."""
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    first, second, seen = model.state_dict(), model.state_dict(), []

    def see(*more: Tensor) -> None:
        seen.append([item.tolist() for item in (*first.values(), *second.values(), *more)])

    step(model, optimizer)
    old = [p.data for p in model.parameters()]
    row, head = old[0][1], model.head.weight
    for p in model.parameters():
        p.data = p.data * 2
    see()
    old[0].mul_(3)
    old[-1][:2] = 1.0
    see(*old, row)
    step(model, optimizer)
    copies = [item.clone() for item in old]
    for item in first.values():
        item.mul_(0.5)
    see(*copies, *old, row)
    row.zero_()
    see(*old)
    for p, item in zip(model.parameters(), old, strict=True):
        p.data = item
    see(row)
    step(model, optimizer)
    see(row)
    for item in second.values():
        item.add_(0.1)
    step(model, optimizer)
    see(row, *old)
    head.data = torch.ones_like(head)
    second["head.weight"].add_(1.0)
    see(head)
    return seen, weights(model)


def memory_that_comes_back_as_a_part_of_itself(model: Any) -> Any:
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    first, p = model.state_dict(), model.head.weight
    step(model, optimizer)
    second, old, seen = model.state_dict(), p.data, []
    p.data = p.data * 2
    p.data = old.view(-1).view(p.shape)
    for _ in range(2):
        seen += [[state["head.weight"].tolist() for state in (first, second)], old.tolist(), step(model, optimizer)]
        first["head.weight"].mul_(0.5)
        seen += [second["head.weight"].tolist(), step(model, optimizer)]
        old.add_(0.25)
    return seen, second["head.weight"].tolist(), weights(model)


STORIES = [
    memory_that_comes_back_as_a_part_of_itself,
    state_held_while_memory_goes_and_comes,
    average_that_is_applied_and_restored,
    moving_average_of_gradients,
    aliases,
    recorded_and_plain,
    parts_of_a_vector,
    memory_of_another_model,
]


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@pytest.mark.parametrize("story", STORIES)
def test_data_is_rebound_as_in_one_process(story: Any, num_ranks: int) -> None:
    wanted = story(mlp())
    for rank, got in enumerate(on_ranks(num_ranks, lambda model: story(farspan.distribute(model)))):
        assert got == wanted, f"rank {rank}"


def test_two_parameters_cannot_come_to_share_memory() -> None:
    def share(model: Any) -> None:
        model = farspan.distribute(model)
        model.layers[0].weight.data = model.layers[5].weight.data

    with pytest.raises(RecordError, match=r"share its memory with layers\.5\.weight"):
        on_ranks(2, share)


class Symmetric(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.triu() + x.triu(1).mT

    def right_inverse(self, x: Tensor) -> Tensor:
        return x.triu()


def test_a_parametrized_weight_is_set() -> None:
    """`right_inverse` ends in `set_`, which no function mode sees: an error, and on one rank alone."""

    def program(model: nn.Module, distribute: Any) -> Any:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2))
        with torch.no_grad():
            for number, parameter in enumerate(model.parameters()):
                parameter.fill_(0.1 * (number + 1))
        for layer in list(model)[:2]:
            nn.utils.parametrize.register_parametrization(layer, "weight", Symmetric())
        distribute(model)
        loss = model(torch.ones(3, 4)).square().mean()  # runs with what was there
        model[0].weight = torch.eye(4)
        model[1].weight = torch.arange(16.0).view(4, 4)
        later = model(torch.ones(3, 4)).square().mean()
        return loss.item(), later.item(), model[1].weight.tolist(), weights(model)

    same_everywhere(program, 2)


def test_memory_set_in_a_parameter_is_shared() -> None:
    def program(model: nn.Module, distribute: Any) -> Any:
        distribute(model)
        seen: list[Any] = []
        for parameter in model.parameters():
            value = torch.full(parameter.shape, 0.5)
            before = parameter.data
            with torch.no_grad():
                parameter.set_(value)  # type: ignore[arg-type]
                value.mul_(2)
            seen += [parameter.sum().item(), before.sum().item()]
        return seen, weights(model)

    same_everywhere(program, 2)


def test_a_parameter_is_not_set_to_a_storage() -> None:
    def program(model: nn.Module) -> None:
        farspan.distribute(model)
        with pytest.raises(RecordError, match="cannot be recorded"):
            next(model.parameters()).set_(torch.ones(4).untyped_storage(), 0, (2, 2))  # type: ignore[call-overload]

    on_ranks(2, program)


@pytest.mark.filterwarnings("ignore:.*torch.jit.trace.*:DeprecationWarning")
def test_a_distributed_model_is_not_traced() -> None:
    def program(model: nn.Module) -> None:
        farspan.distribute(model)
        with pytest.raises(RecordError, match="cannot be traced"):
            torch.jit.trace(model, X)

    on_ranks(2, program)


class _Flattening(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.flat, self.layer, self.other = nn.Flatten(0), nn.Linear(3, 2), nn.Linear(3, 2)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_what_a_module_has_taken_of_memory_stays_what_it_was_when_a_parameter_gets_that_memory(num_ranks: int) -> None:
    def program(model: Any) -> Any:
        whole = torch.cat([p.detach().flatten() for p in model.parameters()]) * 2
        taken = model.flat(whole[2:6].view(2, 2))
        model.layer.weight.data = whole[:6].view(2, 3)
        return taken.tolist(), whole.tolist(), model.layer.weight.tolist()

    def build() -> nn.Module:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            return _Flattening()

    wanted = program(build())
    for got in on_ranks(num_ranks, lambda model: program(farspan.distribute(model)), build):
        assert got == wanted


@pytest.mark.parametrize(
    ("relay", "hint"),
    [
        (lambda model: model.to(memory_format=torch.channels_last), "before farspan.distribute(model)"),
        (lambda model: model.to("cpu", memory_format=torch.channels_last), "before farspan.distribute(model)"),
        (lambda model: setattr(model[1].weight, "data", model[1].weight.data.t().contiguous().t()), "copy_(value)"),
        (lambda model: setattr(model[1].weight, "data", torch.ones(4, 6).t()), "copy_(value)"),
    ],
    ids=["channels_last", "channels_last and a device", "recorded", "plain"],
)
def test_another_memory_layout_is_an_error(relay: Any, hint: str) -> None:
    """In one process results, and the order of sums, follow it."""

    def program(rank: int) -> str:
        model = farspan.distribute(models[rank])
        with pytest.raises(RecordError, match="would give it another memory layout") as caught:
            relay(model)
        return caught.value.hint

    models = [nn.Sequential(nn.Conv2d(2, 3, 3), nn.Linear(4, 6)) for _ in range(2)]
    assert all(hint in found for found in run_threads(2, program))


def test_the_same_memory_layout_is_none() -> None:
    """A stride along one element says nothing."""
    models = [nn.Sequential(nn.Conv2d(2, 3, 1), nn.Linear(4, 6)) for _ in range(2)]

    def program(rank: int) -> None:
        model: Any = farspan.distribute(models[rank])
        model.to(memory_format=torch.channels_last)

    run_threads(2, program)
