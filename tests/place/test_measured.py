"""The first step is measured, and the automatic plan follows from it: once, between two steps, same numbers."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.support.places import engine
from tests.support.ranks import run_threads
from torch import Tensor, nn

import farspan
from farspan.call.leaf import Leaf
from farspan.errors import PlanError
from farspan.execute.process.console import Console
from farspan.graph import Segment
from farspan.place.measure.measurements import Measured, Sample, SegmentNote
from farspan.place.measure.profiling_executor import ProfilingExecutor, _span_bytes
from farspan.place.repartition.device_speeds import speeds_of_ranks
from farspan.place.repartition.gathered_profile import RankMeasured
from farspan.profile import cache_folder
from farspan.program.program import Action
from farspan.record.parameters.copying import plan_by_model
from farspan.record.tensor import LazyTensor, StubParameter
from farspan.torch_private import shares_only_with_its_base

SHORT_S, LONG_S = 10e-3, 100e-3


class Slow(nn.Module):
    """A layer that is said to take a given time, whatever its size says."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.seconds = seconds

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layer(x)


@pytest.fixture(autouse=True)
def said_times(monkeypatch: pytest.MonkeyPatch) -> dict[int, float]:
    """Let each task take what its layers say: what a busy machine makes of it is no part of these tests.

    Returns:
        By rank, how many times as long its device takes.
    """
    slowness: dict[int, float] = {}
    trace = ProfilingExecutor._trace

    def said(profiler: ProfilingExecutor, kind: Any, action: Action, began_ns: int) -> None:
        trace(profiler, kind, action, began_ns)
        segment = action.work if isinstance(action.work, Segment) else action.work.segment
        if kind != "wait" and segment is not None:
            layers = [call.target.module for call in segment.calls if isinstance(call.target, Leaf)]
            seconds = sum(layer.seconds for layer in layers if isinstance(layer, Slow))
            profiler.taken[-1] = (*profiler.taken[-1][:3], seconds * slowness.get(engine().rank, 1.0))

    monkeypatch.setattr(ProfilingExecutor, "_trace", said)
    return slowness


def build(seconds: list[float]) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Slow(each) for each in seconds))


def train(
    model: nn.Module, num_steps: int = 3, num_micro_batches: int = 4
) -> tuple[list[float], dict[str, Tensor], Any]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(1)
    losses: list[float] = []
    for _ in range(num_steps):
        optimizer.zero_grad()
        for _ in range(num_micro_batches):
            loss = model(torch.randn(4, 8, generator=generator)).square().mean()
            loss.backward()
            losses.append(loss.item())
        optimizer.step()
    state = {name: item.clone() for name, item in model.state_dict().items()}
    engine().agreement.barrier("the end") if model in plan_by_model else None
    return losses, state, optimizer


def on_ranks(num_ranks: int, seconds: list[float], act: Callable[[nn.Module], Any], **options: Any) -> list[Any]:
    models = [build(seconds) for _ in range(num_ranks)]

    def program(rank: int) -> Any:
        return act(farspan.distribute(models[rank], **options))

    return run_threads(num_ranks, program)


def rank_of(model: nn.Module, number: int) -> int:
    """Returns where a layer is."""
    plan = farspan.plan_of(model)
    return plan.rank_of(plan.placement[str(number)])


def trained(model: nn.Module) -> tuple[list[float], dict[str, Tensor], list[int]]:
    losses, state, _ = train(model)
    return losses, state, [rank_of(model, number) for number in range(len(list(model.children())))]


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is on the console of `farspan run`, without --verbose."""
    lines: list[str] = []
    monkeypatch.setattr(Console, "say", lambda self, text: lines.append(text))
    return lines


def test_the_plan_follows_what_was_measured(shown: list[str]) -> None:
    """Six layers of equal size, of which the first takes as long as all others and more."""
    seconds = [LONG_S, *[SHORT_S] * 5]
    losses, state, _ = train(build(seconds))
    for found in on_ranks(2, seconds, trained, measure=True):
        assert found[2] == [0, 1, 1, 1, 1, 1]
        assert found[0] == losses
        assert all(torch.equal(found[1][name], item) for name, item in state.items())
    (line,) = {text for text in shown if text.startswith("the first step was measured")}
    assert line.startswith("the first step was measured: under a better plan a step is likely to take ")
    assert "units of" not in line and line.endswith(" of parameters moved")


def test_a_plan_that_is_good_enough_stays(shown: list[str]) -> None:
    for found in on_ranks(2, [SHORT_S] * 6, trained, measure=True):
        assert found[2] == [0, 0, 0, 1, 1, 1]
    (line,) = {text for text in shown if text.startswith("the first step was measured")}
    assert line.startswith("the first step was measured: parameters stay where they are") and "moved" not in line
    assert line.endswith(" stay where they are") or "% by which predictions can be wrong (computing and " in line
    assert len([text for text in shown if "schedule" in text]) == 2  # a table on each rank, from `distribute`


@pytest.mark.parametrize("is_launched", [True, False])
def test_memory_that_no_measured_plan_keeps_is_said_once(is_launched: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever has launched the ranks: the hint in the user's words, not counting what follows from their number."""
    lines: list[str] = []
    monkeypatch.setattr(Console, "_say", lambda self, text, is_shown: lines.append(text) if is_shown else None)

    def train_on(model: nn.Module) -> None:
        engine().console.is_launched = is_launched
        train(model)

    on_ranks(2, [SHORT_S] * 6, train_on, measure=True, max_memory="2kB")
    (line,) = [line for line in lines if "plan stays" in line]
    assert line.startswith(
        "the plan stays as it was: no plan keeps the hint max_memory='2kB': there is a plan without max_memory='2kB'. "
        "The least with which there is one is about max_memory="
    )


def test_a_copy_is_named_where_it_keeps_the_model_in_its_place(shown: list[str]) -> None:
    def averaged(model: nn.Module) -> None:
        average = torch.optim.swa_utils.AveragedModel(model)
        train(model)
        assert average.n_averaged == 0

    on_ranks(2, [SHORT_S] * 6, averaged, measure=True)
    (line,) = {text for text in shown if "stays" in text}
    assert line.startswith("the model stays where it began: the program has a copy of it (copy.deepcopy makes one, ")


@pytest.mark.parametrize("goes_on", [True, False])
def test_an_exception_is_said_to_keep_the_model_in_its_place_if_the_program_goes_on(
    goes_on: bool, shown: list[str]
) -> None:
    """Where it ends the program its traceback is all there is to say."""

    class Raising(nn.Module):
        """Finds only where it runs that an index is out of range."""

        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(2, 8)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.table((x.abs() > 1e6).any(-1).long() * 4)

    models = [nn.Sequential(*build([SHORT_S] * 5), Raising()) for _ in range(2)]

    def program(rank: int) -> list[int]:
        model = farspan.distribute(models[rank], measure=True)
        with pytest.raises(IndexError):
            model(torch.full((4, 8), 1e9)).sum().item()
        assert not [text for text in shown if "stays" in text]
        engine().agreement.barrier("the end")
        return trained(model)[2] if goes_on else []

    found = run_threads(2, program)
    said = [text for text in shown if "stays" in text]
    assert said == ["the model stays where it began: a step has ended with an exception"] * 2 * goes_on
    assert found == [[0, 0, 0, 1, 1, 1] if goes_on else []] * 2


def keep_values(model: Any, kept: list[Any]) -> None:
    kept.append(model(torch.ones(1, 8)).sum())


def keep_data(model: Any, kept: list[Any]) -> None:
    kept[:] = [item.data for item in model.parameters()]


def keep_arrays(model: Any, kept: list[Any]) -> None:
    kept[:] = [item.detach().numpy() for item in model.parameters()]


def keep_in_a_module(model: Any, kept: list[Any]) -> None:
    model[2].latest = model[1](torch.ones(1, 8))


def hook_on(model: Any, kept: list[Any]) -> None:
    model[0].layer.weight.register_hook(lambda gradient: gradient)


@pytest.mark.parametrize(
    ("keep", "said"),
    [
        (keep_values, r"the program's 'kept' \(HERE:\d+, in keeping\) still uses 1.layer.weight, which would move"),
        (keep_data, r"the program's 'kept' \(HERE:\d+, in keeping\) still uses 1.layer.weight, which would move"),
        (keep_arrays, r"the program's 'kept' \(HERE:\d+, in keeping\) still uses 1.layer.weight, which would move"),
        (keep_in_a_module, r"2.latest \(Slow\) still uses 1.layer.weight, which would move"),
        (hook_on, r"0.layer.weight has a hook, registered at HERE:\d+, in hook_on"),
    ],
)
def test_what_keeps_the_model_in_its_place_is_named(keep: Callable[..., None], said: str, shown: list[str]) -> None:
    """By the name and the line that the user knows: a list of values, an attribute of a module, a hook."""

    def keeping(model: nn.Module) -> None:
        kept: list[Any] = []
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for _ in range(4):
            keep(model, kept)
            for _ in range(4):
                model(torch.randn(4, 8)).square().mean().backward()
            optimizer.step()
        engine().agreement.barrier("the end")

    on_ranks(2, [*[SHORT_S] * 5, LONG_S], keeping, measure=True)
    (line,) = {text for text in shown if "stays" in text}
    assert re.fullmatch(f"the model stays where it began: {said}".replace("HERE", re.escape(__file__)), line)


def test_a_model_moves_whose_modules_keep_recorded_tensors() -> None:
    """A running mean of what the layer before gives, which the next step reads again."""

    def keeping(model: Any) -> Any:
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
        generator = torch.Generator().manual_seed(1)
        model[4].mean = torch.zeros(8)
        losses: list[Tensor] = []
        for _ in range(3):
            optimizer.zero_grad()
            for _ in range(4):
                result = model(torch.randn(4, 8, generator=generator)) + model[4].mean
                model[4].mean = 0.9 * model[4].mean + 0.1 * result.detach().mean(0)
                losses.append(result.square().mean())
                losses[-1].backward()
            optimizer.step()
        found = [loss.item() for loss in losses]
        if model not in plan_by_model:
            return found, None
        engine().agreement.barrier("the end")
        return found, [rank_of(model, number) for number in range(6)]

    seconds = [LONG_S, *[SHORT_S] * 5]
    wanted, _ = keeping(build(seconds))
    for losses, ranks in on_ranks(2, seconds, keeping, measure=True):
        assert losses == wanted
        assert ranks == [0, 1, 1, 1, 1, 1]


class Averaging(nn.Module):
    """A buffer that is another tensor after each call; a hook that keeps what it sees lets it be called in parts."""

    mean: Tensor

    def __init__(self, kept: list[Tensor]) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(8))
        self.layer = nn.Linear(8, 8)
        self.layer.register_forward_hook(lambda part, given, result: kept.append(result.detach().mean()))

    def forward(self, x: Tensor) -> Tensor:
        result = self.layer(x)
        self.mean = self.mean * 0.9 + result.detach().mean(0) * 0.1
        return result - self.mean


def test_buffers_that_are_recorded_tensors_are_placed_anew() -> None:
    """It ended with a PlanError, for what was recorded cannot become a stub."""

    def built() -> tuple[nn.Module, list[Tensor]]:
        torch.manual_seed(0)
        kept: list[Tensor] = []
        return nn.Sequential(nn.Linear(8, 8), Averaging(kept), nn.Linear(8, 5)), kept

    def averaged(model: nn.Module, kept: list[Tensor]) -> Any:
        losses, state, _ = train(model)
        return losses, [item.tolist() for item in state.values()], [item.item() for item in kept]

    given = [built(), built()]
    found = run_threads(2, lambda rank: averaged(farspan.distribute(given[rank][0], measure=True), given[rank][1]))
    assert found == [averaged(*built())] * 2


def test_a_view_shares_its_memory_only_with_what_it_is_a_view_of() -> None:
    alone, base = torch.ones(4, 4).view(16), torch.ones(4, 4)
    held, twice = base.view(16), torch.ones(4, 4).view(16)
    other, data, array = twice[:2], torch.ones(4).view(2, 2), torch.ones(4).view(2, 2)
    kept = data.data, array.numpy()
    assert shares_only_with_its_base(alone)
    assert not any(map(shares_only_with_its_base, (held, twice, data, array, torch.ones(4))))
    assert len(kept) == 2 and len(other) == 2


def test_a_model_moves_whose_buffers_are_views_that_nothing_else_shares(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mask of nanoGPT: its view alone keeps the tensor that it was made of."""

    def masked(seconds: float) -> nn.Module:
        module = Slow(seconds)
        module.register_buffer("mask", torch.tril(torch.ones(8, 8)).view(1, 1, 8, 8))
        return module

    def moving(model: nn.Module) -> list[int]:
        train(model)
        return [rank_of(model, number) for number in range(6)]

    monkeypatch.setattr(f"{__name__}.build", lambda seconds: nn.Sequential(*map(masked, seconds)))
    assert on_ranks(2, [LONG_S, *[SHORT_S] * 5], moving, measure=True) == [[0, 1, 1, 1, 1, 1]] * 2


def wide_run(model: nn.Module) -> tuple[list[float], dict[str, Tensor], tuple[str, ...], str]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(1)
    losses: list[float] = []
    for _ in range(3):
        optimizer.zero_grad()
        queued: list[Tensor] = []
        for _ in range(6):
            loss = model(torch.randn(4, 8, generator=generator)).square().mean()
            loss.backward()
            queued.append(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses += [loss.item() for loss in queued]
    state = {name: item.clone() for name, item in model.state_dict().items()}
    if model not in plan_by_model:
        return losses, state, (), ""
    engine().agreement.barrier("the end")
    plan = farspan.plan_of(model)
    return losses, state, plan.stages, plan.gradient_reduction


def test_a_slow_stage_gets_several_ranks_where_it_may() -> None:
    """No cut between layers makes a stage shorter than its slowest layer; two ranks take its micro-batches in turn.

    The next run begins with that plan.
    """
    seconds = [4 * LONG_S, *[LONG_S] * 3]
    losses, state, _, _ = wide_run(build(seconds))
    for _ in range(2):
        for found in on_ranks(3, seconds, wide_run, stages="wide", measure=True):
            assert any("+" in place for place in found[2]) and found[3] == "exact"
            assert found[0] == losses
            assert all(torch.equal(found[1][name], item) for name, item in state.items())


@pytest.mark.parametrize("options", [{"measure": False}, {"plan": {"": 0}}, {"remat": True}])
def test_stages_are_wide_only_where_that_can_be_found(options: dict[str, Any]) -> None:
    with pytest.raises(PlanError, match="wide"):
        on_ranks(2, [SHORT_S] * 6, trained, stages="wide", **options)


def test_it_is_measured_unless_somebody_says_no(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = [LONG_S, *[SHORT_S] * 5]
    monkeypatch.delenv("FARSPAN_MEASURE", raising=False)
    for found in on_ranks(2, seconds, trained):
        assert found[2] == [0, 1, 1, 1, 1, 1]
    for found in on_ranks(2, seconds, trained, measure=False):
        assert found[2] == [0, 0, 0, 1, 1, 1]
    monkeypatch.setenv("FARSPAN_MEASURE", "0")
    for found in on_ranks(2, seconds, trained):
        assert found[2] == [0, 0, 0, 1, 1, 1]


def begun(model: nn.Module) -> list[int]:
    """Where the units are at first."""
    plan = farspan.plan_of(model)
    return [plan.rank_of(plan.placement[str(number)]) for number in range(len(list(model.children())))]


def test_the_next_run_begins_where_this_one_ended() -> None:
    seconds = [LONG_S, *[SHORT_S] * 5]
    assert on_ranks(2, seconds, begun) == [[0, 0, 0, 1, 1, 1]] * 2
    on_ranks(2, seconds, trained)
    assert on_ranks(2, seconds, begun) == [[0, 1, 1, 1, 1, 1]] * 2
    assert on_ranks(2, seconds, begun, measure=False) == [[0, 0, 0, 1, 1, 1]] * 2
    assert on_ranks(2, seconds, begun, pins={"5": "rank:0"}) != [[0, 1, 1, 1, 1, 1]] * 2
    assert on_ranks(3, seconds, begun) == [[0, 0, 1, 1, 2, 2]] * 3


def test_a_plan_that_had_to_have_a_schedule_is_kept_for_that_schedule() -> None:
    seconds = [LONG_S, *[SHORT_S] * 5]
    on_ranks(2, seconds, trained, schedule="gpipe")
    assert on_ranks(2, seconds, begun) == [[0, 0, 0, 1, 1, 1]] * 2
    assert on_ranks(2, seconds, begun, schedule="gpipe") == [[0, 1, 1, 1, 1, 1]] * 2


@pytest.mark.parametrize("text", ["{", "", '{"format": "farspan-plan/1", "stages": ["rank:0"], "placement": {"": 0}}'])
def test_what_cannot_be_used_of_an_earlier_run_is_searched_again(text: str) -> None:
    seconds = [LONG_S, *[SHORT_S] * 5]
    on_ranks(2, seconds, trained)
    (kept,) = cache_folder("plans").iterdir()
    kept.write_text(text)
    assert on_ranks(2, seconds, begun) == [[0, 0, 0, 1, 1, 1]] * 2
    on_ranks(2, seconds, trained)
    assert on_ranks(2, seconds, begun) == [[0, 1, 1, 1, 1, 1]] * 2


def test_a_model_that_reads_within_its_micro_batches_is_measured_too() -> None:
    class Reading(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            for number, layer in enumerate(self):
                x = layer(x)
                if number == 2 and x.abs().max().item() > 1e9:
                    x = x / 2
            return x

    models = [Reading(*build([LONG_S, *[SHORT_S] * 5])) for _ in range(2)]
    losses, state, _ = train(Reading(*build([LONG_S, *[SHORT_S] * 5])))
    for found in run_threads(2, lambda rank: trained(farspan.distribute(models[rank]))):
        assert found[2] == [0, 1, 1, 1, 1, 1]
        assert found[0] == losses
        assert all(torch.equal(found[1][name], item) for name, item in state.items())


@pytest.mark.parametrize("options", [{"plan": {"": "rank:0"}}, {"remat": True}, {"stages": 3}])
def test_what_has_been_chosen_already_is_not_measured(options: dict[str, Any]) -> None:
    with pytest.raises(PlanError, match="measure=True is for automatic plans"):
        farspan.distribute(build([SHORT_S] * 6), measure=True, **options)


def has_data(kept: Any) -> bool:
    return type(kept) is LazyTensor and kept._value.data is not None


def test_the_old_owner_lets_go_and_the_new_one_has_all() -> None:
    def program(model: nn.Module) -> tuple[list[bool], list[int]]:
        _, _, optimizer = train(model)
        return [type(item) is StubParameter for item in model.parameters()], [
            number
            for number, item in enumerate(model.parameters())
            if any(map(has_data, optimizer.state[item].values()))
        ]

    first, second = on_ranks(2, [LONG_S, *[SHORT_S] * 5], program, measure=True)
    assert first == ([False] * 2 + [True] * 10, [0, 1])
    assert second == ([True] * 2 + [False] * 10, list(range(2, 12)))


def test_what_a_program_writes_on_parameters_stays_there() -> None:
    def program(model: nn.Module) -> list[Any]:
        before = [item.about for item in model.parameters()]  # type: ignore[attr-defined]
        train(model)
        return before + [item.about for item in model.parameters()]  # type: ignore[attr-defined]

    models = [build([LONG_S, *[SHORT_S] * 5]) for _ in range(2)]
    for model in models:
        for number, item in enumerate(model.parameters()):
            item.about = number  # type: ignore[attr-defined]
    for found in run_threads(2, lambda rank: program(farspan.distribute(models[rank], measure=True))):
        assert found == [*range(12), *range(12)]


def test_parameters_with_gradient_hooks_stay() -> None:
    def program(model: nn.Module) -> list[int]:
        for item in model.parameters():
            item.register_hook(lambda gradient: gradient * 2)
        return trained(model)[2]

    assert on_ranks(2, [LONG_S, *[SHORT_S] * 5], program, measure=True) == [[0, 0, 0, 1, 1, 1]] * 2


def test_parameters_that_something_still_uses_stay() -> None:
    def program(model: nn.Module) -> list[int]:
        kept = [item.data for item in model.parameters()]
        found = trained(model)[2]
        assert len(kept) == 12
        return found

    assert on_ranks(2, [LONG_S, *[SHORT_S] * 5], program, measure=True) == [[0, 0, 0, 1, 1, 1]] * 2


def test_a_slower_device_gets_less(said_times: dict[int, float]) -> None:
    """The second rank takes three times as long for the same."""
    said_times[1] = 3.0
    first, second = on_ranks(2, [SHORT_S] * 8, lambda model: trained(model)[2], measure=True)
    assert first == second
    assert sum(first) in (1, 2)


def share(seconds: dict[str, float], *others: dict[str, float]) -> RankMeasured:
    """What a rank has measured: of each kind of unit the seconds in one micro-batch, and in others."""
    notes = {
        (0, number): SegmentNote(key=(0, number), is_called=True, first_call=number, inputs=[], likeness=kind)
        for number, kind in enumerate(seconds)
    }
    samples = [
        Sample(number=1 + micro_batch, key=(0, number), kind="F", seconds=each)
        for micro_batch, taken in enumerate([seconds, *others])
        for number, each in enumerate(taken.values())
    ]
    measured = Measured(
        notes=notes, samples=samples, num_micro_batches=2 + len(others), split_micro_batch=-1, gradient_bytes={}
    )
    return RankMeasured(host="here", device="cpu", memory_bytes=1e9, measured=measured, state_bytes={})


def test_speeds_follow_from_work_in_common() -> None:
    """A on ranks 0 and 1, B on 1 and 2: rank 1 is half as fast as both; rank 3 has nothing in common with anybody."""
    found = speeds_of_ranks([share({"A": 1.0}), share({"A": 2.0, "B": 6.0}), share({"B": 3.0}), share({"C": 9.0})])
    assert found[0] == found[2] == found[3] == 1.0
    assert found[1] == pytest.approx(0.5, rel=0.1)


def test_noise_makes_no_difference_of_speed() -> None:
    assert speeds_of_ranks([share({"A": 1.0}), share({"A": 1.08}), share({"A": 0.95})]) == [1.0, 1.0, 1.0]


def test_what_else_runs_on_a_machine_makes_no_difference_of_speed() -> None:
    disturbed = share({"A": 5.0}, {"A": 1.02}, {"A": 4.0})
    assert speeds_of_ranks([share({"A": 1.0}), disturbed]) == [1.0, 1.0]


def test_the_memory_of_a_part_counts_its_gaps_and_what_is_repeated_counts_once() -> None:
    x = torch.zeros(4, 6)
    assert _span_bytes(x) == _span_bytes(x.t()) == 4 * 24
    assert _span_bytes(x[:, :3]) == 4 * 21
    assert _span_bytes(x[:1].expand(4, 6)) == 4 * 6
    assert _span_bytes(None) == _span_bytes(x[:0]) == 0
    assert _span_bytes(x.to_sparse()) == 4 * 24
