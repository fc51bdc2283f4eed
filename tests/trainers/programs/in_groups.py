"""Trainers with two groups: which rows each group trains and evaluates on, and the weights at the end.

python in_groups.py CASE FOLDER [--farspan]          CASE: transformers, accelerate, lightning
"""

# pyright: reportMissingImports=false
from __future__ import annotations

import json
import os
from typing import Any

import torch
import torch.nn.functional as F
from tests.trainers.programs.outcome import CASE, FOLDER
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import farspan

__all__: list[str] = []

NUM_ROWS, NUM_CHECKS = 32, 12
ROWS: dict[str, list[int]] = {"train": [], "evaluate": []}
"""The numbers of the rows that the model has been given."""


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.second(torch.tanh(self.first(x[:, 1:])))
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


def table(num: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(num, 5, generator=torch.Generator().manual_seed(num))
    x[:, 0] = torch.arange(num)
    return x, torch.arange(num) % 3


def note(model: nn.Module, x: Tensor) -> None:
    ROWS["train" if model.training else "evaluate"] += [int(row) for row in x[:, 0].tolist()]


def with_transformers(model: Any) -> None:
    from transformers import Trainer, TrainingArguments

    class Rows(torch.utils.data.Dataset):  # type: ignore[type-arg]
        def __init__(self, num: int) -> None:
            self.x, self.y = table(num)

        def __len__(self) -> int:
            return len(self.x)

        def __getitem__(self, number: int) -> dict[str, Tensor]:
            return {"x": self.x[number], "labels": self.y[number]}

    class Noting(Trainer):
        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            note(model, inputs["x"])
            return super().compute_loss(model, inputs, *args, **kwargs)

    arguments = TrainingArguments(
        output_dir=str(FOLDER),
        per_device_train_batch_size=4,
        per_device_eval_batch_size=4,
        num_train_epochs=1,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        remove_unused_columns=False,
    )
    trainer = Noting(model=model, args=arguments, train_dataset=Rows(NUM_ROWS), eval_dataset=Rows(NUM_CHECKS))
    trainer.train()
    trainer.evaluate()


def with_accelerate(model: Any) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(TensorDataset(*table(NUM_ROWS)), batch_size=4, shuffle=True)
    checks = DataLoader(TensorDataset(*table(NUM_CHECKS)), batch_size=4)
    model, optimizer, loader, checks = accelerator.prepare(model, optimizer, loader, checks)
    model.train()
    assert len(loader) == NUM_ROWS // 4 // farspan.data_world()
    for x, y in loader:
        note(model, x)
        optimizer.zero_grad()
        accelerator.backward(model(x, y)["loss"])
        optimizer.step()
    model.eval()
    for x, y in checks:
        note(model, x)
        with torch.no_grad():
            accelerator.gather_for_metrics(model(x, y)["logits"])


def with_lightning(model: Any) -> None:
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = model

        def training_step(self, batch: Any, number: int) -> Any:
            note(self.net, batch[0])
            return self.net(*batch)["loss"]

        def validation_step(self, batch: Any, number: int) -> None:
            note(self.net, batch[0])

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    trainer = lightning.Trainer(
        max_epochs=1,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        num_sanity_val_steps=0,
    )
    loader = DataLoader(TensorDataset(*table(NUM_ROWS)), batch_size=4, shuffle=True)
    trainer.fit(Module(), loader, DataLoader(TensorDataset(*table(NUM_CHECKS)), batch_size=4))


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model: Any = farspan.distribute(Net(), data_parallel=2)
    {"transformers": with_transformers, "accelerate": with_accelerate, "lightning": with_lightning}[CASE](model)
    weights = [item.tolist() for item in model.state_dict().values()]
    told = {"rows": ROWS, "weights": weights}
    (FOLDER / f"groups{os.environ['RANK']}.json").write_text(json.dumps(told))


if __name__ == "__main__":
    main()
