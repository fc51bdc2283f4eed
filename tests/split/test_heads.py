"""Attention of torch's own modules, dropout between split matrices, transposed and stacked parameters: as in one
process, and split."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.support.ranks import run_threads
from tests.wide.test_loops import largest_difference
from torch import Tensor, nn

import farspan
from farspan.execute.process.world import current_engine

X = torch.randn(4, 6, 8, generator=torch.Generator().manual_seed(1))
PADDING = torch.arange(6) >= torch.tensor([6, 4, 6, 5]).unsqueeze(1)
HEADS = 4


class Net(nn.Module):
    def __init__(self, forward: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, HEADS, dropout=0.2, batch_first=True)
        self.q, self.k, self.v, self.out = [nn.Linear(8, 8) for _ in range(4)]
        self.qkv, self.drop, self.scale = nn.Linear(8, 24), nn.Dropout(0.25), nn.Parameter(torch.randn(8))
        self.does = forward

    def by_heads(self, x: Tensor) -> Tensor:
        return x.view(4, 6, HEADS, -1).transpose(1, 2)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.does(self, x)


def self_attention(net: Any, x: Tensor) -> Tensor:
    return net.attention(x, x, x)[0]


def padded(net: Any, x: Tensor) -> Tensor:
    return net.attention(x, x, x, key_padding_mask=PADDING, need_weights=False)[0]


def cross_attention(net: Any, x: Tensor) -> Tensor:
    return net.attention(x, torch.tanh(x * 2), torch.tanh(x * 2), need_weights=False)[0]


def of_parts(net: Any, x: Tensor) -> Tensor:
    """Some rows of a stacked matrix meet a tensor of which each rank has a part."""
    memory = torch.tanh(net.q(x))
    return net.attention(x, memory, memory, need_weights=False)[0]


def attention(net: Any, x: Tensor) -> Tensor:
    q, k, v = [net.by_heads(part(x)) for part in (net.q, net.k, net.v)]
    y = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=0.2 if net.training else 0.0)
    return net.out(net.drop(y.transpose(1, 2).reshape(x.shape)))


def masked(net: Any, x: Tensor) -> Tensor:
    q, k, v = [net.by_heads(part(x)) for part in (net.q, net.k, net.v)]
    mask = torch.ones(6, 6).tril().bool()
    mask[0] = False
    y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=0.2)
    return net.out(y.transpose(1, 2).reshape(x.shape))


def by_hand(net: Any, x: Tensor) -> Tensor:
    """With batch and heads in one dimension, and dropout between."""
    q, k, v = [net.by_heads(part(x)).reshape(4 * HEADS, 6, 2) for part in (net.q, net.k, net.v)]
    weights = torch.bmm(q, k.transpose(1, 2)).view(4, HEADS, 6, 6) + torch.ones(6, 6).tril().log()
    weights = net.drop(weights.view(4 * HEADS, 6, 6).softmax(-1))
    return net.out(torch.bmm(weights, v).view(4, HEADS, 6, 2).transpose(1, 2).reshape(x.shape))


def with_positions(net: Any, x: Tensor) -> Tensor:
    """A plain tensor with batch and heads in one dimension is cut as the model's own."""
    q, k, v = [part.transpose(1, 2).reshape(16, 6, 2) for part in net.qkv(x).view(4, 6, HEADS, 3, 2).unbind(-2)]
    slopes = torch.arange(HEADS).float()[None, :, None, None] * torch.arange(6)
    weights = slopes.expand(4, HEADS, 1, 6).reshape(16, 1, 6).baddbmm(q, k.transpose(1, 2), alpha=0.5).softmax(-1)
    return net.out(torch.bmm(weights, v).view(4, HEADS, 6, 2).transpose(1, 2).reshape(x.shape))


def stacked(net: Any, x: Tensor) -> Tensor:
    """As many parts as ranks: each rank would have one of them whole."""
    q, k = net.qkv(x)[..., :16].view(4, 6, 2, 8).unbind(2)
    return net.out(torch.tanh(q) * k)


def transposed(net: Any, x: Tensor) -> Tensor:
    h = torch.tanh(x @ net.q.weight.T + F.linear(x, net.k.weight.t(), net.k.bias))
    return torch.matmul(h, net.out.weight.transpose(0, 1))


def normalized(net: Any, x: Tensor) -> Tensor:
    """A mean over what is split is the sum of what the ranks have."""
    h = net.q(x)
    return net.out(h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6) * net.scale)


def train(net: Any) -> Any:
    torch.manual_seed(2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    found: list[float] = []
    for step in range(2):
        optimizer.zero_grad()
        losses = [net(X + step + number).square().mean() for number in range(2)]
        for loss in losses:
            loss.backward()
        optimizer.step()
        net.eval()
        with torch.no_grad():
            found += [*(loss.item() for loss in losses), net(X).sum().item()]
        net.train()
    return found, {name: tensor.tolist() for name, tensor in net.state_dict().items()}


def run(net: nn.Module, num_ranks: int = 2, **more: Any) -> tuple[Any, list[Any], dict[str, str]]:
    wanted = train(copy.deepcopy(net))
    nets = [copy.deepcopy(net) for _ in range(num_ranks)]

    def on_rank(rank: int) -> Any:
        net = farspan.distribute(nets[rank], tensor_parallel=num_ranks, **more)
        found, engine = train(net), current_engine()
        assert engine is not None
        matrices = engine.recorder.splitting.matrices
        forms = {
            name.removesuffix("weight").strip("._"): matrices.form_of(name)[0] for name, _ in net.named_parameters()
        }
        return found, {name: form for name, form in forms.items() if form}

    found = run_threads(num_ranks, on_rank)
    return wanted, [item[0] for item in found], found[0][1]


TORCHS = {"attention.in_proj": "column", "attention.out_proj": "row"}
OWN = {"q": "column", "k": "column", "v": "column", "out": "row"}


@pytest.mark.parametrize(
    ("forward", "forms"),
    [
        (self_attention, TORCHS),
        (padded, TORCHS),
        (cross_attention, TORCHS),
        (of_parts, {"q": "column"}),
        (attention, OWN),
        (masked, OWN),
        (by_hand, OWN),
        (with_positions, {"qkv": "column", "out": "row"}),
        (stacked, {}),
        (transposed, {"q": "column", "k": "column", "out": "row"}),
        (normalized, {"q": "column", "out": "row"}),
    ],
)
def test_as_in_one_process_and_split(forward: Any, forms: dict[str, str]) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        wanted, found, split = run(Net(forward))
    assert largest_difference(found[0], wanted) < 1e-5
    assert {name: split[name] for name in forms if name in split} == forms


def test_layers_of_torch() -> None:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        layer = nn.TransformerEncoderLayer(8, HEADS, 16, dropout=0.1, batch_first=True)
        wanted, found, split = run(nn.TransformerEncoder(layer, 2), 4)
    assert largest_difference(found[0], wanted) < 1e-5
    assert sorted(split.values()) == ["column"] * 4 + ["row"] * 4


def test_masks_that_a_seed_gives_are_those_of_every_plan() -> None:
    def on_rank(rank: int, ways: dict[str, Any], net: nn.Module) -> list[float]:
        net = farspan.distribute(net, seed=5, **ways)
        losses = [net(X + number).square().mean() for number in range(2)]
        return [loss.item() for loss in losses]

    with torch.random.fork_rng():
        torch.manual_seed(3)
        net = Net(attention)
    found: list[Any] = []
    for ways in ({"tensor_parallel": 2}, {"plan": {"": "rank:0", "out": "rank:1"}}):
        nets = [copy.deepcopy(net) for _ in range(2)]
        found.append(run_threads(2, lambda rank, ways=ways, nets=nets: on_rank(rank, ways, nets[rank]))[0])
    assert found[0] == pytest.approx(found[1], rel=1e-6)
