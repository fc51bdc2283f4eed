"""Trainers that were set up for several processes before `farspan.distribute` was called, and those that cannot be.

python too_late.py CASE FOLDER          tells what `distribute` and Lightning say
"""

# pyright: reportMissingImports=false
from __future__ import annotations

import functools
import gc
from collections.abc import Callable
from typing import Any

import lightning
import torch
from accelerate import Accelerator
from tests.trainers.programs.hf_trainer import Texts
from tests.trainers.programs.outcome import FOLDER, Flushes, tell, weights
from torch import nn
from torch.utils.data import DataLoader

import farspan

__all__: list[str] = []


def refusal(act: Callable[[], Any]) -> str:
    try:
        act()
    except farspan.FarspanError as error:
        return str(error)
    return ""


def main() -> None:
    torch.set_num_threads(1)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(DataLoader(Texts(8, 1), batch_size=2))
    sharded = refusal(lambda: farspan.distribute(model))
    del loader
    accelerator.free_memory()
    gc.collect()
    wrapped = accelerator.prepare(nn.Linear(4, 4))
    ddp = refusal(functools.partial(farspan.distribute, wrapped))
    del wrapped
    accelerator.free_memory()
    gc.collect()
    trainer = lightning.Trainer(strategy="ddp", accelerator="cpu", devices=2, logger=False)
    early = refusal(lambda: farspan.distribute(model))
    del trainer
    gc.collect()
    farspan.distribute(model)
    fsdp = refusal(lambda: lightning.Trainer(strategy="fsdp", accelerator="cpu", devices=2))
    ours = lightning.Trainer(strategy="ddp", accelerator="cpu", devices=2, default_root_dir=FOLDER)
    tell(
        Flushes(),
        texts=[sharded, ddp, early, fsdp],
        strategy=type(ours.strategy).__name__,
        state=[str(accelerator.distributed_type), accelerator.num_processes, accelerator.process_index],
        weights=weights(model),
    )


if __name__ == "__main__":
    main()
