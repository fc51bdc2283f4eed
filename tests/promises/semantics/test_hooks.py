"""Hooks, checkpoints, parametrizations and loading: as in the plain program, or a named error on every rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.support.plainly import X, Y, assert_same_as_plainly, train
from tests.support.ranks import run_threads
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, spectral_norm
from torch.utils.checkpoint import checkpoint

import farspan
from farspan.errors import FarspanError, RecordError


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)) for _ in range(4)])
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


# Hooks.


def hooks_on_parameters(model: Any) -> Any:
    def halve(parameter: Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad.mul_(0.5)

    for parameter in model.parameters():
        parameter.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
    model.head.weight.register_post_accumulate_grad_hook(halve)
    return train(model)


def hooks_that_are_removed(model: Any) -> Any:
    handles = [parameter.register_hook(lambda gradient: gradient * 2) for parameter in model.parameters()]
    first = train(model)
    for handle in handles:
        handle.remove()
    return first, train(model)


def forward_hooks(model: Any) -> Any:
    seen: list[Tensor] = []
    model.blocks[1].register_forward_pre_hook(lambda module, args: (args[0] * 2,))
    model.blocks[2].register_forward_pre_hook(lambda module, args, kwargs: ((args[0] + 1,), kwargs), with_kwargs=True)
    handle = model.blocks[2].register_forward_hook(lambda module, args, out: seen.append(out.mean()))
    first = train(model)
    handle.remove()
    return first, train(model), [mean.item() for mean in seen]


def backward_hooks(model: Any) -> Any:
    model.blocks[1][0].register_full_backward_hook(lambda module, inputs, outputs: (inputs[0] * 0.5,))
    model.blocks[2][2].register_full_backward_pre_hook(lambda module, outputs: (outputs[0] * 3,))
    model.blocks[3][0].register_full_backward_hook(lambda module, inputs, outputs: (inputs[0] * 0.5,))
    return train(model)


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@pytest.mark.parametrize("program", [hooks_on_parameters, hooks_that_are_removed, forward_hooks, backward_hooks])
def test_hooks_do_what_they_do_plainly(program: Callable[[Any], Any], num_ranks: int) -> None:
    assert_same_as_plainly(Blocks, program, num_ranks)


class Scale(nn.Module):
    """Takes arguments that have the names which farspan's own functions could have for theirs."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor, *, module: float, leaf: float, recorder: Tensor, function: float) -> Tensor:
        return self.linear(x) * module * leaf * function + recorder


class Scales(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Scale() for _ in range(3)])
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor, module: float = 0.5) -> Tensor:
        for block in self.blocks:
            x = block(x, module=module, leaf=0.7, recorder=x, function=2.0)
        return self.head(x)


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Scales()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x, module=0.6)


def hooked(model: Any) -> Any:
    for block in model.inner.blocks:
        block.register_forward_pre_hook(lambda module, args: (args[0] * 1.5,))
    return train(model)


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("program", [train, hooked])
def test_arguments_may_have_any_name(program: Callable[[Any], Any], num_ranks: int) -> None:
    assert_same_as_plainly(Outer, program, num_ranks)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.c.weight = self.a.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.b(self.a(x)))


def step_in_a_hook(model: Any) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda parameter: optimizer.step())
    model(X).sum().backward()
    farspan.flush()


def hook_on_a_container(model: Any) -> None:
    model.register_backward_hook(lambda module, inputs, outputs: None)
    model(X)


def hook_too_late(model: Any) -> None:
    out = model(X)
    loss = out.square().mean()
    print(loss.item())
    out.register_hook(print)
    loss.backward()


def cached_parametrizations(model: Any) -> None:
    with parametrize.cached():
        model(X)


def assigned_with_another_dtype(model: Any) -> None:
    model.load_state_dict({name: tensor.double() for name, tensor in model.state_dict().items()}, assign=True)


class Parametrized(nn.Module):
    def __init__(self, kind: Callable[[nn.Module], nn.Module] = parametrizations.weight_norm) -> None:
        super().__init__()
        self.a, self.b, self.c = kind(nn.Linear(8, 8)), kind(nn.Linear(8, 8)), kind(nn.Linear(8, 5))

    def forward(self, x: Tensor) -> Tensor:
        return self.c(torch.tanh(self.b(torch.tanh(self.a(x)))))


@pytest.mark.parametrize(
    ("build", "program", "words"),
    [
        (Blocks, hook_on_a_container, "register_backward_hook on Blocks"),
        (Parametrized, cached_parametrizations, r"parametrize\.cached"),
        (Blocks, assigned_with_another_dtype, "cannot change blocks.0.0.weight"),
        (Blocks, hook_too_late, "cannot stop for the hooks on"),
        (Blocks, lambda model: model(X).grad_fn.register_hook(print), "on the grad_fn of"),
    ],
)
def test_what_cannot_be_right_is_a_named_error(build: Callable[[], nn.Module], program: Any, words: str) -> None:
    models = [build() for _ in range(2)]
    with pytest.raises(RecordError, match=words) as caught:
        run_threads(2, lambda rank: program(farspan.distribute(models[rank])))
    assert "  why  " in str(caught.value)


def test_a_step_in_a_gradient_hook_is_a_named_error() -> None:
    models = [Blocks() for _ in range(2)]
    with pytest.raises(FarspanError, match="called in a gradient hook"):
        run_threads(2, lambda rank: step_in_a_hook(farspan.distribute(models[rank])))


# Checkpoints that the model itself makes.


class Checkpointed(Blocks):
    is_on, is_reentrant = False, False

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            if self.is_on and self.training:
                x = x + checkpoint(block, x, use_reentrant=self.is_reentrant)  # type: ignore[operator]
            else:
                x = x + block(x)
        return self.head(x)


class CheckpointedFunctions(Blocks):
    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(lambda x, block=block: block[2](block[1](block[0](x))) + x, x, use_reentrant=True)  # type: ignore[assignment]
        return self.head(x)


def checkpointing(is_reentrant: bool) -> Callable[[Any], Any]:
    def program(model: Any) -> Any:
        first = train(model)
        model.is_on, model.is_reentrant = True, is_reentrant
        return first, train(model)

    return program


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@pytest.mark.parametrize(
    ("build", "program"),
    [(Checkpointed, checkpointing(False)), (Checkpointed, checkpointing(True)), (CheckpointedFunctions, train)],
)
def test_checkpoints_that_the_model_makes_change_nothing(build: Any, program: Any, num_ranks: int) -> None:
    assert_same_as_plainly(build, program, num_ranks)


# Parametrizations, normalisation without parameters, loading.


def trained_evaluated_trained(model: Any) -> Any:
    first = train(model)
    model.eval()
    with torch.no_grad():
        evaluated = model(X).tolist()
    model.train()
    return first, evaluated, train(model)


class Normalised(nn.Module):
    """Normalisation without parameters of its own, also as the first module."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.a = nn.BatchNorm1d(8, affine=False), nn.Linear(8, 8)
        self.second, self.b, self.c = nn.BatchNorm1d(8, affine=False), nn.Linear(8, 8), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.b(self.second(self.a(self.first(x)))))


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@pytest.mark.parametrize(
    "build",
    [
        Parametrized,
        lambda: Parametrized(parametrizations.spectral_norm),
        lambda: Parametrized(parametrizations.orthogonal),
        lambda: Parametrized(spectral_norm),
        Normalised,
    ],
)
def test_parametrizations_and_statistics_are_those_of_the_plain_program(build: Any, num_ranks: int) -> None:
    assert_same_as_plainly(build, trained_evaluated_trained, num_ranks)


def loaded(model: Any) -> Any:
    """Whole, in part, by prefix, assigned; what does not fit is torch's own error."""
    generator = torch.Generator().manual_seed(3)
    state = {name: torch.randn(p.shape, generator=generator) for name, p in model.state_dict().items()}
    part = {name: tensor for name, tensor in state.items() if not name.startswith("head")}
    said = [str(model.load_state_dict(part, strict=False))]
    first = train(model)
    model.blocks[2].load_state_dict({name[9:]: tensor for name, tensor in state.items() if name.startswith("blocks.1")})
    for wrong in ({"x": torch.ones(1)}, {**state, "head.weight": torch.ones(3, 3)}):
        with pytest.raises(RuntimeError) as caught:
            model.load_state_dict(wrong)
        said.append(str(caught.value))
    second = train(model)
    said.append(str(model.load_state_dict(state, assign=True)))
    return said, first, second, train(model)


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_a_plain_state_is_loaded_on_every_rank(num_ranks: int) -> None:
    assert_same_as_plainly(Blocks, loaded, num_ranks)


def test_a_loss_over_all_that_carries_gradients() -> None:
    """Several modules' losses, token counts that only a value tells, and a term over parameters, in one backward."""

    def loss(out: Tensor) -> Tensor:
        wrong = out.detach().argmax(1) != Y
        return (F.cross_entropy(out, Y, reduction="none") * wrong).sum() / wrong.sum().clamp(min=1)

    for num_ranks in (1, 2, 3):
        assert_same_as_plainly(Blocks, lambda model: train(model, loss_of=loss), num_ranks)
