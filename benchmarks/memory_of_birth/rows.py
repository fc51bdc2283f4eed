"""What the ranks do while their memory is watched: one function for each row of the table.

Each row has processes of its own. Add its name to ROWS, with the functions that it does: the last one is what is
measured, and those before it are what it needs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

__all__ = ["ROWS", "Net", "Sizes", "Stand"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Of the model."""

    width: int
    num_blocks: int
    num_tokens: int


class Net(nn.Module):
    """A tied embedding, blocks of two linears and a norm, with the initialisation of GPT-2."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.embed = nn.Embedding(sizes.num_tokens, sizes.width)
        self.blocks = nn.Sequential(*[_block(sizes.width) for _ in range(sizes.num_blocks)])
        self.head = nn.Linear(sizes.width, sizes.num_tokens, bias=False)
        self.head.weight = self.embed.weight  # type: ignore[assignment]
        self.apply(self._initialise)

    def _initialise(self, module: nn.Module) -> None:
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=0.02)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.embed(tokens)))


def _block(width: int) -> nn.Module:
    return nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))


@dataclass(slots=True)
class Stand:
    """Where a rank's rows stand.

    Attributes:
        sizes: Of the model.
        folder: For files, the same on every rank.
        model: Of the rows so far.
        optimizer: The same.
    """

    sizes: Sizes
    folder: Path
    model: Any = None
    optimizer: Any = None

    def held_bytes(self) -> int:
        """Of parameters that this rank owns, and of what its optimizer keeps for them."""
        own = [] if self.model is None else [item for item in self.model.parameters() if type(item) is nn.Parameter]
        kept = {} if self.optimizer is None else vars(self.optimizer)["state"]
        own += [item for each in kept.values() for item in each.values() if type(item) is torch.Tensor]
        return sum(item.numel() * item.element_size() for item in own)


def construct(stand: Stand) -> None:
    """Builds the model and gives each rank its part."""
    import farspan

    torch.manual_seed(0)
    with farspan.deferred_init():
        model = Net(stand.sizes)
    stand.model = farspan.distribute(model)


def load_pretrained(stand: Stand) -> None:
    """The same for a model whose weights lie in files."""
    import farspan

    with farspan.deferred_init():
        model = Net(stand.sizes)
    farspan.load_pretrained(model, stand.folder / "saved")
    stand.model = farspan.distribute(model)


def load_after(stand: Stand) -> None:
    """Loads the files into the model that has been distributed."""
    import farspan

    farspan.load_pretrained(stand.model, stand.folder / "saved")


def train(stand: Stand) -> None:
    """Takes a step: what AdamW keeps is twice the parameters."""
    stand.optimizer = torch.optim.AdamW(stand.model.parameters(), lr=1e-3)
    stand.model(torch.zeros(1, 2, dtype=torch.long)).square().mean().backward()
    stand.optimizer.step()
    stand.optimizer.zero_grad()


def save(stand: Stand) -> None:
    """Saves a checkpoint, and waits for it."""
    import farspan

    folder = stand.folder / ("model" if stand.optimizer is None else "training")
    farspan.save(folder, model=stand.model, optimizer=stand.optimizer, step=1, wait=True)


def load(stand: Stand) -> None:
    """Loads the one of `save`."""
    import farspan

    folder = stand.folder / ("model" if stand.optimizer is None else "training")
    farspan.load(folder, model=stand.model, optimizer=stand.optimizer)


def resume(stand: Stand) -> None:
    """All that a program does to go on: a new model and optimizer, and what has been saved of them."""
    construct(stand)
    stand.optimizer = torch.optim.AdamW(stand.model.parameters(), lr=1e-3)
    load(stand)


def export(stand: Stand) -> None:
    """Makes one safetensors file of the checkpoint, on one rank beside the model."""
    import farspan
    from farspan.cli.main import main

    if farspan.rank() == 0:
        code = main(["ckpt", "export", str(stand.folder / "model"), str(stand.folder / "exported.safetensors")])
        assert code == 0


ROWS: dict[str, tuple[Callable[[Stand], None], ...]] = {
    "construct": (construct,),
    "load_pretrained, then distribute": (load_pretrained,),
    "distribute, then load_pretrained": (construct, load_after),
    "save": (construct, save),
    "load": (construct, load),
    "export": (construct, export),
    "save, after a step of AdamW": (construct, train, save),
    "resume, with AdamW": (resume,),
}
