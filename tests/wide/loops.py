"""Training loops of many kinds, for a model on wide stages and the same model in one process."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from tests.support.ranks import run_threads
from torch import Tensor, nn

import farspan

__all__ = ["LOOPS", "Net", "X", "loop", "loss_of", "run", "state_of"]

_generator = torch.Generator().manual_seed(1)
X = torch.randn(6, 8, generator=_generator)
Y = torch.randint(5, (6,), generator=_generator)
LOOPS: dict[str, Callable[[Any], Any]] = {}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.a, self.b = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.b(F.gelu(self.a(self.norm(x)))))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block() for _ in range(3)])
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def loss_of(model: Any, number: int) -> Tensor:
    return F.cross_entropy(model(X + number), Y)


def state_of(model: Any) -> dict[str, Any]:
    return {name: tensor.tolist() for name, tensor in model.state_dict().items()}


def loop(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    LOOPS[function.__name__] = function
    return function


@loop
def clipped_adamw(model: Any) -> Any:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    found: list[Any] = []
    for _ in range(3):
        optimizer.zero_grad()
        losses = [loss_of(model, number) / 4 for number in range(4)]
        for loss in losses:
            loss.backward()
        found.append(nn.utils.clip_grad_norm_(model.parameters(), 0.5).item())
        optimizer.step()
        found += [loss.item() for loss in losses]
    return found, state_of(model)


@loop
def uneven_numbers(model: Any) -> Any:
    """Of micro-batches, which the members cannot divide evenly."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for count in (3, 1, 5, 2, 4):
        optimizer.zero_grad()
        for number in range(count):
            loss_of(model, number).backward()
        optimizer.step()
    return state_of(model)


@loop
def reads_in_the_middle(model: Any) -> Any:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found: list[Any] = []
    for _ in range(2):
        optimizer.zero_grad()
        for number in range(4):
            loss = loss_of(model, number)
            loss.backward()
            found += [loss.item(), model.head.weight.grad.norm().item()]
        optimizer.step()
    return found, state_of(model)


@loop
def evaluated(model: Any) -> Any:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    found: list[Any] = []
    for _ in range(2):
        optimizer.zero_grad()
        for number in range(4):
            loss_of(model, number).backward()
        optimizer.step()
        model.eval()
        with torch.no_grad():
            found += [model(X + number).sum().item() for number in range(3)]
            outputs = [model(X - number) for number in range(3)]
        found += [output.tolist() for output in outputs]
        model.train()
    return found, state_of(model)


@loop
def two_optimizers(model: Any) -> Any:
    first = torch.optim.SGD(model.blocks.parameters(), lr=0.1)
    second = torch.optim.AdamW(model.head.parameters(), lr=0.01)
    for step in range(3):
        first.zero_grad()
        second.zero_grad()
        for number in range(4):
            loss_of(model, number).backward()
        first.step()
        if step % 2:
            second.step()
    return state_of(model)


@loop
def written_by_hand(model: Any) -> Any:
    """Parameters that no optimizer writes, which members must receive again."""
    for _ in range(2):
        for number in range(3):
            loss_of(model, number).backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.1 * parameter.grad
                parameter.grad = None
    for number in range(2):
        loss_of(model, number).backward()
    for parameter in model.parameters():
        parameter.data.add_(parameter.grad, alpha=-0.1)
    model.head.weight.data = model.head.weight.data * 0.5
    nn.utils.vector_to_parameters(nn.utils.parameters_to_vector(model.parameters()) * 1.01, model.parameters())
    return loss_of(model, 0).item(), state_of(model)


@loop
def averaged(model: Any) -> Any:
    average = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found: list[float] = []
    for _ in range(3):
        optimizer.zero_grad()
        for number in range(3):
            loss_of(model, number).backward()
        optimizer.step()
        with torch.no_grad():
            for own, other in zip(average.parameters(), model.parameters(), strict=True):
                own.lerp_(other, 0.1)
            found.append(average(X).sum().item())
    return found, state_of(model), state_of(average)


@loop
def resumed(model: Any) -> Any:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    kept: Any = None
    for step in range(4):
        optimizer.zero_grad()
        for number in range(3):
            loss_of(model, number).backward()
        optimizer.step()
        if step == 1:
            states = {name: tensor.clone() for name, tensor in model.state_dict().items()}
            kept = states, copy.deepcopy(optimizer.state_dict())
        elif step == 2:
            model.load_state_dict(kept[0])
            optimizer.load_state_dict(kept[1])
    return state_of(model)


@loop
def frozen(model: Any) -> Any:
    model.blocks[0].requires_grad_(False)
    optimizer = torch.optim.SGD([item for item in model.parameters() if item.requires_grad], lr=0.1)
    for step in range(3):
        if step == 2:
            model.blocks[1].a.weight.requires_grad_(False)
        optimizer.zero_grad()
        for number in range(3):
            loss_of(model, number).backward()
        optimizer.step()
    return state_of(model), [item.grad is None for item in model.parameters()]


@loop
def frozen_behind_the_forward(model: Any) -> Any:
    """Autograd adds nothing to the gradient of a parameter that is frozen when it comes there."""
    weight = model.blocks[0].a.weight
    loss = loss_of(model, 0)
    weight.requires_grad_(False)
    loss.backward()
    found = [weight.grad]
    loss_of(model, 1).backward()
    weight.requires_grad_(True)
    loss_of(model, 2).backward()
    return found, [item.grad.tolist() for item in model.parameters()]


@loop
def gradients_held(model: Any) -> Any:
    """Over backwards that add to them, over one that has others, and put back."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    held: list[Any] = []
    found: list[Any] = []
    for number in range(3):
        loss_of(model, number).backward()
        found += [gradient.tolist() for gradient in held]
        held = [parameter.grad for parameter in model.parameters()]
    optimizer.zero_grad()
    loss_of(model, 3).backward()
    found += [gradient.tolist() for gradient in held]
    for parameter, gradient in zip(model.parameters(), held, strict=True):
        parameter.grad = gradient
    loss_of(model, 4).backward()
    found += [gradient.tolist() for gradient in held]
    optimizer.step()
    return found, state_of(model)


@loop
def a_hook_behind_the_forward(model: Any) -> Any:
    loss = loss_of(model, 0)
    model.blocks[0].a.weight.register_hook(lambda gradient: gradient / gradient.norm())
    loss.backward()
    return [item.grad.tolist() for item in model.parameters()]


@loop
def carried_on(model: Any) -> Any:
    """From micro-batch to micro-batch: another member goes on with what one has made, and gradient flows back."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        carried: Any = torch.zeros(6, 8)
        for number in range(4):
            y = X + number + carried.detach()
            for block in model.blocks:
                y = block(y)
            F.cross_entropy(model.head(y), Y).backward()
            carried = y * 0.1
        losses: Any = 0
        carried = carried.detach()
        for number in range(3):
            y = X + number + carried
            for block in model.blocks:
                y = block(y)
            carried = y * 0.1
            losses = losses + F.cross_entropy(model.head(y), Y)
        losses.backward()
        optimizer.step()
    return state_of(model)


@loop
def hooks_on_parameters(model: Any) -> Any:
    seen: list[Any] = []

    def halve(name: str) -> Callable[[Tensor], Tensor]:
        def hook(gradient: Tensor) -> Tensor:
            seen.append((name, gradient.norm().item()))
            return gradient * 0.5

        return hook

    for name, parameter in model.named_parameters():
        if "weight" in name:
            parameter.register_hook(halve(name))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        for number in range(3):
            loss_of(model, number).backward()
        optimizer.step()
    return seen, state_of(model)


@loop
def steps_in_hooks(model: Any) -> Any:
    seen: list[str] = []
    optimizers = {parameter: torch.optim.SGD([parameter], lr=0.1) for parameter in model.parameters()}

    def step(name: str) -> Callable[[Any], None]:
        def hook(parameter: Any) -> None:
            seen.append(name)
            optimizers[parameter].step()
            optimizers[parameter].zero_grad()

        return hook

    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(step(name))
    for number in range(3):
        loss_of(model, number).backward()
    return seen, state_of(model)


@loop
def hooks_on_values(model: Any) -> Any:
    seen: list[float] = []

    def double(gradient: Tensor) -> Tensor:
        seen.append(gradient.norm().item())
        return gradient * 2

    for number in range(3):
        y = X + number
        for block in model.blocks:
            y = block(y)
        y.register_hook(double)
        F.cross_entropy(model.head(y), Y).backward()
    return seen, [item.grad.tolist() for item in model.parameters()]


@loop
def a_hook_on_a_value_of_the_second_micro_batch(model: Any) -> Any:
    """The gradient comes to another member than the first one."""
    loss_of(model, 0).backward()
    y = X + 1
    for block in model.blocks:
        y = block(y)
    y.register_hook(lambda gradient: gradient / gradient.norm())
    F.cross_entropy(model.head(y), Y).backward()
    return [item.grad.tolist() for item in model.parameters()]


@loop
def gradients_asked_for(model: Any) -> Any:
    found: list[Any] = []
    inputs = X.clone().requires_grad_()
    for number in range(3):
        gradients = torch.autograd.grad(loss_of(model, number), list(model.parameters()))
        found += [gradient.sum().item() for gradient in gradients]
        F.cross_entropy(model(inputs + number), Y).backward()
    penalty = sum(item.pow(2).sum() for item in model.parameters())
    (loss_of(model, 1) + 1e-2 * penalty).backward()
    norm = model.blocks[0].a.weight.grad.norm()  # as it is before what comes behind it
    for number in range(3):
        loss_of(model, number).backward()
    return found, norm.item(), inputs.grad, [item.grad.tolist() for item in model.parameters()]


@loop
def scaled(model: Any) -> Any:
    scaler = torch.amp.GradScaler("cpu")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found: list[float] = []
    for _ in range(3):
        optimizer.zero_grad()
        for number in range(3):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = loss_of(model, number)
            scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        found.append(nn.utils.clip_grad_norm_(model.parameters(), 1.0).item())
        scaler.step(optimizer)
        scaler.update()
    return found, state_of(model)


@loop
def closures(model: Any) -> Any:
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, 0) + loss_of(model, 1)
        loss.backward(retain_graph=True)
        (2 * loss).backward()
        return loss

    return [optimizer.step(closure).item() for _ in range(2)], state_of(model)  # type: ignore[arg-type]


def run(loop: str, num_ranks: int, **options: Any) -> tuple[Any, list[Any]]:
    """What the loop gives in one process, and on each rank where the model is distributed with these options."""
    with torch.random.fork_rng():
        torch.manual_seed(3)
        model = Net()
        state = torch.get_rng_state()
        wanted = LOOPS[loop](copy.deepcopy(model))
        torch.set_rng_state(state)
        models = [copy.deepcopy(model) for _ in range(num_ranks)]
        return wanted, run_threads(num_ranks, lambda rank: LOOPS[loop](farspan.distribute(models[rank], **options)))
