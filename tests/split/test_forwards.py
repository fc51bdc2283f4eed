"""What modules of split stages do in their forwards, as in one process."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.support.ranks import run_threads
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import farspan
from farspan.call.leaf import WholeError
from farspan.errors import RecordError
from farspan.execute.process.world import current_engine

X = torch.randn(4, 6, 8, generator=torch.Generator().manual_seed(1))
HEADS = 4


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return 2 * ctx.saved_tensors[0] * gradients[0]


def attention(net: Any, x: Tensor) -> Tensor:
    q, k, v = [net.by_heads(part(x)) for part in (net.q, net.k, net.v)]
    return net.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(x.shape))


def attention_by_hand(net: Any, x: Tensor) -> Tensor:
    """With a mask, and with a bias for each head that the model computes."""
    q, k, v = [net.by_heads(part(x)) for part in (net.q, net.k, net.v)]
    scores = q @ k.transpose(-1, -2) / 2 + net.bias.permute(2, 0, 1)
    scores = scores.masked_fill(torch.ones(6, 6).tril() == 0, -torch.inf)
    return net.out((scores.softmax(-1) @ v).transpose(1, 2).reshape(x.shape))


def own_function(net: Any, x: Tensor) -> Tensor:
    return net.out(Square.apply(net.q(x)))


def checkpointed(net: Any, x: Tensor) -> Tensor:
    x = net.k(x)
    for use_reentrant in (False, True):
        x = x + checkpoint(lambda y: net.out(torch.tanh(net.q(y))), x, use_reentrant=use_reentrant)
    return x


def in_place(net: Any, x: Tensor) -> Tensor:
    h = net.q(x)
    view = h.view(4, 6, HEADS, -1)
    view.mul_(2)
    h += 1
    x = x + net.out(h)
    x += 1
    return x


def written(net: Any, x: Tensor) -> Tensor:
    """What is written over a part of a member's part, and over all parts, is in them and in their views."""
    h, y = net.q(x) * 1, net.out(net.k(x)) * 1
    view = h.view(-1, 8)
    heads = net.by_heads(net.v(x)) * 1
    heads[:, :, 0] = 0
    h[..., 0] = 0
    view[:, 5] = 1
    h += 1
    y[:, 0] = 0
    y[y > 0] = 0.5
    return net.out(h + heads.transpose(1, 2).reshape(x.shape)) + net.out(torch.tanh(net.k(y))) + view.sum()


def written_at_random(net: Any, x: Tensor) -> Tensor:
    h = net.q(x) * 1
    F.dropout(h, 0.5, inplace=True)
    return net.out(h.cumsum_(-1).mul_(2))


def like_a_part(net: Any, x: Tensor) -> Tensor:
    """A plain tensor takes the shape of one that is in parts."""
    scores = net.by_heads(net.q(x))
    mask = (torch.arange(6) > 3).view(1, 1, 6, 1).expand_as(scores)
    return net.out(scores.masked_fill(mask, 0).transpose(1, 2).reshape(x.shape))


def view_of_whole(net: Any, x: Tensor) -> Tensor:
    h = net.q(x) * 1
    h[..., :5].mul_(2)
    return net.out(h)


def view_of_whole_from_before(net: Any, x: Tensor) -> Tensor:
    h = net.q(x) * 1
    first = h[..., :5]
    h.mul_(2)
    return net.out(h) + first.sum()


def given_out(net: Any, x: Tensor) -> Tensor:
    h = net.q(x)
    twice = torch.empty(4, 6, 8)
    with torch.no_grad():
        torch.mul(h, 2, out=twice)
    return net.out(h + twice)


def dropped(net: Any, x: Tensor) -> Tensor:
    return net.out(F.dropout(net.q(x), 0.5))


def statistics(net: Any, x: Tensor) -> Tensor:
    return net.out(net.batch_norm(net.q(x).transpose(1, 2)).transpose(1, 2))


def needed_whole(net: Any, x: Tensor) -> Tensor:
    h = net.q(x)
    if h.abs().max() > 100 or torch.isinf(h).any():
        h = h * 0
    return net.out(h / h.norm(dim=-1, keepdim=True)) + net.k(x).cumsum(-1)


def nothing_at_first(net: Any, x: Tensor) -> Tensor:
    """What the first call adds and chooses, and what is below a limit, is the same in each way: what the next ones do
    is not."""
    more = x - X
    added = net.q(x).index_add(2, torch.tensor([0, 1]), more[..., :2])
    chosen = net.k(x).masked_scatter(more > 0.5, torch.arange(192.0).sin())
    return net.out(added) + net.out(chosen) + net.out(net.v(1 + 9 * more).renorm(2, 0, 20.0))


def shares_memory(net: Any, x: Tensor) -> Tensor:
    """What is written into a view of a tensor that the ranks have copies of shows in it."""
    x, h = net.k(x).cumsum(-1), net.q(x)
    same, seen = x.to(h), torch.broadcast_tensors(x, h)[0]
    y = net.out(h + x)
    seen[0].mul_(2)
    same[1].mul_(3)
    return y + x + net.v(x)


def fused(net: Any, x: Tensor) -> Tensor:
    q, k, v = [net.by_heads(part) for part in net.qkv(x).split(8, dim=2)]
    return net.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(x.shape))


class Net(nn.Module):
    def __init__(self, forward: Any) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = [nn.Linear(8, 8) for _ in range(4)]
        self.qkv = nn.Linear(8, 24)
        self.bias = nn.Parameter(torch.randn(6, 6, HEADS))
        self.batch_norm = nn.BatchNorm1d(8)
        self.does = forward

    def by_heads(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:2], HEADS, x.shape[2] // HEADS).transpose(1, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.does(self, x)


def train(net: Any) -> Any:
    torch.manual_seed(2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    losses: list[float] = []
    for step in range(3):
        optimizer.zero_grad()
        losses_of_step = [net(X + step + number).square().mean() for number in range(2)]
        for loss in losses_of_step:
            loss.backward()
        optimizer.step()
        losses += [loss.item() for loss in losses_of_step]
    return losses, {name: tensor.tolist() for name, tensor in net.state_dict().items()}


@pytest.mark.parametrize(
    "forward",
    [
        attention,
        attention_by_hand,
        own_function,
        checkpointed,
        in_place,
        written,
        written_at_random,
        like_a_part,
        dropped,
        statistics,
        needed_whole,
        nothing_at_first,
        shares_memory,
        fused,
    ],
)
def test_as_in_one_process(forward: Any) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        net = Net(forward)
        wanted_losses, wanted = train(copy.deepcopy(net))
        nets = [copy.deepcopy(net) for _ in range(2)]
        for losses, state in run_threads(2, lambda rank: train(farspan.distribute(nets[rank], tensor_parallel=2))):
            assert losses == pytest.approx(wanted_losses, rel=2e-6)
            for name, numbers in wanted.items():
                assert torch.allclose(torch.tensor(state[name]), torch.tensor(numbers), rtol=1e-5, atol=2e-6), name


@pytest.mark.parametrize("forward", [view_of_whole, view_of_whole_from_before])
def test_a_view_of_what_was_gathered_is_not_written(forward: Any) -> None:
    """It is a copy of the parts, which do not see the write, nor it theirs."""
    nets = [Net(forward) for _ in range(2)]
    with pytest.raises(RecordError, match="has been put together, and shares its memory with views"):
        run_threads(2, lambda rank: train(farspan.distribute(nets[rank], tensor_parallel=2)))


def cut(net: Any, x: Tensor) -> Tensor:
    """No gradient comes to `k` and `v`, not even zeros."""
    gate = torch.sigmoid(net.v(net.k(x)))
    gate.detach_()
    return net.out(net.q(x * gate))


def test_what_is_cut_in_place_gets_no_gradient() -> None:
    def on_rank(rank: int) -> set[str]:
        net = farspan.distribute(Net(cut), tensor_parallel=2)
        net(X).square().mean().backward()
        return {name for name, p in net.named_parameters() if p.grad is None}

    plain = Net(cut)
    plain(X).square().mean().backward()
    wanted = {name for name, p in plain.named_parameters() if p.grad is None}
    assert "k.weight" in wanted and run_threads(2, on_rank) == [wanted] * 2


class Counted(torch.autograd.Function):
    """Counts its backwards on the module that called it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, net: Any) -> Tensor:
        ctx.net = net
        return x * 2

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        ctx.net.num_backwards += 1
        return gradients[0], None


def test_an_attribute_that_a_functions_backward_changes_is_known_to_all_ranks() -> None:
    def counted(net: Any, x: Tensor) -> Tensor:
        return net.out(Counted.apply(net.q(x), net))

    nets: list[Any] = [Net(counted) for _ in range(3)]
    for net in nets:
        net.num_backwards = 0
    train(nets[2])
    run_threads(2, lambda rank: train(farspan.distribute(nets[rank], tensor_parallel=2)))
    assert [net.num_backwards for net in nets] == [nets[2].num_backwards] * 3 != [0] * 3


def test_out_is_refused() -> None:
    nets = [Net(given_out) for _ in range(2)]
    with pytest.raises(WholeError, match="mul writes into a tensor of which the ranks of a stage have parts"):
        run_threads(2, lambda rank: train(farspan.distribute(nets[rank], tensor_parallel=2)))


def test_nothing_runs_before_it_is_needed() -> None:
    """What splits a layer asks no recorded tensor for its data."""

    def on_rank(rank: int) -> int:
        net = farspan.distribute(Net(attention_by_hand), tensor_parallel=2)
        for number in range(2):
            net(X + number).square().mean().backward()
        engine = current_engine()
        assert engine is not None
        return engine.num_flushes

    assert run_threads(2, on_rank) == [0, 0]


@pytest.mark.parametrize(
    ("forward", "columns", "rows"),
    [(attention, "q k v", "out"), (attention_by_hand, "q k v", "out"), (fused, "qkv", "out"), (needed_whole, "", "")],
)
def test_which_matrices_are_split(forward: Any, columns: str, rows: str) -> None:
    def on_rank(rank: int) -> Any:
        net = farspan.distribute(Net(forward), tensor_parallel=2)
        for number in range(2):
            net(X + number).square().mean().backward()
        engine = current_engine()
        assert engine is not None
        farspan.flush()
        forms = {name: engine.recorder.splitting.matrices.form_of(name)[0] for name, _ in net.named_parameters()}
        return [" ".join(name[:-7] for name in forms if forms[name] == form) for form in ("column", "row")]

    assert run_threads(2, on_rank) == [[columns, rows]] * 2
