"""What is deferred and then done is what ordinary construction does, bit for bit, generators included."""

from __future__ import annotations

import copy
import ctypes
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations
from torch.testing._internal.two_tensor import TwoTensor

import farspan
from farspan.place.deferred import recording
from farspan.place.deferred.construction import CONSTRUCTION
from farspan.place.deferred.models import fill_all, open_model

WIDTH = 96


@pytest.fixture(params=[16 << 10, 256], ids=["large", "small"], autouse=True)
def least_bytes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What is deferred: only what is large, as ever; and nearly all."""
    monkeypatch.setattr(recording, "LEAST_BYTES", request.param)
    yield
    assert not [memory for memory in CONSTRUCTION.waiting() if memory.size_bytes >= 64], "memory is left behind"


def linear(change: Callable[[nn.Linear], Any]) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        module = nn.Linear(WIDTH, WIDTH)
        return change(module) or module

    return build


def weight(change: Callable[[torch.Tensor], Any]) -> Callable[[], nn.Module]:
    return linear(lambda module: [change(module.weight), None][1])


def seeds_itself(module: nn.Linear) -> None:
    torch.manual_seed(5)
    generator = torch.Generator().manual_seed(3)
    module.weight.data.normal_(generator=generator)
    module.weight.data[3:5].zero_()
    module.register_buffer("mask", torch.tril(torch.ones(WIDTH, WIDTH)).bool())
    module.register_buffer("coins", torch.rand(WIDTH, WIDTH).bernoulli_(0.3))
    module.register_buffer("other", torch.bernoulli(torch.rand(WIDTH, WIDTH)))
    module.register_buffer("order", torch.randperm(9000))
    module.register_buffer("dropped", torch.dropout(torch.ones(WIDTH, WIDTH), 0.5, True))
    module.register_buffer("chosen", torch.multinomial(module.weight.data.abs() + 0.1, 4))


def doubled(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        module.weight.data.mul_(2)


def copies(module: nn.Linear) -> nn.Module:
    module.register_buffer("table", torch.rand(WIDTH, WIDTH))
    module.register_buffer("part", module.table[3:])  # type: ignore[index]
    blocks = nn.ModuleList([copy.deepcopy(module) for _ in range(3)])
    blocks.apply(doubled)
    blocks[1].get_buffer("table").fill_(1.0)
    assert blocks[1].get_buffer("part").sum() == (WIDTH - 3) * WIDTH, "they share memory as before"
    return blocks


def looks(module: nn.Linear) -> None:
    if module.weight.data.sum() > 0 and module.weight[0].tolist()[0] != 0.25:
        module.weight.data.add_(float(module.weight.data[0, 0]))
    array = module.weight.detach().numpy()
    array[0] = 1.0
    module.weight.data[1] = module.weight.data[0] * 2


def from_numpy(module: nn.Linear) -> None:
    module.weight = nn.Parameter(torch.from_numpy(np.random.randn(WIDTH, WIDTH)).float())
    module.weight.data.copy_(torch.from_numpy(np.random.randn(WIDTH, WIDTH)))
    module.register_buffer("noise", torch.empty(WIDTH, WIDTH).copy_(torch.from_numpy(np.random.randn(WIDTH, WIDTH))))


def exchanges(module: nn.Linear) -> None:
    module.weight.data = module.weight.data.t().contiguous()
    module.bias.data = torch.arange(float(WIDTH))
    small = torch.zeros(WIDTH)
    small.copy_(module.weight.detach().sum(0))
    module.weight.data[2] = small
    small.zero_()  # after it was read
    torch._foreach_mul_([module.weight.data, module.bias.data], 2.0)


def in_another_dtype(module: nn.Linear) -> None:
    torch.set_default_dtype(torch.float64)
    try:
        module.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))
        module.register_buffer("thirds", torch.arange(9000) / 3)
        module.weight.data.mul_(torch.rand(WIDTH, WIDTH))
    finally:
        torch.set_default_dtype(torch.float32)


def keeps(compute: Callable[[torch.Tensor], Any]) -> Callable[[], nn.Module]:
    """A layer that keeps what is computed from its weight."""

    def keep(module: nn.Linear) -> None:
        found = compute(module.weight.detach())
        for number, item in enumerate(found if isinstance(found, (tuple, list)) else [found]):
            module.register_buffer(f"kept{number}", item)

    return linear(keep)


def in_grad_mode(weight: torch.Tensor) -> list[torch.Tensor]:
    layer = nn.LSTM(WIDTH, WIDTH)
    with torch.no_grad():
        quiet = layer(weight[:, None])[0]
    return [quiet, layer(weight[:, None])[0].detach()]


def in_channels_last(weight: torch.Tensor) -> torch.Tensor:
    return weight.view(1, 4, WIDTH // 2, WIDTH // 2).to(memory_format=torch.channels_last)


def in_deterministic_mode(module: nn.Linear) -> None:
    torch.use_deterministic_algorithms(True)
    try:
        module.register_buffer("empty", torch.empty(WIDTH, WIDTH, dtype=torch.int32))
    finally:
        torch.use_deterministic_algorithms(False)


def has_gradients(module: nn.Linear) -> None:
    module(torch.randn(8, WIDTH)).square().sum().backward()


def counts_batches(module: nn.Linear) -> None:
    module.register_module("norm", nn.BatchNorm1d(WIDTH))
    module.get_submodule("norm")(module.weight)


def watches_gradients(module: nn.Linear) -> None:
    seen: list[float] = []

    def loss(weight: torch.Tensor) -> torch.Tensor:
        seen.extend([*weight.tolist()[0], float(repr(weight).split("[[")[1].split(",")[0])])
        return weight.square().sum()

    torch.func.grad(loss)(module.weight.detach())
    module.register_buffer("seen", torch.tensor(seen))


def reads_memory(module: nn.Linear) -> None:
    from torch.utils.dlpack import to_dlpack

    copies = [module.weight.detach().clone() for _ in range(4)]
    numbers = [
        np.frombuffer(bytes(copies[0].untyped_storage()), np.float32)[:8],
        np.frombuffer(ctypes.string_at(copies[1].data_ptr(), 32), np.float32),
        torch.from_dlpack(to_dlpack(copies[2]))[0].numpy(),
        [float(repr(copies[3]).split("[[")[1].split(",")[0])],
    ]
    module.register_buffer("numbers", torch.tensor(np.concatenate(numbers)))


class Tagged(TwoTensor):
    """A tensor of a program's own class, which does for itself what operations on it are."""


def of_another_class(weight: torch.Tensor) -> torch.Tensor:
    twice: Any = Tagged(weight, weight.clone()) * 2
    return twice.a


def goes_on_after_errors(module: nn.Linear) -> None:
    for change in (
        lambda: module.weight.data.add_(torch.ones(7, 7)),
        lambda: module.weight.data.copy_(torch.ones(7)),
        lambda: module.weight.data.mul_(torch.ones(WIDTH, dtype=torch.complex64)),
        lambda: module.weight.data @ torch.ones(7, 7),
        lambda: module.weight.data.normal_(0, -1),
        lambda: module.weight.add_(1),
    ):
        with pytest.raises(RuntimeError):
            change()
    module.weight.data.add_(1)


BUILDS: dict[str, Callable[[], nn.Module]] = {
    "grad mode": keeps(in_grad_mode),
    "deterministic mode": linear(in_deterministic_mode),
    "gradients": linear(has_gradients),
    "batch_norm": linear(counts_batches),
    "torch.func": linear(watches_gradients),
    "memory": linear(reads_memory),
    "errors": linear(goes_on_after_errors),
    "another class": keeps(of_another_class),
    "list of results": keeps(lambda w: torch._foreach_mul([w, w], 2.0)),
    "noise that is written": keeps(lambda w: nn.functional.rrelu(w, training=True)),
    "svd": keeps(lambda w: torch.linalg.svd(w)),
    "eig": keeps(lambda w: torch.linalg.eig(w)),
    "values alone": keeps(lambda w: [torch.linalg.svdvals(w), torch.linalg.eigvalsh(w), torch.linalg.norm(w, "nuc")]),
    "embedding_bag": keeps(lambda w: nn.functional.embedding_bag(torch.randint(0, WIDTH, (900, 5)), w)),
    "quantized": keeps(lambda w: torch.quantize_per_tensor(w, 0.01, 3, torch.qint8).dequantize()),
    "sparse values": keeps(lambda w: torch.sparse.mm(w.to_sparse(), w)),
    "channels last": keeps(lambda w: nn.functional.pad(in_channels_last(w), (2, 2, 2, 2), "reflect")),
    "small and expanded": keeps(lambda w: [torch.rand(n)[:, None].expand(n, 5000).sum(0) for n in range(500, 520)]),
    "conjugate": keeps(lambda w: torch.mm(torch.complex(w, w), torch.rand(WIDTH, 1, dtype=torch.complex64).conj())),
    "transformer": lambda: nn.Transformer(64, 4, 1, 1, 256, batch_first=True),
    "lstm": lambda: nn.LSTM(64, WIDTH, 2, bidirectional=True),
    "embedding": lambda: nn.Embedding(500, 64, padding_idx=3),
    "conv": lambda: nn.Sequential(nn.Conv2d(16, 64, 5), nn.BatchNorm2d(64)),
    "orthogonal": weight(lambda w: nn.init.orthogonal_(w)),
    "sparse": weight(lambda w: nn.init.sparse_(w, 0.1)),
    "dirac": weight(lambda w: nn.init.eye_(w)),
    "truncated, narrow": weight(lambda w: nn.init.trunc_normal_(w, std=0.02)),
    "truncated": weight(lambda w: nn.init.trunc_normal_(w, std=1.0)),
    "truncated, wide": weight(lambda w: nn.init.trunc_normal_(w, std=9.0)),
    "weight_norm": linear(lambda m: parametrizations.weight_norm(m)),
    "spectral_norm": linear(lambda m: parametrizations.spectral_norm(m)),
    "orthogonal parametrization": linear(lambda m: parametrizations.orthogonal(m)),
    "old spectral_norm": linear(lambda m: nn.utils.spectral_norm(m)),
    "bfloat16": linear(lambda m: m.to(torch.bfloat16)),
    "float64": lambda: nn.Linear(WIDTH, WIDTH, dtype=torch.float64),
    "complex": lambda: nn.ParameterList([torch.randn(WIDTH, WIDTH, dtype=torch.complex64).conj()]),
    "seeds itself": linear(seeds_itself),
    "copies": linear(copies),
    "looks": linear(looks),
    "from numpy": linear(from_numpy),
    "exchanges": linear(exchanges),
    "in another dtype": linear(in_another_dtype),
}


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning")
@pytest.mark.parametrize("name", BUILDS)
def test_the_same_bits_as_ordinary_construction(name: str) -> None:
    def seeded() -> nn.Module:
        torch.manual_seed(1)
        np.random.seed(1)
        return BUILDS[name]()

    plain = seeded()
    after = torch.get_rng_state(), repr(np.random.get_state()), random.getstate()
    with farspan.deferred_init():
        model = seeded()
    found = torch.get_rng_state(), repr(np.random.get_state()), random.getstate()
    assert torch.equal(after[0], found[0]) and after[1:] == found[1:]
    open_model(model)
    fill_all(model)
    assert list(plain.state_dict()) == list(model.state_dict())
    for key, item in plain.state_dict(keep_vars=True).items():
        other = model.state_dict(keep_vars=True)[key]
        assert (
            type(other) is type(item) and other.stride() == item.stride() and other.requires_grad == item.requires_grad
        )
        assert torch.equal(other, item), key
        assert item.grad is None or (type(other.grad) is torch.Tensor and torch.equal(other.grad, item.grad)), key


@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm` is deprecated:FutureWarning")
def test_old_weight_norm_which_computes_its_weight_with_gradients() -> None:
    def seeded() -> nn.Module:
        torch.manual_seed(1)
        return nn.utils.weight_norm(nn.Linear(WIDTH, WIDTH))

    with farspan.deferred_init():
        model = seeded()
    plain = seeded()
    for module in (model, plain):  # nobody has called them, which computes it again
        weight: Any = module.weight
        weight.sum().backward()
    for name in ("weight_g", "weight_v"):
        assert torch.equal(getattr(model, name), getattr(plain, name))
        assert torch.equal(getattr(model, name).grad, getattr(plain, name).grad)
