"""Models of torch alone: shapes of programs rather than of networks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

__all__ = ["CASES", "PlainCase"]

WIDTH, VOCAB = 16, 17


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainCase:
    """A module, three steps of micro-batches, and a loss."""

    build: Callable[[], nn.Module]
    batches: Callable[[], list[list[Any]]]
    loss: Callable[[nn.Module, Any], Tensor]
    num_inputs: int = 2
    """How many parts of a batch are the model's arguments; the others are the loss's."""


def steps(make: Callable[[int, torch.Generator], Any]) -> Callable[[], list[list[Any]]]:
    """Three steps of two micro-batches, of 2 and 3 samples."""

    def batches() -> list[list[Any]]:
        generator = torch.Generator().manual_seed(5)
        return [[make(size, generator) for size in (2, 3)] for _ in range(3)]

    return batches


def square(model: nn.Module, batch: tuple[Any, ...]) -> Tensor:
    return model(*batch).square().mean()


def classify(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def floats(*shape: int) -> Callable[[], list[list[Any]]]:
    return steps(lambda size, generator: (torch.randn(size, *shape, generator=generator),))


def labelled(*shape: int) -> Callable[[], list[list[Any]]]:
    def make(size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        return torch.randn(size, *shape, generator=generator), torch.randint(5, (size,), generator=generator)

    return steps(make)


def linears(number: int, width: int = WIDTH) -> nn.ModuleList:
    return nn.ModuleList([nn.Linear(width, width) for _ in range(number)])


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = linears(6)
        self.head = nn.Linear(WIDTH, 5)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = F.gelu(layer(x)) + x
        return self.head(x)


class ConvNet(nn.Module):
    """Running statistics."""

    def __init__(self) -> None:
        super().__init__()
        widths = [3, 8, 8, 16, 16]
        pairs = pairwise(widths)
        self.blocks = nn.Sequential(
            *[nn.Sequential(nn.Conv2d(a, b, 3, padding=1), nn.BatchNorm2d(b), nn.ReLU(inplace=True)) for a, b in pairs]
        )
        self.head = nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(x).mean((2, 3)))


class UNet(nn.Module):
    """Skips that cross stages."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList([nn.Conv2d(a, b, 3, padding=1) for a, b in ((3, 4), (4, 6), (6, 8))])
        self.middle = nn.Conv2d(8, 8, 3, padding=1)
        self.up = nn.ModuleList([nn.Conv2d(a, b, 3, padding=1) for a, b in ((16, 6), (12, 4), (8, 2))])

    def forward(self, x: Tensor) -> Tensor:
        skips = []
        for layer in self.down:
            x = F.relu(layer(x))
            skips.append(x)
            x = F.avg_pool2d(x, 2)
        x = F.relu(self.middle(x))
        for layer in self.up:
            x = F.relu(layer(torch.cat([F.interpolate(x, scale_factor=2.0), skips.pop()], 1)))
        return x


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.LSTM | nn.GRU], *, packed: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList([kind(WIDTH, WIDTH, batch_first=True) for _ in range(3)])
        self.head = nn.Linear(WIDTH, VOCAB)
        self.packed = packed

    def forward(self, ids: Tensor, lengths: Tensor) -> Tensor:
        x: Any = self.embed(ids)
        if self.packed:
            x = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        for layer in self.layers:
            x, _ = layer(x)
        if self.packed:
            x, _ = pad_packed_sequence(x, batch_first=True)
        return self.head(x)


def sequences(size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    lengths = torch.randint(3, 9, (size,), generator=generator)
    return torch.randint(VOCAB, (size, 8), generator=generator), lengths


class Translator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(VOCAB, WIDTH), nn.Embedding(VOCAB, WIDTH)
        self.core = nn.Transformer(WIDTH, 2, 2, 2, 2 * WIDTH, 0.0, batch_first=True)
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1])
        return self.head(self.core(self.source(source), self.target(target), tgt_mask=mask))


def pairs(size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    return torch.randint(VOCAB, (size, 7), generator=generator), torch.randint(VOCAB, (size, 6), generator=generator)


def translate(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(*batch).flatten(0, 1), batch[1].flatten())


class TiedAutoencoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList([nn.Parameter(0.3 * torch.randn(b, a)) for a, b in ((16, 12), (12, 8), (8, 4))])
        self.biases = nn.ParameterList([nn.Parameter(torch.zeros(a)) for a in (16, 12, 8)])

    def forward(self, x: Tensor) -> Tensor:
        for weight in self.weights:
            x = torch.tanh(F.linear(x, weight))
        for weight, bias in zip(reversed(self.weights), reversed(self.biases), strict=True):
            x = F.linear(x, weight.t(), bias)
        return x


class TiedLanguageModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList([nn.TransformerEncoderLayer(WIDTH, 2, 32, 0.0, batch_first=True) for _ in range(4)])
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor, _: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.MultiheadAttention(WIDTH, 2, batch_first=True) for _ in range(4)])

    def forward(self, x: Tensor) -> Tensor:
        total = x
        for layer in self.layers:
            x, weights = layer(x, x, x)
            total = total + x * weights.mean()
        return total


class Experts(nn.Module):
    """Tokens are sent to experts by `nonzero`: shapes that depend on data."""

    def __init__(self) -> None:
        super().__init__()
        self.routers = nn.ModuleList([nn.Linear(WIDTH, 3) for _ in range(2)])
        self.experts = nn.ModuleList([linears(3) for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        for router, experts in zip(self.routers, self.experts, strict=True):
            flat = x.reshape(-1, WIDTH)
            weight, choice = router(flat).softmax(-1).max(-1)
            out = torch.zeros_like(flat)
            for number, expert in enumerate(experts):  # type: ignore[arg-type]
                (rows,) = (choice == number).nonzero(as_tuple=True)
                if rows.numel():
                    out = out.index_add(0, rows, expert(flat[rows]) * weight[rows, None])
            x = x + out.view_as(x)
        return x


class Speech(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(8, WIDTH, 3, padding=1)
        self.layers = linears(4)
        self.head = nn.Linear(WIDTH, 6)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x.transpose(1, 2)).transpose(1, 2)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.head(x).log_softmax(-1)


def speech(size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    return torch.randn(size, 12, 8, generator=generator), torch.randint(1, 6, (size, 4), generator=generator)


def ctc(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    size = batch[0].shape[0]
    inputs, targets = torch.full((size,), 12), torch.full((size,), 4)
    return F.ctc_loss(model(batch[0]).transpose(0, 1), batch[1], inputs, targets)


@dataclass
class State:
    hidden: Tensor
    extra: Tensor | None = None


class Part(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, state: State, options: dict[str, Any]) -> tuple[State, dict[str, Any]]:
        hidden = torch.tanh(self.linear(state.hidden)) * options["scale"]
        return State(hidden, hidden.detach()), {**options, "seen": hidden.sum(1)}


class Messages(nn.Module):
    """Dataclasses and dictionaries between the parts, a dictionary at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList([Part() for _ in range(4)])

    def forward(self, x: Tensor) -> dict[str, Any]:
        state, options = State(x), {"scale": 0.5}
        for part in self.parts:
            state, options = part(state, options)
        return {"out": state.hidden, "seen": [options["seen"], None], "name": "messages"}


class EarlyExit(nn.Module):
    """How many layers run depends on a value."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = linears(6)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = 1.4 * torch.tanh(layer(x)) + 0.3 * x
            if x.abs().mean() < 0.35:
                break
        return x


class Wandering(nn.Module):
    """A list walked in another order for each input."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = linears(5)

    def forward(self, x: Tensor, order: list[int]) -> Tensor:
        for number in order:
            x = torch.tanh(self.layers[number](x)) + 0.1 * x
        return x


class Siamese(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(10, 12), nn.Tanh(), nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 4))

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return (self.layers(a) - self.layers(b)).pow(2).sum(1).sqrt()


class InPlace(nn.Module):
    """A buffer that counts, and results written into what came from another stage."""

    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layers = linears(4)
        self.register_buffer("count", torch.zeros((), dtype=torch.long), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        for layer in self.layers:
            y = layer(x)
            y[:, 0] = 0.0
            x = y.add_(x).relu_()
        return x


def _seen(model: nn.Module, batch: tuple[Any, ...]) -> Tensor:
    result = model(*batch)
    return result["out"].square().mean() + result["seen"][0].mean()


def _orders(size: int, generator: torch.Generator) -> tuple[Tensor, list[int]]:
    return torch.randn(size, WIDTH, generator=generator), torch.randperm(5, generator=generator).tolist()


def _two(size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    return torch.randn(size, 10, generator=generator), torch.randn(size, 10, generator=generator)


def _encoder() -> nn.Module:
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(WIDTH, 2, 32, 0.0, batch_first=True), 4)


CASES = {
    "mlp": PlainCase(build=MLP, batches=labelled(WIDTH), loss=classify, num_inputs=1),
    "conv_batchnorm": PlainCase(build=ConvNet, batches=labelled(3, 8, 8), loss=classify, num_inputs=1),
    "unet": PlainCase(build=UNet, batches=floats(3, 16, 16), loss=square),
    "lstm": PlainCase(build=lambda: Recurrent(nn.LSTM), batches=steps(sequences), loss=square),
    "lstm_packed": PlainCase(build=lambda: Recurrent(nn.LSTM, packed=True), batches=steps(sequences), loss=square),
    "gru": PlainCase(build=lambda: Recurrent(nn.GRU), batches=steps(sequences), loss=square),
    "transformer": PlainCase(build=Translator, batches=steps(pairs), loss=translate),
    "transformer_encoder": PlainCase(build=_encoder, batches=floats(6, WIDTH), loss=square),
    "attention": PlainCase(build=Attention, batches=floats(6, WIDTH), loss=square),
    "siamese": PlainCase(build=Siamese, batches=steps(_two), loss=square),
    "tied_autoencoder": PlainCase(build=TiedAutoencoder, batches=floats(16), loss=square),
    "tied_language_model": PlainCase(build=TiedLanguageModel, batches=steps(sequences), loss=square),
    "experts": PlainCase(build=Experts, batches=floats(4, WIDTH), loss=square),
    "ctc": PlainCase(build=Speech, batches=steps(speech), loss=ctc, num_inputs=1),
    "messages": PlainCase(build=Messages, batches=floats(6, WIDTH), loss=_seen),
    "early_exit": PlainCase(build=EarlyExit, batches=floats(WIDTH), loss=square),
    "wandering": PlainCase(build=Wandering, batches=steps(_orders), loss=square),
    "in_place": PlainCase(build=InPlace, batches=floats(WIDTH), loss=square),
}
