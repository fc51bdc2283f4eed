"""What is around a call belongs to it: flags, hooks on what autograd saves, modes; what cannot is a named error."""

from __future__ import annotations

import contextlib
import functools
import itertools
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.support.plainly import assert_same_as_plainly
from tests.support.ranks import run_threads
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.func import functional_call, grad, jacrev, jvp, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import farspan
from farspan.errors import RecordError

_generator = torch.Generator().manual_seed(2)
BATCHES = [(torch.randn(2, 3, 4, generator=_generator), torch.randn(2, 3, 1, generator=_generator)) for _ in range(3)]
X = BATCHES[0][0]
Around = Callable[[], contextlib.AbstractContextManager[Any]]


class Attention(nn.Module):
    """A container that attends in its own forward, with something around it."""

    def __init__(self, around: Around = contextlib.nullcontext) -> None:
        super().__init__()
        self.around = around
        self.query, self.key, self.value = (nn.Linear(4, 32) for _ in range(3))
        self.out = nn.Linear(32, 1)

    def forward(self, x: Tensor) -> Tensor:
        with self.around():
            parts = [part(x).view(2, 3, 2, 16).transpose(1, 2) for part in (self.query, self.key, self.value)]
            y = F.scaled_dot_product_attention(*parts).transpose(1, 2).reshape(2, 3, 32)
            y = torch.tanh(y) * 3
        return self.out(y)


class Doubles(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return result * 2 if func is torch.tanh else result


class Looks(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def rounding() -> Any:
    return saved_tensors_hooks(lambda tensor: tensor.to(torch.bfloat16), lambda tensor: tensor.float())


@contextlib.contextmanager
def double_precision() -> Any:
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


def train(model: nn.Module) -> Any:
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    losses = []
    for x, y in BATCHES:
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        optimizer.step()
        losses.append([parameter.grad.tolist() for parameter in model.parameters() if parameter.grad is not None])
    return losses


@pytest.mark.parametrize(
    ("around", "num_ranks"),
    [
        *itertools.product([rounding, Doubles, lambda: torch.device("cpu")], [1, 2]),
        # on the CPU an output saves itself, and so stays: to find that takes long in a process of many objects
        (save_on_cpu, 1),
        (save_on_cpu, 2),
    ],
)
def test_what_is_around_in_a_container_holds_where_the_call_runs(around: Around, num_ranks: int) -> None:
    assert_same_as_plainly(lambda: Attention(around), train, num_ranks)
    assert_same_as_plainly(Attention, lambda model: _around_all(around, model), num_ranks)


def _around_all(around: Around, model: nn.Module) -> Any:
    with around():
        out = model(X)
    out.sum().backward()
    return [None if parameter.grad is None else parameter.grad.tolist() for parameter in model.parameters()]


def test_what_is_recorded_before_hooks_and_runs_under_them_is_kept_without_them() -> None:
    assert_same_as_plainly(_Layers, _read_inside, 2)


def test_what_hooks_keep_is_not_computed_again() -> None:
    assert_same_as_plainly(_Layers, lambda model: _around_all(rounding, model), 2, remat=True)


class _Auxiliary(nn.Module):
    """A checkpoint sets its loss again, of what hooks have made of the input."""

    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.linear, self.use_reentrant = nn.Linear(4, 4), use_reentrant
        self.loss: Any = None

    def keep(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        self.loss = x.square().mean()
        return torch.tanh(x)

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.keep, x, use_reentrant=self.use_reentrant)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_what_a_checkpoint_sets_again_from_what_hooks_keep_is_a_named_error(use_reentrant: bool) -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 4), _Auxiliary(use_reentrant), nn.Linear(4, 1))

    def program(around: Around, model: Any) -> Any:
        return _around_all(around, model), model[1].loss.item()

    assert_same_as_plainly(build, functools.partial(program, contextlib.nullcontext), 2)
    models = [build() for _ in range(2)]
    with pytest.raises(RecordError, match=r"its backward changes _Auxiliary\.loss"):
        run_threads(2, lambda rank: program(rounding, farspan.distribute(models[rank])))


class _Layers(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(4, 4), *(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(2)))


def _read_inside(model: nn.Module) -> Any:
    before = model(X)
    with rounding():
        inside = model(X)
        read = before.sum().item()
    (before.sum() + inside.square().sum()).backward()
    return read, [parameter.grad.tolist() for parameter in model.parameters() if parameter.grad is not None]


# Flags belong to the process, of which ranks as threads have only one.
@pytest.mark.parametrize(
    "around",
    [
        lambda: sdpa_kernel(SDPBackend.MATH),
        lambda: sdpa_kernel(SDPBackend.FLASH_ATTENTION),
        lambda: torch.autograd.set_detect_anomaly(True),
    ],
)
def test_flags_are_set_again_when_the_call_runs(around: Around) -> None:
    assert_same_as_plainly(lambda: Attention(around), train, 1)


def test_a_leaf_makes_tensors_of_the_default_type_of_its_call() -> None:
    class Makes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x) + torch.full((4,), 0.1)

    def program(model: nn.Module) -> Any:
        with double_precision():
            out = model(X)
        return str(out.dtype), out.tolist()

    assert_same_as_plainly(Makes, program, 1)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script")  # torch's own, of derivatives in the forward direction
@pytest.mark.parametrize(
    ("program", "words"),
    [
        (lambda model: vmap(model)(X[None]), "per-sample"),
        (lambda model: grad(lambda x: model(x).sum())(X), "torch.func.grad"),
        (lambda model: jacrev(model)(X), "jacrev"),
        (lambda model: jvp(model, (X,), (X,)), "jvp"),
        (lambda model: functional_call_under_vmap(model), "torch.func.grad"),
        (lambda model: under(FlopCounterMode(display=False), lambda: model(X)), "FlopCounterMode"),
        (lambda model: under_dual_numbers(model), "dual numbers"),
        (lambda model: vmap(model.query)(X[None]), "per-sample"),
        (lambda model: under(Looks(), lambda: model.query(X)), "Looks"),
        (lambda model: under_dual_numbers(model.query), "dual numbers"),
    ],
)
def test_what_looks_at_data_of_all_stages_is_a_named_error(program: Callable[[Any], Any], words: str) -> None:
    with pytest.raises(RecordError, match=words):
        run_threads(2, lambda rank: program(farspan.distribute(Attention())))


def under(mode: contextlib.AbstractContextManager[Any], call: Callable[[], Any]) -> Any:
    with mode:
        return call()


def functional_call_under_vmap(model: nn.Module) -> Any:
    weights = {name: item.detach() for name, item in model.named_parameters()}
    return vmap(grad(lambda own, x: functional_call(model, own, (x,)).sum()), (None, 0))(weights, X[None])


ONE_AT_A_TIME = threading.Lock()
"""A process has one level of dual numbers, and here the ranks are threads."""


def under_dual_numbers(model: nn.Module) -> Any:
    with ONE_AT_A_TIME, torch.autograd.forward_ad.dual_level():
        return model(torch.autograd.forward_ad.make_dual(X, X))


class Energy(nn.Module):
    """Its forward is a derivative of what its parts compute."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = x if x.requires_grad else x.clone().requires_grad_()
        energy = self.second(torch.tanh(self.first(x))).sum()
        (force,) = torch.autograd.grad(energy, x, create_graph=True)
        return force


class Physics(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.energy, self.out = nn.Linear(4, 4), Energy(), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.energy(self.embed(x)))


@pytest.mark.parametrize("measure", [False, True])
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_a_module_that_differentiates_inside_runs_as_one_unit(num_ranks: int, measure: bool) -> None:
    measured = measure and num_ranks > 1
    assert_same_as_plainly(Physics, lambda model: (train(model), train(model)), num_ranks, measure=measured)


def test_its_parts_may_lie_on_several_ranks() -> None:
    plan = {"embed": "rank:0", "energy.first": "rank:0", "energy.second": "rank:1", "out": "rank:1"}
    assert_same_as_plainly(Physics, train, 2, plan=plan)


class Strict(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        if x.abs().max() > 100:
            raise ValueError("too large", 7)
        return x


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_an_exception_that_a_module_raises_can_be_caught(num_ranks: int) -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 4), Strict(), nn.Linear(4, 1))

    def program(model: nn.Module) -> Any:
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        seen: list[Any] = []
        for number, (x, y) in enumerate(BATCHES):
            try:
                loss = F.mse_loss(model(x * (1e5 if number == 0 else 1)), y)
            except ValueError as error:
                seen.append((type(error).__name__, error.args))
                loss = F.mse_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            seen.append(loss.item())
        return seen

    assert_same_as_plainly(build, program, num_ranks)
