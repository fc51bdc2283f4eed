"""What an optimizer's step reads is what it reads in one process, whichever rank has it."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.optimizers.written import WRITTEN, SharpnessAware
from tests.support.loop import X, Y, on_ranks, same_everywhere, weights
from tests.support.ranks import run_threads
from torch import nn

import farspan

_Distribute = Callable[[nn.Module], nn.Module]
_Make = Callable[[nn.Module], torch.optim.Optimizer]


def _train(model: nn.Module, optimizer: torch.optim.Optimizer, *, with_closure: bool = False) -> Any:
    seen: list[Any] = []
    for shift in range(4):

        def closure(shift: int = shift) -> torch.Tensor:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(X + shift), Y)
            loss.backward()
            return loss

        loss = closure()
        optimizer.step(closure) if with_closure else optimizer.step()  # type: ignore[call-overload]
        seen.append(loss.item())
        norm = getattr(optimizer, "norm", None)
        seen += [] if norm is None else [norm.item()]
    state = optimizer.state_dict()["state"]
    kept = [
        {name: torch.as_tensor(value).tolist() for name, value in state[key].items() if value is not None}
        for key in sorted(state)
    ]
    return seen, weights(model), kept


def _same(make: _Make, num_ranks: int, **options: Any) -> None:
    def program(model: nn.Module, distribute: _Distribute) -> Any:
        distribute(model)
        return _train(model, make(model), **options)

    same_everywhere(program, num_ranks)


@pytest.mark.parametrize("name", list(WRITTEN))
def test_a_step_may_look_past_one_parameter(name: str) -> None:
    _same(lambda model: WRITTEN[name](model.parameters()), 3)


@pytest.mark.parametrize("name", list(WRITTEN))
def test_a_step_may_look_at_large_tensors_past_one_parameter(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("farspan.execute.agreement.broadcast._SMALL_BYTES", 0)  # all are large
    _same(lambda model: WRITTEN[name](model.parameters()), 3)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_step_may_look_past_one_parameter_on_any_number_of_ranks(num_ranks: int) -> None:
    _same(lambda model: WRITTEN["GlobalNorm"](model.parameters()), num_ranks)


def test_sharpness_may_be_looked_at_in_a_closure() -> None:
    _same(lambda model: SharpnessAware(model.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9), 3, with_closure=True)


def test_hooks_of_a_step_see_the_whole_model() -> None:
    def make(model: nn.Module) -> torch.optim.Optimizer:
        def clip(*_: Any) -> None:
            nn.utils.clip_grad_norm_(model.parameters(), 0.05)

        def clamp(*_: Any) -> None:
            with torch.no_grad():
                for p in model.parameters():
                    p.clamp_(-0.1, 0.1)

        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer.register_step_pre_hook(clip)
        optimizer.register_step_post_hook(clamp)
        return optimizer

    _same(make, 3)


@pytest.mark.parametrize("options", [{}, {"foreach": True}, {"fused": True}], ids=str)
def test_what_looks_at_one_parameter_at_a_time_asks_no_other_rank_but_once_for_hooks(options: dict[str, Any]) -> None:
    def program(model: nn.Module) -> list[str]:
        farspan.distribute(model)
        engine = farspan.execute.process.world.current_engine()  # type: ignore[attr-defined]
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, **options)
        asked: list[str] = []
        gather = engine.agreement.gather
        for _ in range(3):
            optimizer.zero_grad()
            F.cross_entropy(model(X), Y).backward()
            farspan.flush()
            engine.agreement.gather = lambda what, blob: asked.append(what) or gather(what, blob)
            optimizer.step()
            engine.agreement.gather = gather
        return asked

    assert on_ranks(2, program) == [["whether a step has hooks"]] * 2


@pytest.mark.parametrize("options", [{}, {"foreach": True}, {"fused": True}], ids=str)
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad])
def test_stock_optimizers_are_exact_in_each_implementation(kind: Any, options: dict[str, Any]) -> None:
    _same(lambda model: kind(model.parameters(), lr=0.01, **options), 2)


def test_a_step_size_may_be_made_of_the_loss() -> None:
    class Polyak(torch.optim.Optimizer):
        def __init__(self, params: Any) -> None:
            super().__init__(params, {})

        def step(self, closure: Any = None) -> Any:  # type: ignore[override]
            with torch.enable_grad():
                loss = closure()
            with torch.no_grad():
                params = self.param_groups[0]["params"]
                size = loss / (sum((p.grad**2).sum() for p in params) + 1e-3)
                for p in params:
                    p.add_(p.grad * -size.clamp(max=0.1))
            return loss

    _same(lambda model: Polyak(model.parameters()), 3, with_closure=True)


def test_a_step_may_set_gradients_that_are_read_after_it() -> None:
    class Averaged(torch.optim.Optimizer):
        @torch.no_grad()
        def step(self) -> None:  # type: ignore[override]
            for p in self.param_groups[0]["params"]:
                average = self.state[p].setdefault("average", torch.zeros_like(p))
                average.mul_(0.9).add_(p.grad, alpha=0.1)
                p.grad = average
                p.sub_(p.grad, alpha=0.1)

    def program(model: nn.Module, distribute: _Distribute) -> Any:
        distribute(model)
        optimizer, seen = Averaged(model.parameters(), {}), []
        for shift in range(3):
            optimizer.zero_grad()
            F.cross_entropy(model(X + shift), Y).backward()
            optimizer.step()
            seen.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]).tolist())
        return seen, weights(model)

    same_everywhere(program)


@pytest.mark.parametrize("is_large", [False, True])
@pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # SparseAdam makes sparse tensors
def test_sparse_gradients_may_be_stepped(is_large: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if is_large:
        monkeypatch.setattr("farspan.execute.agreement.broadcast._SMALL_BYTES", 0)

    def build() -> nn.Module:
        with torch.random.fork_rng():
            torch.manual_seed(1)
            return nn.Sequential(nn.Embedding(10, 6, sparse=True), nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 4))

    def program(model: Any) -> Any:
        ids = torch.tensor([[1, 2, 3], [3, 3, 9]])
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.1), torch.optim.SparseAdam([model[0].weight], lr=0.01)]
        losses: list[float] = []
        for optimizer in [*optimizers, *optimizers]:
            optimizers[0].zero_grad()
            loss = model(ids).pow(2).mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses, weights(model)

    wanted = program(build())
    assert on_ranks(2, lambda model: program(farspan.distribute(model)), build) == [wanted, wanted]


class _Scaled(nn.Module):
    """Its parameters are small: what a rank computes of them is known to all ranks once it has been computed."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(X.shape[1], X.shape[1])
        for p in self.linear.parameters():
            p.data = torch.linspace(-0.2, 0.3, p.numel()).view(p.shape)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.scale * self.linear(x)


@pytest.mark.parametrize("is_plain", [False, True])
def test_a_hook_after_a_step_keeps_averages_of_all_parameters(is_plain: bool) -> None:
    """It is of the program, and not of the step: what it writes into is every rank's, and it may read that at once."""

    def program(model: nn.Module, distribute: _Distribute) -> Any:
        model = nn.Sequential(_Scaled(), _Scaled(), model)
        distribute(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        averages = [torch.zeros(p.shape) if is_plain else p.detach().clone() for p in model.parameters()]
        norms: list[Any] = []

        def average(*_: Any) -> None:
            with torch.no_grad():
                for kept, p in zip(averages, model.parameters(), strict=True):
                    kept.lerp_(p, 0.5)
                    norms.append(kept.tolist())

        handle = optimizer.register_step_post_hook(average)
        pre: list[float] = []
        optimizer.register_step_pre_hook(
            lambda *_: pre.append(sum(p.grad.sum().item() for p in model.parameters() if p.grad is not None))
        )
        seen = _train(model, optimizer)
        handle.remove()
        optimizer.zero_grad()
        F.cross_entropy(model(X), Y).backward()
        optimizer.step()
        hooks: Any = optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks
        return seen, [kept.tolist() for kept in averages], norms, pre, list(map(len, hooks))

    same_everywhere(program, 2)


def test_what_a_step_writes_into_tensors_of_the_program_is_what_is_read_in_it_and_after_it() -> None:
    def program(model: nn.Module, distribute: _Distribute) -> Any:
        model = nn.Sequential(_Scaled(), _Scaled(), model)
        distribute(model)
        slow = [p.detach().clone() for p in model.parameters()]
        seen: list[Any] = []

        class Lookahead(torch.optim.Optimizer):
            def step(self, closure: Any = None) -> None:  # type: ignore[override]
                with torch.no_grad():
                    for p, kept in zip(self.param_groups[0]["params"], slow, strict=True):
                        p.add_(p.grad, alpha=-0.1)
                        kept.data.lerp_(p.data, 0.5)
                        kept.mul_(0.99)
                        seen.append(kept.tolist())

        first = _train(model, Lookahead(model.parameters(), {}))
        return first, seen, [kept.tolist() for kept in slow]

    same_everywhere(program, 2)


def test_what_one_rank_alone_has_predicted_makes_no_difference() -> None:
    """In the step each rank predicts operations on the other's gradients, of many shapes: one of them knows by then
    what it gives for any shape, the other has run it for the next one."""

    class Halved(torch.optim.Optimizer):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            with torch.no_grad():
                for p in self.param_groups[0]["params"]:
                    p.add_(p.grad * 0.5, alpha=-0.1)

    sizes = [8, *range(9, 30), 5]

    def train(rank: int) -> float:
        layers = [nn.Linear(a, b) for a, b in itertools.pairwise(sizes)]
        model = nn.Sequential(*layers)
        if rank >= 0:
            farspan.distribute(model, plan={str(i): f"rank:{int(i >= 4)}" for i in range(len(layers))})
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(0.1)
        optimizer = Halved(model.parameters(), {})
        F.cross_entropy(model(torch.ones(4, 8)), torch.arange(4)).backward()
        optimizer.step()
        with torch.no_grad():
            return sum((p.grad * 0.5).sum() for p in model.parameters()).item()  # type: ignore[union-attr]

    wanted = train(-1)
    assert run_threads(2, train) == [wanted, wanted]


def test_an_optimizer_may_keep_outputs_of_the_model() -> None:
    """Those require grad, and its step writes into them."""

    class Keeps(torch.optim.Optimizer):
        out: Any = None

        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            with torch.no_grad():
                for p in self.param_groups[0]["params"]:
                    p.add_(p.grad * self.out.detach().std(), alpha=-0.1)
            self.out.detach().mul_(0.5)

    def program(model: nn.Module, distribute: _Distribute) -> Any:
        distribute(model)
        optimizer = Keeps(model.parameters(), {})
        found: list[Any] = []
        for shift in range(3):
            optimizer.zero_grad()
            outs = [model(X + shift + number) for number in range(3)]
            for out in outs:
                F.cross_entropy(out, Y).backward()
            optimizer.out = outs[shift % 3]
            optimizer.step()
            found += [outs[shift % 3].detach().tolist(), optimizer.out.detach().tolist(), optimizer.out.requires_grad]
        return found, weights(model)

    same_everywhere(program, 2)


class Spells(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.mid, self.head = nn.Embedding(5, 8), nn.Linear(8, 8), nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.mid(self.embed(x))))


def _with_a_larger_embedding(model: Any, make: Any) -> list[Any]:
    """Trains; after a step the embedding is a larger one, which goes on with the moments of the old one."""
    found: list[Any] = []
    optimizer, generator = make(model.parameters()), torch.Generator().manual_seed(3)
    for step in range(3):
        optimizer.zero_grad()
        loss = model(torch.randint(5, (3, 4), generator=generator)).square().mean()
        loss.backward()
        optimizer.step()
        if step == 0:
            old, wider = model.embed, nn.Embedding(8, 8)
            with torch.no_grad():
                wider.weight.fill_(0.5)
                wider.weight[:5] = old.weight
            model.embed, group = wider, optimizer.param_groups[0]
            group["params"] = [wider.weight if p is old.weight else p for p in group["params"]]
            optimizer.state[wider.weight] = {
                name: torch.cat([kept, torch.zeros(3, 8)]) if kept.dim() == 2 else kept
                for name, kept in optimizer.state.pop(old.weight).items()
            }
        found.append(loss.item())
    kept = [value.tolist() for value in optimizer.state_dict()["state"][0].values()]
    return [*found, model.embed.weight.tolist(), kept]


@pytest.mark.parametrize("rank_of_embed", [0, 1])
@pytest.mark.parametrize(
    "make",
    [
        lambda parameters: torch.optim.Adam(parameters, lr=0.1),
        lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    ],
)
def test_a_parameter_outside_the_model_goes_on_with_the_moments_of_one_inside(make: Any, rank_of_embed: int) -> None:
    """It was an error: each rank computes its step, and one rank alone had the moments."""
    models = []
    for _ in range(3):
        torch.manual_seed(0)
        models.append(Spells())
    plan = {"embed": f"rank:{rank_of_embed}", "mid": f"rank:{1 - rank_of_embed}", "head": "rank:0"}
    plain = _with_a_larger_embedding(models.pop(), make)
    found = run_threads(2, lambda rank: _with_a_larger_embedding(farspan.distribute(models[rank], plan=plan), make))
    assert found == [plain] * 2
