"""Inference: evaluation at any batch size, and texts that grow by a token at a time, with caches of keys and values."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tests.generation.decoder import PROMPTS, Decoder, Grown, Reserved, beam, greedy, sample
from tests.support.models import Normed
from tests.support.plainly import assert_same_as_plainly
from tests.support.ranks import run_processes, run_threads
from torch import Tensor, nn

import farspan
from farspan.comm.channels import Channels
from farspan.errors import FarspanError
from farspan.execute.process.world import current_engine

SCRIPT = Path(__file__).resolve().parents[1] / "programs" / "generation.py"


WAYS: dict[str, Callable[[Any, Tensor], Any]] = {
    "grown": lambda model, ids: greedy(model, ids, Grown()),
    "reserved": lambda model, ids: greedy(model, ids, Reserved(len(ids), 2), num_tokens=6),
    "no cache": lambda model, ids: greedy(model, ids, None, num_tokens=6),
    "beam": lambda model, ids: beam(model, ids, Grown()),
    "sample": lambda model, ids: sample(model, ids, Grown(), torch.Generator().manual_seed(1)),
}


@pytest.mark.parametrize(("way", "num_ranks"), [("grown", 1), *((way, 2) for way in WAYS), ("beam", 3)])
def test_the_same_tokens_as_in_one_process(way: str, num_ranks: int) -> None:
    def program(model: Any) -> Any:
        model.eval()
        return [WAYS[way](model, PROMPTS[:batch]) for batch in (3, 1)]

    assert_same_as_plainly(Decoder, program, num_ranks)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_generating_in_the_middle_of_training_changes_nothing(num_ranks: int) -> None:
    def train(model: Any, *, generates: bool) -> Any:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        texts, losses = [], []
        for shift in range(3):
            for ids in ((PROMPTS + shift) % 19, PROMPTS.flip(1)):
                loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
                loss.backward()
                losses.append(loss)
            if generates:
                model.eval()
                texts.append(greedy(model, PROMPTS[: shift + 1], Grown(), num_tokens=5))
                model.train()
            optimizer.step()
            optimizer.zero_grad()
        return texts, [loss.item() for loss in losses], {k: v.tolist() for k, v in model.state_dict().items()}

    def without_dropout() -> nn.Module:
        model = Decoder()
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
        return model

    assert_same_as_plainly(without_dropout, lambda model: train(model, generates=True), num_ranks)

    torch.manual_seed(0)
    first = Decoder()
    models = [Decoder() for _ in range(2 * num_ranks)]
    for model in models:
        model.load_state_dict(first.state_dict())

    def train_all(k: int) -> list[Any]:
        torch.manual_seed(5)
        return run_threads(num_ranks, lambda rank: train(farspan.distribute(models[2 * rank + k]), generates=k == 0))

    with_texts, without = map(train_all, range(2))
    assert [result[1:] for result in with_texts] == [result[1:] for result in without]  # dropout and all


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_evaluation_at_any_batch_size_after_any_other(num_ranks: int) -> None:
    images = torch.randn(7, 3, 6, 6, generator=torch.Generator().manual_seed(4))

    def program(model: Any) -> Any:
        results = []
        for batch in (4, 7, 1):
            model.train()
            model(images[:batch]).mean().backward()
            model.eval()
            with torch.inference_mode():
                results += [model(images[:size]).tolist() for size in (batch, 1, 5)]
        return results, [buffer.tolist() for buffer in model.state_dict().values()]

    assert_same_as_plainly(Normed, program, num_ranks)


def test_a_cache_stays_with_the_layers_that_made_it(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[int] = []
    send = Channels.send

    def counting(self: Channels, message: Any, tensors: Any, metas: Any) -> None:
        sent.append(sum(tensor.numel() for tensor in tensors))
        send(self, message, tensors, metas)

    models = [Decoder().eval() for _ in range(2)]

    def program(rank: int) -> None:
        model = farspan.distribute(models[rank])
        greedy(model, PROMPTS, Grown(), num_tokens=6, stops=False)

    monkeypatch.setattr(Channels, "send", counting)
    run_threads(2, program)
    activation, token = 3 * 16, 3
    assert sorted(set(sent)) in ([token, activation, 5 * activation], [activation, 5 * activation])


def test_a_text_that_gets_longer_is_not_foreseen_again_for_each_length() -> None:
    models = [Decoder().eval() for _ in range(2)]

    def program(rank: int) -> list[int]:
        model = farspan.distribute(models[rank])
        engine = current_engine()
        assert engine is not None
        runs = []
        for num_tokens in (14, 24):
            greedy(model, PROMPTS, Grown(), num_tokens=num_tokens, stops=False)
            runs.append(engine.recorder.cache.num_runs)
        return runs

    for after_some, after_more in run_threads(2, program):
        assert after_some == after_more


class Scores(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x)))


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_results_are_collected_in_a_tensor_made_before(num_ranks: int) -> None:
    inputs = torch.randn(3, 5, 4, generator=torch.Generator().manual_seed(1))

    def program(model: Any) -> Any:
        kept = torch.zeros(3, 5, 2)
        before = kept + 1
        for i in range(3):
            kept[i] = model(inputs[i])
        loss = (kept * kept).sum() + before.sum()
        loss.backward()
        return kept.tolist(), loss.item(), [parameter.grad.tolist() for parameter in model.parameters()]

    assert_same_as_plainly(Scores, program, num_ranks)


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("kind", ["view", "alias", "array"])
def test_memory_that_others_see_is_not_written_by_recorded_values(kind: str, num_ranks: int) -> None:
    models = [Scores() for _ in range(num_ranks)]

    def program(rank: int) -> None:
        model: Any = farspan.distribute(models[rank])
        whole = torch.zeros(2, 5, 2)
        one = torch.zeros(5, 2)
        alias = one.detach()
        array = torch.from_numpy(np.zeros((5, 2), dtype=np.float32))
        target = {"view": whole[1], "alias": alias, "array": array}[kind]
        target.copy_(model(torch.ones(5, 4)))

    with pytest.raises(FarspanError, match="writes recorded values into a plain tensor"):
        run_threads(num_ranks, program)


def test_the_same_tokens_in_real_processes_with_a_seed() -> None:
    results = [json.loads(process.stdout.splitlines()[-1]) for process in run_processes(2, SCRIPT)]
    for wanted, got in results:
        assert got == wanted


# Models of transformers.


def _config(transformers: Any, kind: str) -> Any:
    ends = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    if kind == "gpt2":
        return transformers.GPT2Config(vocab_size=61, n_embd=16, n_layer=2, n_head=2, n_positions=64, **ends)
    sizes = {"vocab_size": 61, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    if kind == "mistral":  # of which each layer sees the last tokens only
        return transformers.MistralConfig(
            **sizes, num_attention_heads=2, num_key_value_heads=1, sliding_window=8, max_position_embeddings=64, **ends
        )
    return transformers.T5Config(
        vocab_size=61, d_model=16, d_kv=8, d_ff=24, num_layers=2, num_heads=2, decoder_start_token_id=0, **ends
    )


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("gpt2", {"num_beams": 2}),
        ("gpt2", {"cache_implementation": "static"}),
        ("mistral", {"repetition_penalty": 1.3}),
        ("t5", {"output_scores": True, "return_dict_in_generate": True}),
        ("t5", {"num_beams": 2}),
    ],
)
def test_generate_of_transformers_gives_the_same_tokens(kind: str, options: dict[str, Any]) -> None:
    transformers = pytest.importorskip("transformers")
    config = _config(transformers, kind)
    auto = transformers.AutoModelForSeq2SeqLM if kind == "t5" else transformers.AutoModelForCausalLM
    ids = torch.randint(3, 61, (3, 5), generator=torch.Generator().manual_seed(5))

    def build() -> Any:
        model = auto.from_config(config).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(6)
        return model

    def program(model: Any) -> Any:
        texts = []
        for batch in (2, 3):
            given = {"input_ids": ids[:batch], "attention_mask": torch.ones(batch, 5, dtype=torch.long)}
            text = model.generate(**given, max_new_tokens=6, min_new_tokens=4, do_sample=False, **options)
            if torch.is_tensor(text):
                texts.append(text.tolist())
            else:
                texts += [text.sequences.tolist(), [scores.tolist() for scores in text.scores]]
        return texts

    assert_same_as_plainly(build, program, 2)
