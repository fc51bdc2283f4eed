"""What a backward changes in attributes of modules, and reads in them: on all ranks as in one process."""

from __future__ import annotations

import contextvars
from typing import Any

import pytest
import torch
from tests.support.around_tanh import Tanh, built, train
from tests.support.ranks import run_threads
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import farspan
from farspan.errors import RecordError


class Adjoint(torch.autograd.Function):
    """Counts in its module how often its backward has run."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, module: Any) -> Tensor:
        ctx.module = module
        return x * 2

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        ctx.module.num_backwards += 1
        return gradients[0] * 2, None


class CountsBackwards(Tanh):
    def __init__(self) -> None:
        super().__init__()
        self.num_backwards = 0

    def forward(self, x: Tensor) -> Tensor:
        return Adjoint.apply(super().forward(x), self)  # pyright: ignore[reportReturnType]


class CountsBackwardsInABuffer(CountsBackwards):
    def __init__(self) -> None:
        super().__init__()
        del self.num_backwards
        self.register_buffer("num_backwards", torch.zeros(()))


class KeepsALog(Tanh):
    """A checkpoint runs its forward twice, in one process too."""

    def __init__(self) -> None:
        super().__init__()
        self.log: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.logged, x, use_reentrant=False)

    def logged(self, x: Tensor) -> Tensor:
        self.log.append(x.shape[0])
        return super().forward(x)


class KeepsANewLog(KeepsALog):
    def logged(self, x: Tensor) -> Tensor:
        self.log = [*self.log, len(self.log)]
        return Tanh.forward(self, x) / len(self.log)


class KeepsAState(KeepsALog):
    def __init__(self) -> None:
        super().__init__()
        self.states: dict[str, Tensor] = {}

    def logged(self, x: Tensor) -> Tensor:
        self.states["last"] = torch.tanh(x + self.states.get("last", torch.zeros_like(x))).detach()
        return Tanh.forward(self, self.states["last"] + x)


class KeepsAMean(KeepsALog):
    mean: Any

    def logged(self, x: Tensor) -> Tensor:
        self.mean = x.mean()
        return Tanh.forward(self, x)


class GrowsATable(KeepsALog):
    """The second run finds the table that the first one has made."""

    table: Any = None

    def logged(self, x: Tensor) -> Tensor:
        if self.table is None or len(self.table) < len(x):
            self.table = torch.arange(len(x)).float().cos()
        return Tanh.forward(self, x) * self.table[: len(x), None]


class MovesAState(KeepsALog):
    """The second run moves it on once more."""

    state: Any = 0.0

    def logged(self, x: Tensor) -> Tensor:
        self.state = 0.5 * self.state + x.detach().mean()
        return Tanh.forward(self, x) * self.state


@pytest.mark.parametrize(
    ("kind", "name"), [(CountsBackwards, "num_backwards"), (KeepsALog, "log"), (KeepsANewLog, "log")]
)
@pytest.mark.parametrize("options", [{}, {"measure": False}, {"remat": True}])
def test_what_a_backward_changes_in_attributes_is_known_to_all_ranks(
    kind: type[Tanh], name: str, options: dict[str, Any]
) -> None:
    """Also where the next forward reads it, and in a list of which the program has a second name."""

    def program(model: Any) -> Any:
        log = getattr(model[1], name)
        losses = train(model)
        found = getattr(model[1], name)
        return losses, found, log, found is log if isinstance(log, list) else None

    models = [built(kind) for _ in range(3)]
    plain = program(models[2])
    assert len(plain[1]) == 8 if name == "log" else plain[1] == 4
    assert run_threads(2, lambda rank: program(farspan.distribute(models[rank], **options))) == [plain] * 2


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_checkpoint_reads_again_what_a_call_has_kept(num_ranks: int) -> None:
    models = [built(GrowsATable) for _ in range(num_ranks + 1)]
    plain = train(models.pop())
    assert run_threads(num_ranks, lambda rank: train(farspan.distribute(models[rank]))) == [plain] * num_ranks


def test_a_state_that_a_checkpoint_moves_on_again_is_an_error_with_its_name() -> None:
    models = [built(MovesAState) for _ in range(2)]
    with pytest.raises(RecordError, match=r"1: its backward changes MovesAState\.state"):
        run_threads(2, lambda rank: train(farspan.distribute(models[rank])))


@pytest.mark.parametrize(("kind", "name"), [(CountsBackwardsInABuffer, "num_backwards"), (KeepsAMean, "mean")])
def test_buffers_and_tensors_that_a_backward_sets_are_the_same_on_all_ranks(kind: type[Tanh], name: str) -> None:
    def program(model: Any) -> Any:
        return train(model), getattr(model[1], name).item()

    models = [built(kind) for _ in range(3)]
    plain = program(models[2])
    assert run_threads(2, lambda rank: program(farspan.distribute(models[rank]))) == [plain] * 2


def test_a_buffer_that_backwards_write_is_read_between_them() -> None:
    def program(model: Any) -> Any:
        read = []
        for _ in range(3):
            read.append([buffer.clone() for buffer in model.buffers()])
            model(torch.ones(2, 4)).sum().backward()
        return [[buffer.item() for buffer in buffers] for buffers in read]

    models = [built(CountsBackwardsInABuffer) for _ in range(2)]
    assert run_threads(2, lambda rank: program(farspan.distribute(models[rank]))) == [[[0.0], [1.0], [2.0]]] * 2


def test_a_backward_that_writes_a_buffer_where_calls_keep_no_order_is_an_error() -> None:
    models: list[Any] = [built(CountsBackwardsInABuffer) for _ in range(2)]
    for model in models:
        model[1].linear.register_forward_hook(lambda module, args, result: result * 0.9)
    with pytest.raises(RecordError, match="its backward writes into a buffer"):
        run_threads(2, lambda rank: train(farspan.distribute(models[rank])))


def test_a_state_that_a_checkpoint_reads_again_is_an_error_with_the_modules_name() -> None:
    models = [built(KeepsAState) for _ in range(2)]
    with pytest.raises(RecordError, match=r"1: its backward changes KeepsAState\.states"):
        run_threads(2, lambda rank: train(farspan.distribute(models[rank])))


class KeepsALoss(Tanh):
    """A checkpoint runs its forward twice."""

    loss: Any = None

    def forward(self, x: Tensor) -> Tensor:
        result = super().forward(x)
        self.loss = result.detach().square().mean()
        return result


def losses_of(model: Any, order: str) -> list[float]:
    """What a module keeps, after each backward."""
    torch.manual_seed(1)
    found, waiting = list[float](), list[Tensor]()
    for letter in order:
        if letter == "f":
            waiting.append(model(torch.randn(3, 4)).square().sum())
        else:
            waiting.pop(0).backward()
            found.append(float(model[1].inner.loss))
    return found


@pytest.mark.parametrize("is_reentrant", [False, True])
def test_a_loss_that_a_checkpoint_sets_again_is_the_same_or_an_error(is_reentrant: bool) -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = KeepsALoss()

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.inner, x, use_reentrant=is_reentrant)  # pyright: ignore[reportReturnType]

    def built() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 4), Checkpointed(), nn.Linear(4, 4))

    wanted = losses_of(built(), "fbfb")
    models = [built() for _ in range(2)]
    assert run_threads(2, lambda rank: losses_of(farspan.distribute(models[rank]), "fbfb")) == [wanted] * 2
    models = [built() for _ in range(2)]
    with pytest.raises(RecordError, match=r"1: its backward changes (inner\.)?loss"):
        run_threads(2, lambda rank: losses_of(farspan.distribute(models[rank]), "ffbb"))


CALLS: contextvars.ContextVar[int] = contextvars.ContextVar("CALLS", default=0)


class CountsAround(Tanh):
    def forward(self, x: Tensor) -> Tensor:
        CALLS.set(CALLS.get() + 1)
        return super().forward(x) / CALLS.get()


class CheckpointedCount(Tanh):
    def __init__(self) -> None:
        super().__init__()
        self.counting = CountsAround()

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.counting, x, use_reentrant=True)  # pyright: ignore[reportReturnType]


def test_a_checkpoint_inside_of_a_split_stage_sets_no_context_variable() -> None:
    def program(rank: int) -> None:
        model = nn.Sequential(nn.Linear(4, 4), CheckpointedCount(), nn.Linear(4, 4))
        farspan.distribute(model, tensor_parallel=2)(torch.ones(2, 4)).sum().backward()

    with pytest.raises(RecordError, match="it sets the context variable CALLS"):
        run_threads(2, program)
