"""Heads and losses over words of split stages: the numbers of one process, and no rank holds the logits."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.support.ranks import run_threads
from tests.wide.test_loops import largest_difference, same
from torch import Tensor, nn

import farspan
from farspan.execute.process.world import current_engine

NUM_WORDS, SIZE = 13, 8
WORDS = torch.randint(NUM_WORDS, (4, 6), generator=torch.Generator().manual_seed(1))
WEIGHT = torch.rand(NUM_WORDS, generator=torch.Generator().manual_seed(2)) + 0.5


class Net(nn.Module):
    """A tied embedding and head, of a number of words that ranks cannot divide."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.a, self.b = nn.Embedding(NUM_WORDS, SIZE, padding_idx=0), nn.Linear(8, 16), nn.Linear(16, 8)
        self.head = nn.Linear(SIZE, NUM_WORDS, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, words: Tensor) -> Tensor:
        x = self.embed(words)
        return self.head(x + self.b(torch.tanh(self.a(x))))


def target_of(number: int) -> Tensor:
    target = (WORDS + number) % NUM_WORDS
    target[0, 0] = target[2, 3] = -100
    return target.flatten()


def plain(logits: Tensor, number: int) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), target_of(number))


def weighted_and_smoothed(logits: Tensor, number: int) -> Tensor:
    return nn.CrossEntropyLoss(weight=WEIGHT, label_smoothing=0.1)(logits.view(-1, NUM_WORDS), target_of(number))


def each_by_itself(logits: Tensor, number: int) -> Tensor:
    each = F.cross_entropy(logits.transpose(1, 2), target_of(number).view(4, 6), reduction="none", label_smoothing=0.2)
    return each.square().mean()


def negative_log_likelihood(logits: Tensor, number: int) -> Tensor:
    return nn.NLLLoss(weight=WEIGHT, ignore_index=3)(logits.log_softmax(-1).view(-1, NUM_WORDS), target_of(number) % 13)


def shifted(logits: Tensor, number: int) -> Tensor:
    """As causal language models do."""
    before = logits.float()[..., :-1, :].contiguous()
    after = target_of(number).view(4, 6)[..., 1:].contiguous()
    return F.cross_entropy(before.view(-1, before.size(-1)), after.view(-1), reduction="sum") / 7


def capped(logits: Tensor, number: int) -> Tensor:
    return plain(30 * torch.tanh(logits / 30), number)


def measured_beside(logits: Tensor, number: int) -> Tensor:
    is_right = (logits.argmax(-1) == WORDS).float().mean()
    return plain(logits, number) * (1 + is_right.item())


def target_of_a_model(logits: Tensor, number: int) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), (logits.detach().argmax(-1) + number).flatten() % NUM_WORDS)


def forbidden_words(logits: Tensor, number: int) -> Tensor:
    """One member has none of the words that may be."""
    logits = logits.masked_fill(torch.arange(NUM_WORDS) > 5, -torch.inf)
    return F.cross_entropy(logits.flatten(0, 1), (WORDS + number).flatten() % 6)


def probabilities(logits: Tensor, number: int) -> Tensor:
    target = F.one_hot((WORDS + number) % NUM_WORDS, NUM_WORDS).float() * 0.9 + 0.1 / NUM_WORDS
    return F.cross_entropy(logits.flatten(0, 1), target.flatten(0, 1))


def normalizer_beside(logits: Tensor, number: int) -> Tensor:
    return plain(logits, number) + 0.01 * logits.logsumexp(-1).square().mean()


def hooked(logits: Tensor, number: int) -> Tensor:
    logits.register_hook(lambda gradient: 2 * gradient)
    return plain(logits, number)


def gradient_of_logits(logits: Tensor, number: int) -> Tensor:
    loss = plain(logits, number)
    (gradient,) = torch.autograd.grad(loss, logits, retain_graph=True)
    return loss * gradient.abs().sum().item()


def train(model: Any, loss_of: Callable[[Tensor, int], Tensor]) -> Any:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    found: list[float] = []
    for step in range(3):
        optimizer.zero_grad()
        numbers = range(step, step + 2)
        losses = [loss_of(model((WORDS + number) % NUM_WORDS), number) for number in numbers]
        for loss in losses:
            loss.backward()
        optimizer.step()
        found += [loss.item() for loss in losses]
        model.eval()
        with torch.no_grad():
            found.append(model(WORDS).argmax(-1).float().mean().item())
        model.train()
    return found, {name: tensor.tolist() for name, tensor in model.state_dict().items()}


def run(loss_of: Any, num_ranks: int, tensor_parallel: Any) -> tuple[Any, list[Any], list[dict[str, str]]]:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        model = Net()
    wanted = train(copy.deepcopy(model), loss_of)
    models = [copy.deepcopy(model) for _ in range(num_ranks)]

    def on_rank(rank: int) -> Any:
        model = farspan.distribute(models[rank], tensor_parallel=tensor_parallel)
        found, engine = train(model, loss_of), current_engine()
        assert engine is not None
        matrices = engine.recorder.splitting.matrices
        return found, {name: matrices.form_of(name)[0] for name, _ in model.named_parameters()}

    found = run_threads(num_ranks, on_rank)
    return wanted, [item[0] for item in found], [item[1] for item in found]


@pytest.mark.parametrize(
    ("loss_of", "form"),
    [
        *((each, "vocab") for each in (plain, weighted_and_smoothed, each_by_itself, negative_log_likelihood, shifted)),
        *((each, "vocab") for each in (capped, measured_beside, target_of_a_model, forbidden_words)),
        (gradient_of_logits, "vocab"),
        *((each, "whole") for each in (probabilities, normalizer_beside, hooked)),
    ],
)
def test_losses_are_those_of_one_process(loss_of: Any, form: str) -> None:
    wanted, found, forms = run(loss_of, 2, 2)
    assert all(same(item, found[0]) for item in found), "all ranks see the same"
    assert largest_difference(found[0], wanted) < 1e-6
    assert [item["embed.weight"] for item in forms] == [form] * 2


def test_an_embedding_that_is_asked_to_be_split_is_and_repeats() -> None:
    wanted, found, forms = run(weighted_and_smoothed, 3, {"embed": "vocab"})
    assert largest_difference(found[0], wanted) < 1e-6
    assert forms[0]["embed.weight"] == "vocab"
    assert same(found, run(weighted_and_smoothed, 3, {"embed": "vocab"})[1]), "to the last bit"


def test_no_rank_holds_the_logits() -> None:
    """Neither when they are computed, nor for the loss, nor of their gradient."""

    def on_rank(rank: int) -> list[int]:
        model, sizes = farspan.distribute(Net(), tensor_parallel=2), []
        engine = current_engine()
        assert engine is not None
        for loss_of in (plain, shifted, negative_log_likelihood):
            loss_of(model(WORDS), 0).backward()
            for graph in engine.recorder.pending:
                metas = [value.meta for call in graph.calls for value in call.outputs]
                sizes += [size for meta in metas for size in meta.shape]
        return sizes

    for sizes in run_threads(2, on_rank):
        assert {6, 7} <= set(sizes)
        assert NUM_WORDS not in sizes


def test_a_target_that_is_no_word_is_an_error() -> None:
    def on_rank(rank: int) -> None:
        model = farspan.distribute(Net(), tensor_parallel=2)
        F.cross_entropy(model(WORDS).flatten(0, 1), WORDS.flatten() + 5).backward()
        farspan.flush()

    with pytest.raises(Exception, match="index out of range"):
        run_threads(2, on_rank)
