"""A program that is run for its first steps only: what is found out about them."""

from __future__ import annotations

from collections.abc import Callable

import psutil
import pytest
import torch
import torch.nn.functional as F
from tests.support.ranks import run_threads
from torch import nn

import farspan
from farspan.errors import PlanError
from farspan.place.measure.trial import Trial
from farspan.profile import StepProfile, costed_graph, this_machine

WIDTH = 16


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(WIDTH, 2 * WIDTH)
        self.back = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.back(torch.tanh(self.wide(x)))


class Net(nn.Module):
    """An embedding tied to the head, a parameter of its own, blocks, a skip over them, a part never used."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, WIDTH)
        self.shift = nn.Parameter(torch.zeros(WIDTH))
        self.blocks = nn.ModuleList([Block() for _ in range(4)])
        self.unused = nn.Linear(3, 3)
        self.head = nn.Linear(WIDTH, 8, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = first = self.embed(tokens) + self.shift
        for block in self.blocks:
            x = block(x)
        return self.head(x + first)


def train(
    model: nn.Module,
    *,
    micro_batches: int = 4,
    steps: int = 9,
    reads: bool = False,
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW,
) -> None:
    model = farspan.distribute(model)
    chosen = optimizer(model.parameters(), lr=0.1)
    for _ in range(steps):
        chosen.zero_grad()
        for number in range(micro_batches):
            loss = nn.functional.cross_entropy(model(torch.arange(6) % 8), torch.arange(6) % (number + 1))
            loss.backward()
            if reads:
                loss.item()
        chosen.step()


def profile_of(program: Callable[[], None], *, is_dry: bool = False, has_fake_weights: bool = True) -> StepProfile:
    with Trial(num_devices=lambda: 2, is_dry=is_dry, has_fake_weights=is_dry and has_fake_weights) as trial:
        program()
        pytest.fail("it went on")
    return trial.profile()


@pytest.mark.parametrize("is_dry", [False, True])
def test_the_units_of_a_model_and_what_flows_between_them(is_dry) -> None:
    profile = profile_of(lambda: train(Net()), is_dry=is_dry)
    names = [unit.name for unit in profile.units]
    assert names == ["shift", "embed", "blocks.0", "blocks.1", "blocks.2", "blocks.3", "unused", "head"]
    size = 6 * WIDTH * 4
    assert sorted((names[v.source], names[v.target], v.size_bytes) for v in profile.values) == sorted(
        [
            ("shift", "embed", WIDTH * 4),
            ("embed", "blocks.0", size),
            ("embed", "head", 8 * WIDTH * 4),
            ("embed", "blocks.3", size),
            *((f"blocks.{i}", f"blocks.{i + 1}", size) for i in range(3)),
            ("blocks.3", "head", size),
        ]
    )
    assert profile.num_micro_batches == 4


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.wide(x).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(heads[0], heads[1], heads[2]).transpose(1, 2).flatten(2)


@pytest.mark.parametrize("is_dry", [False, True])
def test_attention_in_one_operation_counts_as_its_products(is_dry) -> None:
    def program() -> None:
        model = farspan.distribute(nn.Sequential(nn.Linear(WIDTH, WIDTH), Attention()))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(6):
            for _ in range(2):
                model(torch.ones(3, 5, WIDTH)).sum().backward()
            optimizer.step()

    profile = profile_of(program, is_dry=is_dry)
    unit = next(each for each in profile.units if each.name.startswith("1"))
    linear, attention = 2 * 15 * WIDTH * 3 * WIDTH, 2 * (2 * 3 * 5 * 5 * WIDTH)
    assert sum(each.flops for each in unit.forward_work) == linear + attention
    assert sum(each.flops for each in unit.backward_work) == 2 * linear + 2.5 * attention  # scores are computed again


@pytest.mark.parametrize("has_fake_weights", [False, True])
def test_counting_without_data_finds_what_running_finds(has_fake_weights) -> None:
    real = profile_of(lambda: train(Net()))
    dry = profile_of(lambda: train(Net()), is_dry=True, has_fake_weights=has_fake_weights)
    for ran, counted in zip(real.units, dry.units, strict=True):
        assert (ran.name, ran.saved_bytes, ran.memory_bytes) == (
            counted.name,
            counted.saved_bytes,
            counted.memory_bytes,
        )
        assert sum(each.flops for each in ran.forward_work) == sum(each.flops for each in counted.forward_work)
        assert sum(each.flops for each in ran.backward_work) == sum(each.flops for each in counted.backward_work)
    block = dry.units[2]
    assert sum(each.flops for each in block.forward_work) == 2 * 6 * WIDTH * 2 * WIDTH * 2
    assert sum(each.flops for each in block.backward_work) == 2 * sum(each.flops for each in block.forward_work)
    assert block.saved_bytes == 6 * WIDTH * 4 + 6 * 2 * WIDTH * 4  # the input, and what tanh gives
    for ran, counted in zip(real.units, dry.units, strict=True):
        assert (ran.working_bytes, ran.released_bytes) == (counted.working_bytes, counted.released_bytes), ran.name


def test_an_average_of_the_model_lies_beside_it_and_is_not_trained() -> None:
    def profile(*, averages: bool) -> StepProfile:
        with Trial(num_devices=lambda: 2) as trial:
            model = farspan.distribute(Net())
            average = torch.optim.swa_utils.AveragedModel(model) if averages else None
            optimizer = torch.optim.AdamW(model.parameters())
            for _ in range(9):
                model(torch.arange(6) % 8).square().mean().backward()
                optimizer.step()
                if average is not None:
                    average.update_parameters(model)
        return trial.profile()

    alone, beside = profile(averages=False), profile(averages=True)
    assert [each.trained_bytes for each in beside.units] == [each.trained_bytes for each in alone.units]
    for own, other in zip(alone.units, beside.units, strict=True):
        assert other.memory_bytes == own.memory_bytes + own.trained_bytes


def test_what_a_unit_needs_while_it_runs() -> None:
    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x * self.scale).expand(100, *x.shape).contiguous().sum(0)

    for is_dry in (False, True):
        unit = profile_of(
            lambda: train_on(nn.Sequential(Wide(), Wide(), Wide()), torch.ones(WIDTH)),
            is_dry=is_dry,
            has_fake_weights=False,
        ).units[1]
        assert unit.saved_bytes == WIDTH * 4  # the input
        assert 100 * WIDTH * 4 <= unit.working_bytes <= 104 * WIDTH * 4, is_dry


def test_what_a_backward_lets_go_of_in_the_middle_of_a_stage() -> None:
    unit = nn.Sequential(nn.Linear(256, 64), nn.Tanh())
    model = nn.Sequential(nn.Linear(8, 256), unit, nn.Linear(64, 8))
    unit = profile_of(lambda: train_on(model, torch.ones(100, 8))).units[1]
    assert unit.released_bytes == 2 * 100 * 64 * 4  # its output and the gradient of that, before its input's gradient


def test_what_is_sent_and_saved_is_known() -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(8, 8), nn.Tanh()), nn.Linear(8, 8), nn.Linear(8, 8))
    profile = profile_of(lambda: train_on(model, torch.ones(2, 8)))
    assert [value.is_saved for value in profile.values] == [True, False]  # tanh keeps what it gives


def train_on(model: nn.Module, x: torch.Tensor) -> None:
    model = farspan.distribute(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(9):
        model(x).sum().backward()
        optimizer.step()


def test_repeated_blocks_have_one_row_of_costs() -> None:
    profile = profile_of(lambda: train(Net()))
    blocks = [unit for unit in profile.units if unit.name in ("blocks.0", "blocks.1", "blocks.2")]
    assert len({unit.likeness for unit in blocks}) == 1
    assert len({(unit.forward_s, unit.backward_s) for unit in blocks}) == 1
    assert all(unit.forward_s and unit.backward_s for unit in blocks)
    assert profile.units[6].forward_s == 0.0  # never used


@pytest.mark.parametrize(
    ("optimizer", "times"),
    [
        (torch.optim.SGD, 2),
        (lambda parameters, lr: torch.optim.SGD(parameters, lr, momentum=0.9), 3),
        (torch.optim.AdamW, 4),
    ],
)
def test_memory_is_parameters_gradients_and_what_the_optimizer_keeps(optimizer, times) -> None:
    profile = profile_of(lambda: train(Net(), optimizer=optimizer))
    block = profile.units[2]
    assert block.trained_bytes == 4 * (WIDTH * 2 * WIDTH * 2 + 3 * WIDTH)
    assert block.memory_bytes == times * block.trained_bytes
    assert profile.notes == ()
    assert profile.units[-1].memory_bytes == 0  # the head is the embedding


def test_an_optimizer_that_cannot_be_tried_is_said_so() -> None:
    class Odd(torch.optim.SGD):
        def step(self, closure=None):
            raise ValueError

    def program() -> None:
        net = Net()
        model = farspan.distribute(net)
        odd = Odd(net.head.parameters(), 0.1)
        optimizer = torch.optim.SGD(net.blocks.parameters(), 0.1)
        for _ in range(9):
            model(torch.arange(6)).sum().backward()
            optimizer.step()
        odd.step()

    assert "Odd could not be tried (ValueError)" in profile_of(program).notes[0]


def test_micro_batches_are_counted_where_each_is_read_at_once() -> None:
    assert profile_of(lambda: train(Net(), micro_batches=3, reads=True)).num_micro_batches == 3


def test_one_micro_batch_is_timed_over_several_steps() -> None:
    profile = profile_of(lambda: train(Net(), micro_batches=1))
    assert profile.num_micro_batches == 1 and profile.units[2].forward_s


class Chain(nn.Module):
    """Four blocks; may read a value after two of them."""

    def __init__(self, *, reads: bool) -> None:
        super().__init__()
        self.reads = reads
        self.blocks = nn.ModuleList([Block() for _ in range(4)])
        self.head = nn.Linear(WIDTH, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number, block in enumerate(self.blocks):
            x = block(x)
            if self.reads and number == 1 and x.abs().max().item() > 1e6:
                x = x / 2
        return self.head(x)


@pytest.mark.parametrize("reads", ["within", "loss", "within, and evaluates before"])
def test_a_micro_batch_may_be_read_before_its_backward(reads: str) -> None:
    def program() -> None:
        model = farspan.distribute(Chain(reads="within" in reads))
        if "evaluates" in reads:
            model(torch.ones(4, WIDTH)).sum().item()  # its backward is never asked for
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(9):
            for _ in range(2):
                loss = model(torch.ones(4, WIDTH)).square().mean()
                if reads == "loss" and not loss.isfinite().item():
                    raise AssertionError
                loss.backward()
            optimizer.step()

    profile = profile_of(program)
    assert len(profile.units) == 5
    assert all(unit.forward_s and unit.backward_s and unit.saved_bytes for unit in profile.units)
    flows = {(value.source, value.target) for value in profile.values if value.size_bytes == 4 * WIDTH * 4}
    assert flows == {(number, number + 1) for number in range(4)}
    assert profile.num_micro_batches == 2


def test_nothing_is_trained_where_one_step_is_enough() -> None:
    model = Net()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    profile_of(lambda: train(model))
    assert all(map(torch.equal, before, model.parameters()))


def test_a_dry_run_needs_no_memory_for_the_weights() -> None:
    def program() -> None:
        before = psutil.Process().memory_info().rss
        large = [nn.Linear(5000, 5000) for _ in range(100)]  # 9.3 GiB
        assert psutil.Process().memory_info().rss - before < 1e9
        assert large[0].weight.shape == (5000, 5000)
        train(Net())

    profile_of(program, is_dry=True)
    assert nn.Linear(2, 2).weight.sum().item()  # and is over with the trial


def test_a_model_without_weights_changes_its_dtype_and_stays_tied() -> None:
    profile = profile_of(lambda: train(Net().to(torch.bfloat16)), is_dry=True)
    block = profile.units[2]
    assert block.trained_bytes == 2 * (WIDTH * 2 * WIDTH * 2 + 3 * WIDTH)
    assert {each.dtype for each in block.forward_work} == {"bfloat16"}
    assert profile.units[-1].memory_bytes == 0


def test_modules_on_a_circle_have_words_together() -> None:
    class Weave(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c, self.d = (Block() for _ in range(4))

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            x = nn.functional.one_hot(tokens, WIDTH).float()
            return self.d(self.c(self.b(self.a(self.b(self.a(x))))))

    graph = costed_graph(profile_of(lambda: train(Weave())), this_machine())
    together = {node.name.split(".")[0]: node.together for node in graph.nodes}
    assert together["a"] == together["b"] != together["c"] and together["c"] is together["d"] is None


def test_an_operation_that_comes_back_to_an_early_stage_closes_no_circle() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = (Block() for _ in range(3))

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            first = self.a(nn.functional.one_hot(tokens, WIDTH).float())
            last = self.c(self.b(first))
            return first @ (last.mean() * self.a.wide.weight).T  # both run where the weight is, which is the largest

    graph = costed_graph(profile_of(lambda: train(Scaled())), this_machine())
    assert all(node.together is None for node in graph.nodes)


def test_a_program_without_a_step_is_an_error() -> None:
    with Trial(num_devices=lambda: 2) as trial:
        pass
    with pytest.raises(PlanError, match=r"has not called farspan\.distribute"):
        trial.profile()
    with Trial(num_devices=lambda: 2) as trial:
        farspan.distribute(Net())(torch.arange(3))
    with pytest.raises(PlanError, match="has not trained a distributed model"):
        trial.profile()


def test_a_second_model_is_an_error() -> None:
    with Trial(num_devices=lambda: 2):
        farspan.distribute(Net())
        with pytest.raises(PlanError, match="second model"):
            farspan.distribute(Net())


def test_a_step_that_needs_its_data_cannot_be_counted() -> None:
    class Chooses(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.linear(x)
            return y[y > 0]

    def program() -> None:
        model = farspan.distribute(Chooses())
        model(torch.ones(2, 4)).sum().backward()
        torch.optim.SGD(model.parameters(), 0.1).step()

    with pytest.raises(PlanError, match="cannot be counted without data"):
        profile_of(program, is_dry=True)


def test_a_dry_run_says_where_it_cannot_count_micro_batches() -> None:
    assert "--micro-batches" in profile_of(lambda: train(Net(), reads=True), is_dry=True).notes[0]
    assert profile_of(lambda: train(Net()), is_dry=True).notes == ()


def test_a_constructor_that_reads_weights_ends_in_an_error() -> None:
    def program() -> None:
        nn.Linear(2, 2).weight.sum().item()

    with pytest.raises(PlanError, match="cannot be counted without data"):
        profile_of(program, is_dry=True)


def test_a_program_that_is_under_way_is_left_as_it_was() -> None:
    def program(rank: int) -> int:
        model = farspan.distribute(nn.Linear(4, 4))
        with Trial(num_devices=lambda: 2) as trial:
            train(Net())
        assert len(trial.profile().units) > 4
        model(torch.ones(2, 4)).sum().backward()
        farspan.flush()
        step = farspan.last_step()
        assert step is not None and step.has_backward
        return step.num_micro_batches

    assert run_threads(1, program) == [1]
