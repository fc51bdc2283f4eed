"""Parameters that lie in slices at the members that use them: the numbers of one process, whatever a loop does."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.split.slices.harness import Act, assert_close, first, run
from tests.support.ranks import run_threads
from tests.wide.loops import Net, loss_of
from torch import nn

import farspan
from farspan.execute.process.world import current_engine
from farspan.execute.slices.moves import Moves

LOOPS: dict[str, Act] = {}
"""What each does in a step, between the backward and the optimizer's step; some of it only from the fifth step on."""
IN_SLICES = {f"blocks.{number}.{name}" for number in range(3) for name in ("a.weight", "a.bias", "b.weight")}


def loop(function: Act) -> Act:
    LOOPS[function.__name__] = function
    return function


@loop
def nothing(model: Any, optimizer: Any, step: int) -> Any:
    return None


@loop
def clips_by_norm(model: Any, optimizer: Any, step: int) -> Any:
    return float(nn.utils.clip_grad_norm_(model.parameters(), 0.1))


@loop
def clips_by_the_largest(model: Any, optimizer: Any, step: int) -> Any:
    return float(nn.utils.clip_grad_norm_(model.parameters(), 0.01, norm_type=float("inf")))


@loop
def clips_by_value(model: Any, optimizer: Any, step: int) -> None:
    nn.utils.clip_grad_value_(model.parameters(), 0.01)


@loop
def logs_norms_one_by_one(model: Any, optimizer: Any, step: int) -> Any:
    return [p.grad.norm().item() for p in model.parameters()]


@loop
def scales_gradients(model: Any, optimizer: Any, step: int) -> None:
    for p in model.parameters():
        p.grad *= 0.5
        p.grad.data.div_(torch.tensor(2.0))


@loop
def clears_gradients_in_place(model: Any, optimizer: Any, step: int) -> Any:
    for p in model.parameters():
        p.grad.detach_().zero_()
    loss_of(model, step + 1).backward()
    return float(first(model).grad.abs().max())


@loop
def writes_into_gradients(model: Any, optimizer: Any, step: int) -> None:
    if step >= 4:
        for p in model.parameters():
            p.grad.add_(torch.full(p.shape, 1e-3))


@loop
def looks_at_gradients(model: Any, optimizer: Any, step: int) -> Any:
    if step < 4:
        return None
    p = first(model)
    return [float(p.grad[0, 0]), p.grad.view(-1)[3:5].tolist(), p.grad.clone().mean().item(), (p.grad * p).sum().item()]


@loop
def keeps_gradients(model: Any, optimizer: Any, step: int) -> Any:
    """A backward adds to those that it has got, of which norms may have been recorded ahead."""
    if step < 4:
        return None
    kept = [p.grad for p in model.parameters()]
    before = float(kept[2].norm())
    loss_of(model, step + 1).backward()
    return [before, *[float(item.norm()) for item in reversed(kept)], float(kept[2].abs().max())]


class Doubled(torch.autograd.Function):
    """A function that is called as one unit."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return 2 * gradients[0]


@loop
def gives_gradients_to_others(model: Any, optimizer: Any, step: int) -> Any:
    if step < 4:
        return None
    with torch.no_grad():
        seen = float(model.head(first(model).grad).sum() + Doubled.apply(first(model).grad).sum())
    first(model).grad = first(model).grad  # it is that already
    model.blocks[2].a.weight.grad = first(model).grad
    model.blocks[1].a.weight.grad = first(model).grad.clone()
    return seen


@loop
def sets_gradients(model: Any, optimizer: Any, step: int) -> None:
    if step == 5:
        first(model).grad = torch.ones_like(first(model))
    if step == 6:
        first(model).grad = None


@loop
def uses_a_whole_one_in_the_loss(model: Any, optimizer: Any, step: int) -> None:
    if step >= 4:
        first(model).pow(2).sum().mul(0.01).backward()


@loop
def writes_parameters(model: Any, optimizer: Any, step: int) -> None:
    with torch.no_grad():
        if step == 4:
            first(model).mul_(0.9)
        if step == 6:
            first(model).data[0].fill_(0.1)
        if step == 7:
            first(model).data = torch.full_like(first(model), 0.01)


@loop
def averages_parameters(model: Any, optimizer: Any, step: int) -> Any:
    if step < 4:
        return None
    with torch.no_grad():
        return [float(p.detach().abs().mean()) for p in model.parameters()]


@loop
def looks_at_state(model: Any, optimizer: Any, step: int) -> Any:
    if step in (4, 6):
        return [float(kept["exp_avg"].abs().sum()) for kept in optimizer.state.values()]
    return None


@loop
def writes_state(model: Any, optimizer: Any, step: int) -> None:
    if step == 5:
        for kept in optimizer.state.values():
            kept["exp_avg"].mul_(0.5)
    if step == 7:
        optimizer.state[first(model)]["exp_avg_sq"] = torch.full_like(first(model), 0.1)


@loop
def replaces_state(model: Any, optimizer: Any, step: int) -> None:
    if step == 5:
        optimizer.state = type(optimizer.state)(dict)


@loop
def resumes(model: Any, optimizer: Any, step: int) -> None:
    if step == 5:
        kept = {name: item.clone() for name, item in model.state_dict().items()}
        model.kept = kept, copy.deepcopy(optimizer.state_dict())
    if step == 7:
        model.load_state_dict(model.kept[0])
        optimizer.load_state_dict(model.kept[1])


@loop
def freezes(model: Any, optimizer: Any, step: int) -> None:
    if step in (4, 6):
        first(model).requires_grad_(step == 6)


@loop
def hooks(model: Any, optimizer: Any, step: int) -> None:
    if step == 4:
        model.handle = first(model).register_hook(lambda gradient: gradient * 0.5)
    if step == 6:
        model.handle.remove()


@loop
def evaluates(model: Any, optimizer: Any, step: int) -> Any:
    with torch.no_grad():
        return float(loss_of(model, 7))


@loop
def steps_with_a_closure(model: Any, optimizer: Any, step: int) -> Any:
    if step != 5:
        return None

    def closure() -> Any:
        optimizer.zero_grad()
        loss = loss_of(model, 11)
        loss.backward()
        return loss

    return float(optimizer.step(closure).detach())


@loop
def adds_a_group(model: Any, optimizer: Any, step: int) -> None:
    if step == 0:
        optimizer.param_groups[0]["params"].pop()  # the head's bias comes later
    if step == 5:
        optimizer.add_param_group({"params": [model.head.bias], "lr": 1e-3})


@loop
def copies_the_model(model: Any, optimizer: Any, step: int) -> Any:
    if step == 5:
        vars(model)["copy"] = copy.deepcopy(model)
    if step == 7:
        with torch.no_grad():
            return [float(loss_of(model.copy, 1)), float(first(model.copy).sum())]
    return None


@loop
def goes_through_a_vector(model: Any, optimizer: Any, step: int) -> None:
    if step == 5:
        vector = nn.utils.parameters_to_vector(model.parameters())
        nn.utils.vector_to_parameters(vector.detach() * 0.9, model.parameters())


@loop
def catches_an_exception(model: Any, optimizer: Any, step: int) -> Any:
    if step != 5:
        return None
    handle = model.head.register_forward_pre_hook(raise_it)
    try:
        float(loss_of(model, 3).detach())
    except ValueError as error:
        return str(error)
    finally:
        handle.remove()


def raise_it(module: Any, args: Any) -> None:
    raise ValueError("not now")


@loop
def makes_another_optimizer(model: Any, optimizer: Any, step: int) -> None:
    if step == 5:
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9).step()


@pytest.mark.parametrize("options", [{"micro_batches": 2}, {"remat": True}], ids=str)
def test_other_options(options: dict[str, Any]) -> None:
    wanted, found = run(clips_by_norm, **options)
    assert_close(found[0][0], wanted)
    assert max(found[0][1]) >= 8


def test_a_gradient_scaler() -> None:
    """It unscales slices, and leaves out a step with an infinite gradient."""

    def on_model(model: Any) -> list[Any]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        scaler: Any = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=3)
        found: list[Any] = []
        model.eval()
        for step in range(7):
            optimizer.zero_grad()
            loss = loss_of(model, step) * (1e38 if step == 4 else 1.0)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            found += [scaler.get_scale(), float(norm) if step != 4 else None]
        engine = current_engine()
        assert engine is None or engine.slices.owned.slices
        return [*found, *[item.tolist() for item in model.state_dict().values()]]

    with torch.random.fork_rng():
        torch.manual_seed(3)
        model = Net()
        wanted = on_model(copy.deepcopy(model))
        models = [copy.deepcopy(model) for _ in range(2)]
        for found in run_threads(2, lambda rank: on_model(farspan.distribute(models[rank], tensor_parallel=2))):
            assert_close(found, wanted)


def test_several_split_stages() -> None:
    wanted, found = run(resumes, 4, stages=2)
    for seen, _ in found:
        assert_close(seen, wanted)
    assert max(found[0][1]) >= 8


def test_one_rank_reads_alone() -> None:
    """The others go on; what it reads is put together for it."""

    def on_rank(rank: int) -> Any:
        torch.manual_seed(3)
        model = farspan.distribute(Net(), tensor_parallel=2)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        found: list[Any] = []
        for step in range(6):
            optimizer.zero_grad()
            loss_of(model, step).backward()
            optimizer.step()
            if rank == step % 2 and step >= 2:
                engine = current_engine()
                assert engine is not None and engine.slices.owned.slices
                p = first(model)
                state = optimizer.state_dict()["state"]
                found.append(p.tolist())
                found.append(float(sum(item["exp_avg"].abs().sum() for item in state.values())))
                found.append(float(sum(item.abs().sum() for item in model.state_dict().values())))
        return found

    with torch.random.fork_rng():
        one, other = run_threads(2, on_rank)
    assert len(one) == len(other) == 6


@pytest.mark.parametrize("name", LOOPS)
def test_one_process_within_rounding(name: str) -> None:
    wanted, found = run(LOOPS[name])
    for seen, _ in found:
        assert_close(seen, wanted)
    assert found[0][1] == found[1][1], "all ranks agree on what lies in slices"
    assert max(found[0][1]) >= 8, "the loop has been in slices"


def test_a_slice_keeps_nothing_else_of_what_it_is_cut_of() -> None:
    whole = torch.arange(8.0).view(4, 2)
    offered = {f"w.0: {what}": whole[:2] for what in ("data", "gradient", "kept momentum")}
    own: Any = SimpleNamespace(name="w.0", tensor=None)
    item: Any = SimpleNamespace(name="w", is_owned=True)
    moves: Any = SimpleNamespace(_nothing={"w": frozenset(["extra"])}, _keys={"w": ["momentum", "extra"]}, _kept={})
    Moves._take(moves, own, item, offered, has_gradient=True)
    kept = moves._kept["w.0"]
    assert kept["extra"] is None
    for each in (own.tensor, own.tensor.grad, kept["momentum"]):
        assert each.tolist() == whole[:2].tolist() and each.untyped_storage().nbytes() == 16
    assert len({each.data_ptr() for each in (own.tensor, own.tensor.grad, kept["momentum"], whole)}) == 4
