"""Lightning's Trainer: accumulation, clipping, logging, validation, checkpoints, going on from one; and Fabric.

python lightning_trainer.py CASE FOLDER [--farspan]          CASE: trainer, bf16, ddp, fabric
"""

# pyright: reportMissingImports=false
from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from tests.trainers.programs.outcome import CASE, FOLDER, IS_APART, IS_DISTRIBUTED, Flushes, files_in, tell, weights
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import farspan

__all__: list[str] = []


def network() -> nn.Module:
    torch.manual_seed(0)
    blocks = [part for _ in range(4) for part in (nn.Linear(8, 8), nn.Tanh())]
    return nn.Sequential(*blocks, nn.Linear(8, 5))


def loader(num: int, seed: int, *, shuffle: bool = False) -> Any:
    x = torch.randn(num, 8, generator=torch.Generator().manual_seed(seed))
    return DataLoader(TensorDataset(x, x[:, :5].argmax(1)), batch_size=4, shuffle=shuffle)


class Classifier(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = network()
        self.flushes = Flushes()
        self.rows: list[Any] = []

    def training_step(self, batch: Any, number: int) -> Tensor:
        loss = F.cross_entropy(self.net(batch[0]), batch[1])
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, number: int) -> None:
        out = self.net(batch[0])
        self.log("val_loss", F.cross_entropy(out, batch[1]))
        self.log("val_accuracy", (out.argmax(-1) == batch[1]).float().mean())

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return [optimizer], [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 4)]

    def on_train_batch_start(self, batch: Any, number: int) -> None:
        if number % 4 == 0:
            self.flushes.begin()

    def on_train_batch_end(self, outputs: Any, batch: Any, number: int) -> None:
        if number % 4 == 3:
            self.flushes.end()

    def on_train_epoch_end(self) -> None:
        self.rows.append({name: float(value) for name, value in self.trainer.callback_metrics.items()})


def fit(folder: Path, epochs: int, resume: str | None = None) -> Classifier:
    model = Classifier()
    if IS_DISTRIBUTED:
        model = farspan.distribute(model)
    several: dict[str, Any] = {"strategy": "ddp", "devices": 2} if CASE == "ddp" and IS_DISTRIBUTED else {"devices": 1}
    trainer = lightning.Trainer(
        default_root_dir=folder,
        accelerator="cpu",
        max_epochs=epochs,
        accumulate_grad_batches=4,
        gradient_clip_val=0.5,
        log_every_n_steps=1,
        logger=CSVLogger(folder, name="log", version=0 if resume is None else 1),
        callbacks=[ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1, every_n_epochs=1)],
        enable_progress_bar=False,
        enable_model_summary=False,
        precision="bf16-mixed" if CASE == "bf16" else "32-true",
        **several,
    )
    trainer.fit(model, loader(48, 1), loader(12, 2), ckpt_path=resume, weights_only=False)
    return model


def run_trainer() -> None:
    whole = fit(FOLDER / "whole", 3)
    found = {"rows": whole.rows, "weights": weights(whole)}
    if IS_APART:
        tell(whole.flushes, **found, files=files_in(FOLDER))
        return
    resumed = fit(FOLDER / "resumed", 3, str(FOLDER / "whole" / "epoch=1.ckpt"))
    tell(
        whole.flushes,
        **found,
        files=files_in(FOLDER),
        logged=(FOLDER / "whole" / "log" / "version_0" / "metrics.csv").read_text(),
        resumed_rows=resumed.rows,
        resumed=weights(resumed),
    )


def run_fabric() -> None:
    fabric = lightning.Fabric(accelerator="cpu", devices=1)
    model = network()
    if IS_DISTRIBUTED:
        model = farspan.distribute(model)
    model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    batches = fabric.setup_dataloaders(loader(48, 1, shuffle=True))
    flushes = Flushes()
    rows: list[Any] = []
    for _ in range(3):
        flushes.begin()
        losses = []
        for number, (x, y) in enumerate(batches):
            is_accumulating = number % 4 != 3
            loss = F.cross_entropy(model(x), y)
            fabric.backward(loss / 4)
            losses.append(loss.detach())
            if not is_accumulating:
                losses.append(fabric.clip_gradients(model, optimizer, max_norm=0.5))
                optimizer.step()
                optimizer.zero_grad()
                flushes.end()
                flushes.begin()
        rows.append([loss.item() for loss in losses])
    state = {"model": model, "optimizer": optimizer}
    fabric.save(FOLDER / "state.ckpt", state)
    before = weights(model)
    if IS_APART:
        tell(flushes, rows=rows, weights=before, files=files_in(FOLDER))
        return
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    fabric.load(FOLDER / "state.ckpt", state)
    assert weights(model) == before
    tell(flushes, rows=rows, weights=before, files=files_in(FOLDER))


if __name__ == "__main__":
    torch.set_num_threads(1)
    if CASE == "fabric":
        run_fabric()
    else:
        run_trainer()
