"""What is asked of single matrices of split stages, and the number of ranks that "auto" stands for."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.support.ranks import run_threads
from tests.wide.loops import Net, loss_of
from tests.wide.test_loops import largest_difference
from torch import Tensor, nn

import farspan
from farspan.errors import PlanError
from farspan.execute.process.world import current_engine


class Words(nn.Module):
    """An embedding, a pair of matrices, one that is applied transposed, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.a, self.b = nn.Embedding(12, 8), nn.Linear(8, 16), nn.Linear(16, 8)
        self.twisted = nn.Parameter(torch.randn(8, 8))
        self.head = nn.Linear(8, 12)

    def forward(self, words: Tensor) -> Tensor:
        x = self.embed(words)
        x = x + self.b(torch.tanh(self.a(x)))
        return self.head(x + x @ self.twisted)


WORDS = torch.randint(12, (4, 6), generator=torch.Generator().manual_seed(1))


def train(model: Any) -> Any:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found: list[float] = []
    for step in range(3):
        optimizer.zero_grad()
        losses = [F.mse_loss(model((WORDS + number + step) % 12), torch.ones(4, 6, 12)) for number in range(2)]
        for loss in losses:
            loss.backward()
        optimizer.step()
        found += [loss.item() for loss in losses]
    return found, {name: tensor.tolist() for name, tensor in model.state_dict().items()}


def forms_of(model: nn.Module) -> dict[str, str]:
    engine = current_engine()
    assert engine is not None
    found = {name: engine.recorder.splitting.matrices.form_of(name)[0] for name, _ in model.named_parameters()}
    return {name.removesuffix(".weight"): form for name, form in found.items() if form}


def run(layouts: dict[str, Any], num_ranks: int = 2, **more: Any) -> tuple[float, list[dict[str, str]], str]:
    """Returns how far a run is from one process, the forms of the matrices on each rank, and the plan."""
    with torch.random.fork_rng():
        torch.manual_seed(3)
        model = Words()
    wanted = train(copy.deepcopy(model))
    models = [copy.deepcopy(model) for _ in range(num_ranks)]

    def on_rank(rank: int) -> Any:
        model = farspan.distribute(models[rank], tensor_parallel=layouts, **more)
        return train(model), forms_of(model), farspan.plan_of(model).to_json()

    found = run_threads(num_ranks, on_rank)
    return max(largest_difference(item[0], wanted) for item in found), [item[1] for item in found], found[0][2]


@pytest.mark.parametrize(
    ("layouts", "expected"),
    [
        ({"degree": 2, "a": "whole"}, {"a": "whole", "b": "whole", "head": "whole"}),
        ({"a": "row", "b": "column"}, {"a": "row", "b": "column"}),
        ({"*": "row"}, {"a": "row", "b": "row", "twisted": "row", "head": "row"}),
        ({"*": "column"}, {"a": "column", "b": "column", "twisted": "column", "head": "column"}),
        ({"*": "whole"}, {"a": "whole", "b": "whole", "twisted": "whole", "head": "whole", "embed": "whole"}),
        ({"*": "whole", "b": "row", "embed": "vocab"}, {"a": "whole", "b": "row", "head": "whole", "embed": "vocab"}),
    ],
)
def test_matrices_lie_as_asked_and_the_numbers_are_those_of_one_process(
    layouts: dict[str, Any], expected: dict[str, str]
) -> None:
    off, forms, _ = run(layouts)
    assert off < 1e-5
    assert all({name: form[name] for name in expected if name in form} == expected for form in forms), forms


def test_a_plan_keeps_what_was_asked() -> None:
    *_, text = run({"degree": 2, "a": "row", "head": "whole"})
    plan = farspan.Plan.from_json(text)
    assert plan.tensor_layouts == {"a": "row", "head": "whole"}
    assert farspan.Plan.from_json(plan.to_json()) == plan
    off, forms, _ = run(None, plan=plan)  # type: ignore[arg-type]
    assert off < 1e-5
    assert forms[0]["a"] == "row"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"tensor_parallel": {"haed": "vocab"}}, "'haed' matches nothing in this model.*nearest: 'head'"),
        ({"tensor_parallel": {"blocks.0.norm": "row"}}, "'blocks.0.norm' means no matrix"),
        ({"tensor_parallel": {"head": "rows"}}, 'cannot be \'rows\'.*"head": "row"'),
        ({"tensor_parallel": {"degree": 0}}, "is no number of ranks"),
        ({"tensor_parallel": {"degree": 2}, "plan": {"": "rank:0&rank:1"}}, "with plan="),
        ({"tensor_parallel": {"head": "row"}, "plan": {"": "rank:0", "head": "rank:1"}}, "run on one rank each"),
        (
            {"tensor_parallel": {"head": "row"}, "plan": {"blocks": "rank:0&rank:1", "head": "rank:2"}},
            "'head' lies on stage 1, which rank:2 runs alone",
        ),
    ],
)
def test_what_cannot_be_is_said_on_every_rank(arguments: dict[str, Any], said: str) -> None:
    def on_rank(rank: int) -> str:
        with pytest.raises(PlanError, match=f"(?s){said}") as caught:
            farspan.distribute(Net(), **arguments)
        return caught.value.hint

    assert all(run_threads(3 if "rank:2" in str(arguments) else 2, on_rank))


def test_what_only_a_run_shows_is_warned_of() -> None:
    def on_rank(rank: int) -> str:
        model: Any = farspan.distribute(Net(), tensor_parallel={"blocks.0.a": "column", "blocks.1.a": "vocab"})
        model.blocks[0].a.weight.register_hook(lambda gradient: gradient * 1)
        engine, said = current_engine(), []
        assert engine is not None
        engine.console.warn = said.append  # type: ignore[method-assign]
        loss_of(model, 0).backward()
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        return " ".join(said)

    for said in run_threads(2, on_rank):
        assert "blocks.0.a.weight is not split as asked (column): it has a hook" in said
        assert "blocks.1.a.weight is not split as asked (vocab): no loss over words reads what it gives" in said


def test_auto_chooses_the_same_on_all_ranks_and_says_so(capfd: pytest.CaptureFixture[str]) -> None:
    def on_rank(rank: int) -> tuple[str, ...]:
        return farspan.plan_of(farspan.distribute(Net(), tensor_parallel="auto")).stages

    (first, *others) = run_threads(4, on_rank)
    assert others == [first] * 3
    assert run_threads(
        4, lambda rank: farspan.plan_of(farspan.distribute(Net(), tensor_parallel="auto", stages=2)).stages
    )[0] == ("rank:0&rank:1", "rank:2&rank:3")
