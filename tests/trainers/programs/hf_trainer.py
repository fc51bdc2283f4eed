"""transformers' Trainer on a small language model: accumulation, clipping, evaluation, checkpoints, going on from one.

python hf_trainer.py CASE FOLDER [--farspan]

gpt2    tied embeddings; the best model is loaded at the end
llama   bf16, gradient checkpointing; no evaluation
early   the model is distributed when the Trainer exists
lora    peft's LoRA on gpt2; the best adapter is loaded at the end
"""

# pyright: reportMissingImports=false
from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from peft import LoraConfig, get_peft_model
from tests.trainers.programs.outcome import CASE, FOLDER, IS_APART, IS_DISTRIBUTED, Flushes, files_in, tell, weights
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

import farspan

__all__: list[str] = []

_TIMES = ("runtime", "per_second", "model_preparation_time")


class Texts(torch.utils.data.Dataset[Any]):
    def __init__(self, num: int, seed: int) -> None:
        starts = torch.randint(50, (num, 1), generator=torch.Generator().manual_seed(seed))
        self.tokens = (starts + torch.arange(12)) % 50

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.tokens[number], "labels": self.tokens[number]}


class Counting(TrainerCallback):
    def __init__(self) -> None:
        self.flushes = Flushes()

    def on_step_begin(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        self.flushes.begin()

    def on_step_end(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        self.flushes.end()


def build() -> Any:
    torch.manual_seed(0)
    if CASE == "llama":
        shape: Any = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 2}
        model = LlamaForCausalLM(LlamaConfig(vocab_size=50, max_position_embeddings=16, **shape))
    else:
        rates: Any = dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0)
        model = GPT2LMHeadModel(GPT2Config(vocab_size=50, n_positions=16, n_embd=32, n_layer=4, n_head=2, **rates))
    if CASE == "lora":
        torch.manual_seed(1)
        model = get_peft_model(model, LoraConfig(r=4, target_modules=["c_attn"], task_type="CAUSAL_LM"))
    return farspan.distribute(model) if IS_DISTRIBUTED and CASE != "early" else model


def accuracy(predicted: Any) -> dict[str, float]:
    return {"accuracy": float(np.mean(predicted.predictions[:, :-1].argmax(-1) == predicted.label_ids[:, 1:]))}


def trainer_in(folder: Path) -> tuple[Any, Counting]:
    counting = Counting()
    options: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 2, "load_best_model_at_end": not IS_APART}
    if CASE == "llama":
        options = {"bf16": True, "gradient_checkpointing": True}
    arguments = TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=2,
        gradient_accumulation_steps=4,
        max_steps=6,
        max_grad_norm=1.0,
        learning_rate=1e-2,
        lr_scheduler_type="cosine",
        warmup_steps=2,
        logging_steps=2,
        save_steps=2,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        **options,
    )
    trainer: Any = Trainer(
        model=build(),
        args=arguments,
        train_dataset=Texts(48, 1),
        eval_dataset=Texts(6, 2),
        compute_metrics=accuracy,
        callbacks=[counting],
    )
    if IS_DISTRIBUTED and CASE == "early":
        farspan.distribute(trainer.model)
    return trainer, counting


def rows(trainer: Any) -> list[dict[str, Any]]:
    return [
        {name: value for name, value in row.items() if not name.endswith(_TIMES)} for row in trainer.state.log_history
    ]


def main() -> None:
    torch.set_num_threads(1)
    trainer, counting = trainer_in(FOLDER)
    trainer.train()
    trainer.save_model(str(FOLDER / "last"))
    found = {"rows": rows(trainer), "weights": weights(trainer.model)}
    if IS_APART:
        tell(counting.flushes, **found, files=files_in(FOLDER))
        return
    again, _ = trainer_in(FOLDER)
    again.train(resume_from_checkpoint=str(FOLDER / "checkpoint-4"))
    tell(
        counting.flushes,
        **found,
        files=files_in(FOLDER),
        resumed_rows=rows(again),
        resumed=weights(again.model),
    )


if __name__ == "__main__":
    main()
