"""No silent wrong result: what people do around and inside a model, compared with the plain program to the last bit."""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.support.ranks import run_threads
from torch import Tensor, nn

import farspan
from farspan.errors import FarspanError, RecordError

_generator = torch.Generator().manual_seed(11)
X = torch.randn(6, 8, generator=_generator)
SEQUENCES = torch.randn(6, 4, 8, generator=_generator)
Y = torch.randint(5, (6,), generator=_generator)


class Negate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return -gradients[0]


taken_early = Negate.apply


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(4)])
        self.head = nn.Linear(8, 5)
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.head(x) * self.scale


class Functions(nn.Module):
    """A custom autograd function in a container, also one taken before farspan was imported."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.b(self.a(x))
        return self.c(hidden + Negate.apply(hidden) * 0.3 + taken_early(hidden * 2))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, 8, 2, batch_first=True)
        self.gru = nn.GRU(8, 8, batch_first=True)
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        y, (h, _) = self.lstm(x)
        z, _ = self.gru(y)
        return self.head(z[:, -1] + h[-1])


class NormTwice(nn.Module):
    """One BatchNorm at two depths: its statistics must move in the loop's order."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.b, self.c = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.norm(self.b(self.norm(self.a(x)))))


class InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        x += 1
        y = self.b(x)
        y.relu_()
        y = y * 2
        y[:, 0] = 0
        y += x
        return self.c(y)


def weights(model: Any) -> Any:
    return {name: tensor.tolist() for name, tensor in model.state_dict().items()}


def gradients(model: Any) -> Any:
    return [None if p.grad is None else p.grad.tolist() for p in model.parameters()]


def train(model: Any, inputs: Tensor = X) -> Any:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(2):
        optimizer.zero_grad()
        for shift in range(4):
            loss = F.cross_entropy(model(inputs + shift), Y)
            loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, weights(model)


def sgd_by_hand(model: Any) -> Any:
    losses = []
    for _ in range(2):
        loss = F.cross_entropy(model(X), Y)
        loss.backward()
        with torch.no_grad():
            for p in model.parameters():
                p -= 0.1 * p.grad
                p.grad = None
        losses.append(loss.item())
    return losses, weights(model)


def sgd_through_data(model: Any) -> Any:
    for _ in range(2):
        F.cross_entropy(model(X), Y).backward()
        for p in model.parameters():
            p.data.add_(p.grad.data, alpha=-0.1)
            p.grad.zero_()
    for p in model.parameters():
        p.data.clamp_(-0.5, 0.5)
        p.data = p.data * 2
    return weights(model)


def initialised_by_hand(model: Any) -> Any:
    for p in model.parameters():
        if p.dim() > 1:
            nn.init.constant_(p, 0.1)
    return weights(model), train(model)


def evaluated_between(model: Any) -> Any:
    model.eval()
    with torch.no_grad():
        early = model(X)
    model.train()
    seen = [early.tolist()]  # read only now: the call was made in eval mode
    train(model)
    model.eval()
    with torch.inference_mode():
        seen.append(model(X).tolist())
    return seen


def frozen_in_the_window(model: Any) -> Any:
    for number in range(3):
        model.layers[1].requires_grad_(number != 1)
        F.cross_entropy(model(X), Y).backward()
    return gradients(model)


def attribute_in_the_window(model: Any) -> Any:
    for number in range(3):
        model.norm.eps = 10.0**-number
        F.cross_entropy(model(X), Y).backward()
    return gradients(model)


def with_a_closure(model: Any) -> Any:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(X), Y)
        loss.backward()
        return loss

    losses: list[Any] = [optimizer.step(closure) for _ in range(2)]
    return [loss.item() for loss in losses], weights(model)


def several_losses(model: Any) -> Any:
    out = model(X)
    torch.autograd.backward([out.sum(), out.square().mean()])
    return gradients(model)


def kept_graph(model: Any) -> Any:
    loss = model(X).sum()
    loss.backward(retain_graph=True)
    loss.backward()
    return gradients(model)


def hooked(model: Any) -> Any:
    model.layers[0].register_forward_hook(lambda module, args, out: out * 1.5)
    return train(model)


def saved_with_work_pending(model: Any) -> Any:
    model(X).sum().backward()
    return weights(model)


def scalar_parameter_clipped(model: Any) -> Any:
    F.cross_entropy(model(X), Y).backward()
    return nn.utils.clip_grad_norm_(model.parameters(), 0.1).item(), gradients(model)


def adversarial_pair(model: Any) -> Any:
    """As GANs do: one graph, a backward through a part of it, and later through another part."""
    first, second = torch.optim.SGD(model.layers.parameters(), lr=0.1), torch.optim.SGD(model.head.parameters(), lr=0.1)
    hidden = model.layers[1](model.layers[0](X))
    F.cross_entropy(model.head(hidden.detach()), Y).backward()
    second.step()
    F.cross_entropy(model.head(hidden), Y).backward()
    first.step()
    return weights(model)


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@pytest.mark.parametrize(
    ("build", "program"),
    [
        (Functions, train),
        (Recurrent, lambda model: train(model, SEQUENCES)),
        (NormTwice, train),
        (InPlace, train),
        (Plain, sgd_by_hand),
        (Plain, sgd_through_data),
        (Plain, initialised_by_hand),
        (NormTwice, evaluated_between),
        (Plain, frozen_in_the_window),
        (NormTwice, attribute_in_the_window),
        (Plain, with_a_closure),
        (Plain, several_losses),
        (Plain, kept_graph),
        (Plain, hooked),
        (NormTwice, saved_with_work_pending),
        (Plain, scalar_parameter_clipped),
        (Plain, adversarial_pair),
    ],
)
def test_same_as_plainly(build: Callable[[], nn.Module], program: Callable[[Any], Any], num_ranks: int) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = build()
    wanted = program(copy.deepcopy(model))
    models = [copy.deepcopy(model) for _ in range(num_ranks)]
    for rank, got in enumerate(run_threads(num_ranks, lambda rank: program(farspan.distribute(models[rank])))):
        assert got == wanted, f"rank {rank}"


# What is refused, by name, instead of being wrong.


def reuses_a_buffer(model: Any, change: Callable[[Tensor, Tensor], Any]) -> Any:
    buffer, labels = torch.empty(6, 8), torch.empty_like(Y)
    for shift in range(3):
        change(buffer, X + shift)
        labels.copy_((Y + shift) % 5)
        loss = F.cross_entropy(model(buffer), labels)
        seen = loss.item() if shift < 2 else None  # its forward has run, and its backward has not
        loss.backward()
    labels.zero_()
    return seen, gradients(model)


@pytest.mark.parametrize(
    "change",
    [
        lambda buffer, batch: buffer.copy_(batch),
        lambda buffer, batch: operator.setitem(buffer, slice(None), batch),
        lambda buffer, batch: buffer.view(-1).copy_(batch.view(-1)),
        lambda buffer, batch: torch.add(batch, 0, out=buffer),
        lambda buffer, batch: torch.Tensor.data.__set__(buffer, batch),  # type: ignore[attr-defined]
    ],
)
def test_a_batch_may_be_written_while_its_call_waits(change: Callable[[Tensor, Tensor], Any]) -> None:
    models = [Plain() for _ in range(3)]
    for model in models[1:]:
        model.load_state_dict(models[0].state_dict())
    plain = reuses_a_buffer(models[0], change)
    assert run_threads(2, lambda rank: reuses_a_buffer(farspan.distribute(models[1 + rank]), change)) == [plain] * 2


def writes_unseen(model: Any) -> None:
    """As code does that is not written in Python."""
    buffer = X.clone()
    F.cross_entropy(model(buffer), Y).backward()
    torch.autograd.graph.increment_version(buffer)
    gradients(model)


@pytest.mark.parametrize(
    ("build", "program", "words"),
    [
        (Plain, writes_unseen, "written to since"),
        (Plain, lambda model: model(X).sum().backward(create_graph=True), "create_graph"),
        (Plain, lambda model: model(X).grad_fn.register_hook(print), "grad_fn"),
    ],
)
def test_what_cannot_be_right_is_a_named_error(build: Callable[[], nn.Module], program: Any, words: str) -> None:
    models = [build() for _ in range(2)]
    with pytest.raises(FarspanError, match=words) as caught:
        run_threads(2, lambda rank: program(farspan.distribute(models[rank])))
    assert "  why  " in str(caught.value)


def test_two_backwards_through_one_graph_raise_as_in_torch() -> None:
    model = Plain()

    def program(rank: int) -> None:
        loss = farspan.distribute(model)(X).sum()
        loss.backward()
        loss.backward()
        farspan.flush()

    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        run_threads(1, program)


def test_hooks_are_called_once_for_each_call_on_every_rank() -> None:
    models = [Plain() for _ in range(2)]

    def program(rank: int) -> int:
        seen: list[Any] = []
        model: Any = farspan.distribute(models[rank])
        model.layers[0].register_forward_hook(lambda module, args, out: seen.append(out.shape))
        for _ in range(3):
            model(X).sum().backward()
        farspan.flush()
        return len(seen)

    assert run_threads(2, program) == [3, 3]


def test_a_slow_reader_sees_the_parameters_of_its_own_point_of_the_program() -> None:
    import threading

    gate = threading.Event()
    models = [Plain() for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    before = weights(models[0])

    def program(rank: int) -> Any:
        model = farspan.distribute(models[rank])
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        model(X).sum().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1e9).item()
        if rank == 0:
            gate.wait(1.0)  # never set: rank 1 gets as far ahead as it can
            seen = weights(model)
            optimizer.step()
            return seen
        optimizer.step()
        return None

    assert run_threads(2, program)[0] == before


def test_refusals_are_record_errors() -> None:
    assert issubclass(RecordError, FarspanError)
