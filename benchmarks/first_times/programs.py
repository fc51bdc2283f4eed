"""The programs of first_times, each a training script as people write it: `python programs.py NAME`.

With FIRST_TIMES=farspan in the environment the model is distributed. Each prints "first" at its first loss, and "end"
when it has done what it is for, each with the seconds since its loop began.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

NUM_LENGTHS = 200
NUM_TOKENS = 100
VOCABULARY = 256


def distribute(model: nn.Module, **keywords: Any) -> nn.Module:
    if os.environ.get("FIRST_TIMES") != "farspan":
        return model
    import farspan

    return farspan.distribute(model, **keywords)


class Said:
    """Says what has happened, and when."""

    def __init__(self) -> None:
        self._began = time.perf_counter()

    def first(self, value: float) -> None:
        print(f"first {time.perf_counter() - self._began:.4f} {value:.6f}", flush=True)

    def end(self, value: float) -> None:
        print(f"end {time.perf_counter() - self._began:.4f} {value:.6f}", flush=True)


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = (
            part.view(batch, length, 4, width // 4).transpose(1, 2) for part in self.qkv(self.norm1(x)).split(width, 2)
        )
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(seen.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Language(nn.Module):
    """Six blocks of width 128; gives the loss where there are targets."""

    def __init__(self, num_blocks: int = 6, width: int = 128) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.places = nn.Embedding(512, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(num_blocks))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.tokens(x) + self.places(torch.arange(x.shape[1]))
        for block in self.blocks:
            y = block(y)
        return self.head(self.norm(y))  # type: ignore[no-any-return]


class Translator(nn.Module):
    """An encoder of two layers and a decoder of two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(VOCABULARY, 32), nn.Embedding(VOCABULARY, 32)
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 2, 64, 0.0, batch_first=True), 2)
        self.decoder = nn.TransformerDecoder(nn.TransformerDecoderLayer(32, 2, 64, 0.0, batch_first=True), 2)
        self.head = nn.Linear(32, VOCABULARY)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(y.shape[1])
        return self.head(self.decoder(self.target(y), self.encoder(self.source(x)), tgt_mask=mask))  # type: ignore[no-any-return]


class Tagger(nn.Module):
    """Two LSTMs over packed sequences."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, 32)
        self.lower, self.upper = nn.LSTM(32, 32, batch_first=True), nn.LSTM(32, 32, batch_first=True)
        self.head = nn.Linear(32, 8)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(self.tokens(x), lengths, batch_first=True, enforce_sorted=False)
        packed, _ = self.upper(self.lower(packed)[0])
        return self.head(pad_packed_sequence(packed, batch_first=True)[0])  # type: ignore[no-any-return]


class Detector(nn.Module):
    """A small trunk, and a head over as many boxes as an image has."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(
            nn.Conv2d(3, 16, 3, 2, 1), nn.ReLU(), nn.Conv2d(16, 32, 3, 2, 1), nn.ReLU(), nn.Conv2d(32, 32, 3, 2, 1)
        )
        self.place = nn.Linear(4, 32)
        self.head = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 5))

    def forward(self, image: Tensor, boxes: Tensor) -> Tensor:
        seen = self.trunk(image).mean((2, 3)).expand(len(boxes), 32)
        return self.head(torch.cat([seen, self.place(boxes)], 1))  # type: ignore[no-any-return]


def train(model: nn.Module, loss_of: Callable[[int], Tensor], *, num_steps: int, num_parts: int = 1) -> None:
    """Trains with `num_parts` backwards a step, and reads the loss of each step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    said, value = Said(), 0.0
    for step in range(num_steps):
        losses: list[Tensor] = []
        for part in range(num_parts):
            loss = loss_of(step * num_parts + part) / num_parts
            loss.backward()
            losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
        value = sum(loss.item() for loss in losses)
        if step == 0:
            said.first(value)
    said.end(value)


def tokens(number: int, *shape: int) -> Tensor:
    return torch.randint(VOCABULARY, shape, generator=torch.Generator().manual_seed(number))


def cross_entropy(logits: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), y.flatten())


def mlp() -> None:
    model = distribute(nn.Sequential(*(nn.Linear(256, 256) if i % 2 == 0 else nn.ReLU() for i in range(7))))
    train(model, lambda step: model(torch.ones(64, 256) * step).square().mean(), num_steps=10)


def language(num_parts: int = 1, **keywords: Any) -> None:
    model = distribute(Language(), **keywords)
    size = 8 // num_parts

    def loss_of(step: int) -> Tensor:
        x = tokens(step, size, 65)
        return cross_entropy(model(x[:, :-1]), x[:, 1:])

    train(model, loss_of, num_steps=10, num_parts=num_parts)


def lengths(number: int) -> int:
    """As many different ones as there are micro-batches, in no order."""
    return 8 + (number * 77) % NUM_LENGTHS


def translator() -> None:
    model = distribute(Translator())

    def loss_of(number: int) -> Tensor:
        x, y = tokens(number, 4, lengths(number)), tokens(number + 1, 4, lengths(number + 31) // 2)
        return cross_entropy(model(x, y[:, :-1]), y[:, 1:])

    train(model, loss_of, num_steps=NUM_LENGTHS // 4, num_parts=4)


def packed_language() -> None:
    model = distribute(Language(num_blocks=2, width=64))

    def loss_of(number: int) -> Tensor:
        x = tokens(number, 4, lengths(number) + 1)
        return cross_entropy(model(x[:, :-1]), x[:, 1:])

    train(model, loss_of, num_steps=NUM_LENGTHS // 4, num_parts=4)


def tagger() -> None:
    model = distribute(Tagger())

    def loss_of(number: int) -> Tensor:
        most = 8 + number % 50
        sizes = torch.tensor([most, *(1 + (number * step) % most for step in (3, 5, 7))])
        x = tokens(number, 4, most)
        return cross_entropy(model(x, sizes), x % 8)

    train(model, loss_of, num_steps=NUM_LENGTHS // 4, num_parts=4)


def detector() -> None:
    model = distribute(Detector())

    def loss_of(number: int) -> Tensor:
        source = torch.Generator().manual_seed(number)
        boxes = torch.rand(1 + (number * 77) % NUM_LENGTHS, 4, generator=source)
        image = torch.rand(1, 3, 64, 64, generator=source)
        return model(image, boxes).square().mean()

    train(model, loss_of, num_steps=NUM_LENGTHS // 4, num_parts=4)


@torch.no_grad()
def greedy() -> None:
    model = distribute(Language(num_blocks=2, width=64)).eval()
    text, said = tokens(0, 3, 4), Said()
    for number in range(NUM_TOKENS):
        text = torch.cat([text, model(text)[:, -1].argmax(1, keepdim=True)], 1)
        if number == 0:
            said.first(int(text[0, -1]))
    said.end(int(text.sum()))


@torch.no_grad()
def beam() -> None:
    model = distribute(Language(num_blocks=2, width=64)).eval()
    said = Said()
    text, scores = tokens(0, 1, 4).expand(4, 4), torch.tensor([0.0, -1e9, -1e9, -1e9])
    for number in range(NUM_TOKENS):
        found = scores[:, None] + model(text)[:, -1].log_softmax(1)
        scores, best = found.flatten().topk(4)
        text = torch.cat([text[best // VOCABULARY], (best % VOCABULARY)[:, None]], 1)
        if number == 0:
            said.first(float(scores[0]))
    said.end(float(scores[0]))


STARTS: dict[str, Callable[[], None]] = {
    "mlp": mlp,
    "language": language,
    "language, 4 backwards a step": lambda: language(4),
    "language, micro_batches=4": lambda: language(micro_batches=4),
}
LENGTHS = {"translator": translator, "language of all lengths": packed_language, "tagger": tagger, "detector": detector}
TEXTS = {"greedy": greedy, "beam": beam}


if __name__ == "__main__":
    torch.manual_seed(0)
    torch.set_num_threads(1)
    {**STARTS, **LENGTHS, **TEXTS}[sys.argv[1]]()
