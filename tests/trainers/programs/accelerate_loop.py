"""accelerate's own loop: accumulation, clipping, gathered metrics, save_state, load_state.

python accelerate_loop.py CASE FOLDER [--farspan]          CASE: plain, bf16, resumed
"""

# pyright: reportMissingImports=false
from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from tests.trainers.programs.outcome import CASE, FOLDER, IS_APART, IS_DISTRIBUTED, Flushes, files_in, tell, weights
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import farspan

__all__: list[str] = []


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(8, 8) for _ in range(4)])
        self.norm, self.head = nn.BatchNorm1d(8), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return self.head(self.norm(x))


def data(num: int, seed: int) -> TensorDataset:
    x = torch.randn(num, 8, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(x, x[:, :5].argmax(1))


def evaluate(accelerator: Accelerator, model: nn.Module, loader: Any) -> float:
    model.eval()
    right = total = 0
    for x, y in loader:
        with torch.no_grad():
            answers = model(x).argmax(-1)
        answers, y = accelerator.gather_for_metrics((answers, y))
        right += int((answers == y).sum())
        total += len(y)
    model.train()
    return right / total


def main() -> None:
    torch.set_num_threads(1)
    accelerator = Accelerator(
        cpu=True, gradient_accumulation_steps=4, mixed_precision="bf16" if CASE == "bf16" else "no"
    )
    torch.manual_seed(0)
    model = Net()
    if IS_DISTRIBUTED:
        model = farspan.distribute(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    loader = DataLoader(data(96, 1), batch_size=4, shuffle=True)
    checks = DataLoader(data(30, 2), batch_size=8)
    model, optimizer, schedule, loader, checks = accelerator.prepare(model, optimizer, schedule, loader, checks)

    flushes = Flushes()
    rows: list[Any] = []
    epochs = 3
    for epoch in range(epochs):
        state = str(FOLDER / f"state{epoch}")
        flushes.begin()
        losses: list[Any] = []
        for x, y in loader:
            with accelerator.accumulate(model):
                loss = F.cross_entropy(model(x), y)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    losses.append(accelerator.clip_grad_norm_(model.parameters(), 0.5))
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            losses.append(loss.detach())
            if accelerator.sync_gradients:
                flushes.end()
                flushes.begin()
        rows.append([loss.item() for loss in losses])
        rows.append([evaluate(accelerator, model, checks), schedule.get_last_lr()])
        if CASE == "resumed":
            accelerator.save_state(state)
        if CASE == "resumed" and not IS_APART:
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.zero_()
            optimizer.state.clear()
            accelerator.load_state(state)
    accelerator.print("printed once")
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        accelerator.save(accelerator.unwrap_model(model).state_dict(), FOLDER / "model.pt")
    accelerator.wait_for_everyone()
    tell(flushes, rows=rows, weights=weights(model), files=files_in(FOLDER))


if __name__ == "__main__":
    main()
