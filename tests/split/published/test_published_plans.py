"""What is found by structure is what transformers' plans by names (`base_model_tp_plan`) say, where they divide."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from tests.support.ranks import run_threads

import farspan
from farspan.execute.process.world import current_engine

SIZES: dict[str, Any] = {
    "vocab_size": 50,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
WORDS = {"colwise": "column", "rowwise": "row"}


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma2", "starcoder2", "olmo2", "glm4"])
def test_matrices_are_split_as_the_published_plan_says(kind: str) -> None:
    """Where the plan gathers at once (an operation needs all columns), the matrix may be split or whole here."""
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.for_model(kind, **SIZES)
    published = {f"model.{pattern}.weight": word for pattern, word in config.base_model_tp_plan.items()}

    def program(rank: int) -> dict[str, str]:
        torch.manual_seed(0)
        model: Any = farspan.distribute(transformers.AutoModelForCausalLM.from_config(config), tensor_parallel=2)
        tokens = torch.arange(12).view(2, 6)
        for _ in range(3):
            model(input_ids=tokens, labels=tokens).loss.backward()
            farspan.flush()
        engine = current_engine()
        assert engine is not None
        form_of = engine.recorder.splitting.matrices.form_of
        return {name: form_of(name)[0] for name, _ in model.named_parameters()}

    for forms in run_threads(2, program):
        divided = {
            name: (form, WORDS[word])
            for name, form in forms.items()
            for pattern, word in published.items()
            if word in WORDS and re.fullmatch(pattern.replace(".", r"\.").replace("*", r"\d+"), name)
        }
        assert divided
        assert {name: pair for name, pair in divided.items() if pair[0] != pair[1]} == {}
