"""Small models that are awkward to cut: functions that give a model and what one step of its loop does with it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["CASES", "Case"]

Case = Callable[[], tuple[nn.Module, Callable[[nn.Module], Tensor]]]
"""Gives a model, and a function that calls it on a batch and returns the loss."""

CASES: dict[str, Case] = {}


def case(function: Case) -> Case:
    CASES[function.__name__] = function
    return function


def mlp(width: int = 8, out: int = 5) -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, out))


def rows(number: int = 12, width: int = 6) -> Tensor:
    return torch.randn(number, width)


class Block(nn.Module):
    """Attention over [batch, time, width] with an optional mask that broadcasts to [batch, heads, time, time]."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).view(x.shape[0], x.shape[1], 3, 2, -1).permute(2, 0, 3, 1, 4).unbind(0)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return x + self.out(y.transpose(1, 2).flatten(2))


class Transformer(nn.Module):
    def __init__(self, num_blocks: int = 3, vocabulary: int = 11, width: int = 8) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList([Block(width) for _ in range(num_blocks)])
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, mask)
        return self.head(x)


def tokens(batch: int = 12, time: int = 7) -> Tensor:
    return torch.randint(0, 11, (batch, time))


def cross_entropy(logits: Tensor, labels: Tensor, **options: Any) -> Tensor:
    return F.cross_entropy(logits.reshape(-1, logits.shape[-1]), labels.reshape(-1), **options)


# Losses.


@case
def mlp_cross_entropy():
    x, y = rows(), torch.randint(0, 5, (12,))
    return mlp(), lambda model: F.cross_entropy(model(x), y)


@case
def mlp_mse():
    x, y = rows(), torch.randn(12, 5)
    return mlp(), lambda model: F.mse_loss(model(x), y)


@case
def mlp_mse_by_hand():
    x, y = rows(), torch.randn(12, 5)
    return mlp(), lambda model: ((model(x) - y) ** 2).mean()


@case
def l1_and_l2():
    x, y = rows(), torch.randn(12, 5)

    def step(model: nn.Module) -> Tensor:
        out = model(x)
        return F.l1_loss(out, y) + 0.3 * F.mse_loss(out, y)

    return mlp(), step


@case
def sum_loss():
    x, y = rows(), torch.randn(12, 5)
    return mlp(), lambda model: F.smooth_l1_loss(model(x), y, reduction="sum")


@case
def none_then_weights():
    x, y, w = rows(), torch.randint(0, 5, (12,)), torch.rand(12)
    return mlp(), lambda model: (F.cross_entropy(model(x), y, reduction="none") * w).sum() / w.sum()


@case
def class_weights():
    x, y, w = rows(), torch.randint(0, 5, (12,)), torch.rand(5)
    return mlp(), lambda model: F.cross_entropy(model(x), y, weight=w)


@case
def smoothed_labels():
    x, y = rows(), torch.randint(0, 5, (12,))
    return mlp(), lambda model: F.cross_entropy(model(x), y, label_smoothing=0.1)


@case
def smoothed_labels_with_weights():
    x, y, w = rows(), torch.randint(0, 5, (12,)), torch.rand(5)
    return mlp(), lambda model: F.cross_entropy(model(x), y, weight=w, label_smoothing=0.1)


@case
def soft_targets():
    x, y = rows(), torch.rand(12, 5).softmax(-1)
    return mlp(), lambda model: F.cross_entropy(model(x), y)


@case
def soft_targets_smoothed():
    x, y = rows(), torch.rand(12, 5).softmax(-1)
    return mlp(), lambda model: F.cross_entropy(model(x), y, label_smoothing=0.2)


@case
def uneven_ignored_labels():
    x, y = tokens(), tokens()
    y[:3] = -100
    y[5, 2:] = -100
    return Transformer(), lambda model: cross_entropy(model(x), y)


@case
def one_lane_wholly_ignored():
    x, y = tokens(), tokens()
    y[:6] = -100
    return Transformer(), lambda model: cross_entropy(model(x), y)


@case
def other_ignored_index():
    x, y = tokens(), tokens()
    return Transformer(), lambda model: cross_entropy(model(x), y, ignore_index=3)


@case
def shifted_labels():
    x = tokens()
    return Transformer(), lambda model: cross_entropy(model(x)[:, :-1], x[:, 1:])


@case
def shifted_labels_with_ellipsis():
    x = tokens()

    def step(model: nn.Module) -> Tensor:
        logits = model(x)[..., :-1, :].contiguous()
        return F.cross_entropy(logits.view(-1, 11), x[..., 1:].contiguous().view(-1))

    return Transformer(), step


@case
def transposed_for_cross_entropy():
    x, y = tokens(), tokens()
    return Transformer(), lambda model: F.cross_entropy(model(x).transpose(1, 2), y)


@case
def permuted_for_cross_entropy():
    x, y = tokens(), tokens()
    return Transformer(), lambda model: F.cross_entropy(model(x).permute(0, 2, 1), y)


@case
def time_first_by_the_loop():
    x, y = tokens(), tokens()
    return Transformer(), lambda model: cross_entropy(model(x).permute(1, 0, 2), y.t())


@case
def log_softmax_and_nll():
    x, y = rows(), torch.randint(0, 5, (12,))
    return mlp(), lambda model: F.nll_loss(F.log_softmax(model(x), dim=-1), y)


@case
def log_softmax_over_the_batch():
    x, y = rows(), torch.randint(0, 5, (12,))
    return mlp(), lambda model: F.nll_loss(F.log_softmax(model(x), dim=0), y)


@case
def negative_log_likelihood_by_hand():
    x, y = rows(), torch.randint(0, 5, (12,))
    return mlp(), lambda model: -model(x).log_softmax(-1)[torch.arange(12), y].mean()


@case
def gathered_log_probabilities():
    x, y = rows(), torch.randint(0, 5, (12, 1))
    return mlp(), lambda model: -model(x).log_softmax(-1).gather(1, y).mean()


@case
def binary_cross_entropy():
    x, y = rows(), torch.rand(12, 5).round()
    return mlp(), lambda model: F.binary_cross_entropy_with_logits(model(x), y)


@case
def binary_with_positive_weights():
    x, y, w = rows(), torch.rand(12, 5).round(), torch.rand(5)
    return mlp(), lambda model: F.binary_cross_entropy_with_logits(model(x), y, pos_weight=w)


@case
def squeezed_output():
    x, y = rows(), torch.rand(12)
    return mlp(out=1), lambda model: F.mse_loss(model(x).squeeze(-1), y)


@case
def squeezed_everything():
    x, y = rows(), torch.rand(12)
    return mlp(out=1), lambda model: F.mse_loss(model(x).squeeze(), y)


@case
def broadcast_by_mistake():
    x, y = rows(), torch.rand(12)
    return mlp(out=1), lambda model: ((model(x) - y) ** 2).mean()


@case
def masked_mean():
    x, y, mask = tokens(), tokens(), torch.rand(12, 7) > 0.3

    def step(model: nn.Module) -> Tensor:
        loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten(), reduction="none").view(12, 7)
        return (loss * mask).sum() / mask.sum()

    return Transformer(), step


@case
def selected_by_a_mask():
    x, y, mask = tokens(), tokens(), torch.rand(12, 7) > 0.3
    return Transformer(), lambda model: F.cross_entropy(model(x)[mask], y[mask])


@case
def divided_by_a_norm_of_the_batch():
    x = rows()

    def step(model: nn.Module) -> Tensor:
        out = model(x)
        return (out / out.norm()).sigmoid().mean()

    return mlp(), step


@case
def variance_of_the_batch():
    x = rows()
    return mlp(), lambda model: model(x).var(0).mean() + model(x).std()


@case
def perplexity():
    x, y = tokens(), tokens()
    return Transformer(), lambda model: cross_entropy(model(x), y).exp()


@case
def product_of_losses():
    x, y = rows(), torch.randn(12, 5)

    def step(model: nn.Module) -> Tensor:
        out = model(x)
        return F.mse_loss(out, y) * F.l1_loss(out, y)

    return mlp(), step


@case
def weight_decay_by_hand():
    x, y = rows(), torch.randn(12, 5)
    return mlp(), lambda model: F.mse_loss(model(x), y) + 0.01 * norm_of(model)


def norm_of(model: nn.Module) -> Tensor:
    return torch.stack([item.pow(2).sum() for item in model.parameters()]).sum()


@case
def largest_of_the_batch():
    x = rows()
    return mlp(), lambda model: model(x).max() + model(x).amax(1).mean()


@case
def sorted_rows():
    x = rows()
    return mlp(), lambda model: (model(x).sort(0).values * torch.arange(12.0)[:, None]).mean()


@case
def detached_teacher():
    x = rows()

    def step(model: nn.Module) -> Tensor:
        out = model(x)
        target = out.detach().softmax(-1)
        return F.kl_div(F.log_softmax(out * 0.7, -1), target, reduction="batchmean")

    return mlp(), step


# Inputs.


@case
def batch_as_long_as_time():
    x, y = tokens(7, 7), tokens(7, 7)
    return Transformer(), lambda model: cross_entropy(model(x), y)


@case
def causal_mask_as_wide_as_the_batch():
    x, mask = tokens(8, 8), torch.ones(8, 8, dtype=torch.bool).tril()
    return Transformer(), lambda model: cross_entropy(model(x, mask), x)


@case
def empty_mask_as_wide_as_the_batch():
    x, mask = tokens(8, 8), torch.ones(8, 8, dtype=torch.bool)
    return Transformer(), lambda model: cross_entropy(model(x, mask), x)


@case
def mask_for_each_row():
    x, mask = tokens(8, 8), torch.rand(8, 1, 1, 8) > 0.2
    mask[..., 0] = True
    return Transformer(), lambda model: cross_entropy(model(x, mask), x)


@case
def mask_as_a_keyword():
    x, mask = tokens(), torch.ones(7, 7, dtype=torch.bool).tril()
    return Transformer(), lambda model: cross_entropy(model(x, mask=mask), x)


@case
def time_first():
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn, self.head = nn.GRU(6, 8), nn.Linear(8, 5)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.rnn(x)[0])

    x, y = torch.randn(7, 12, 6), torch.randn(7, 12, 5)
    return Model(), lambda model: F.mse_loss(model(x), y)


@case
def tuple_of_inputs():
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(6, 8), nn.Linear(3, 8)

        def forward(self, pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
            return self.a(pair[0]) + self.b(pair[1]), self.b(pair[1])

    x, z = rows(), torch.randn(12, 3)

    def step(model: nn.Module) -> Tensor:
        one, two = model((x, z))
        return one.square().mean() + two.abs().mean()

    return Model(), step


@case
def dictionary_of_inputs():
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 5)

        def forward(self, batch: dict[str, Any]) -> dict[str, Tensor]:
            return {"logits": self.b(self.a(batch["x"]).relu() * batch["scale"])}

    batch = {"x": rows(), "scale": 0.5}
    return Model(), lambda model: model(batch)["logits"].square().mean()


@case
def one_row():
    x, y = rows(1), torch.randint(0, 5, (1,))
    return mlp(), lambda model: F.cross_entropy(model(x), y)


@case
def three_rows():
    x, y = rows(3), torch.randint(0, 5, (3,))
    return mlp(), lambda model: F.cross_entropy(model(x), y)


@case
def odd_number_of_rows():
    x, y = rows(13), torch.randint(0, 5, (13,))
    return mlp(), lambda model: F.cross_entropy(model(x), y)


@case
def ragged_list():
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 5)

        def forward(self, items: list[Tensor]) -> Tensor:
            return torch.stack([self.b(self.a(item).relu().mean(0)) for item in items])

    items = [rows(n) for n in (3, 5, 2, 4)]
    return Model(), lambda model: model(items).square().mean()


@case
def table_beside_the_batch():
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 5)

        def forward(self, x: Tensor, table: Tensor, index: Tensor) -> Tensor:
            return self.b(self.a(x) + table[index])

    x, table, index = rows(), torch.randn(12, 8), torch.randint(0, 12, (12,))
    return Model(), lambda model: model(x, table, index).square().mean()


# Models whose rows depend on each other.


@case
def batch_norm():
    x, y = rows(), torch.randint(0, 5, (12,))
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 5))
    return model, lambda model: F.cross_entropy(model(x), y)


@case
def batch_norm_without_statistics():
    x, y = rows(), torch.randint(0, 5, (12,))
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8, track_running_stats=False), nn.Linear(8, 5))
    return model, lambda model: F.cross_entropy(model(x), y)


@case
def batch_norm_in_eval():
    x, y = rows(), torch.randint(0, 5, (12,))
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 5))

    def step(model: nn.Module) -> Tensor:
        model[1].eval()  # type: ignore[index]
        return F.cross_entropy(model(x), y)

    return model, step


@case
def centred_by_hand():
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 5)

        def forward(self, x: Tensor) -> Tensor:
            y = self.a(x)
            return self.b(y - y.mean(0))

    x = rows()
    return Model(), lambda model: model(x).square().mean()


@case
def in_batch_negatives():
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(6, 8), nn.Linear(6, 8)

        def forward(self, x: Tensor, z: Tensor) -> Tensor:
            return self.a(x) @ self.b(z).t()

    x, z = rows(), rows()
    return Model(), lambda model: F.cross_entropy(model(x, z), torch.arange(12))


@case
def contrastive_by_the_loop():
    x, z = rows(), rows()

    def step(model: nn.Module) -> Tensor:
        one, two = F.normalize(model(x), dim=-1), F.normalize(model(z), dim=-1)
        return F.cross_entropy(one @ two.t() / 0.1, torch.arange(12))

    return mlp(), step


@case
def batch_attends_to_itself():
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 5)

        def forward(self, x: Tensor) -> Tensor:
            y = self.a(x)
            return self.b((y @ y.t()).softmax(-1) @ y)

    x = rows()
    return Model(), lambda model: model(x).square().mean()


class Experts(nn.Module):
    """Routes each row to one of four experts, and keeps a loss that balances them."""

    def __init__(self, *, keeps: bool) -> None:
        super().__init__()
        self.gate, self.keeps = nn.Linear(6, 4), keeps
        self.experts = nn.ModuleList([nn.Linear(6, 6) for _ in range(4)])
        self.balance: Any = None

    def forward(self, x: Tensor) -> Any:
        weights = self.gate(x).softmax(-1)
        y = sum(weights[:, number, None] * expert(x) for number, expert in enumerate(self.experts))
        balance = (weights.mean(0) ** 2).sum()
        if self.keeps:
            self.balance = balance
            return y
        return y, balance


@case
def balancing_loss_returned():
    x = rows()

    def step(model: nn.Module) -> Tensor:
        y, balance = model(x)
        return y.square().mean() + 0.1 * balance

    return Experts(keeps=False), step


@case
def balancing_loss_kept_on_the_module():
    x = rows()

    def step(model: Any) -> Tensor:
        y = model(x)
        return y.square().mean() + 0.1 * model.balance

    return Experts(keeps=True), step


@case
def capacity_of_experts():
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate, self.a, self.b = nn.Linear(6, 2), nn.Linear(6, 6), nn.Linear(6, 6)

        def forward(self, x: Tensor) -> Tensor:
            score = self.gate(x).softmax(-1)[:, 0]
            chosen = score.argsort(descending=True) < 6  # the first half of the batch, by rank
            return torch.where(chosen[:, None], self.a(x), self.b(x)) * score[:, None]

    x = rows()
    return Model(), lambda model: model(x).square().mean()


@case
def loss_inside():
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = Transformer()

        def forward(self, x: Tensor, labels: Tensor) -> Tensor:
            return cross_entropy(self.body(x), labels)

    x, y = tokens(), tokens()
    y[:5] = -100
    return Model(), lambda model: model(x, y)


@case
def loss_inside_beside_logits():
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = Transformer()

        def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
            logits = self.body(x)
            return {"loss": cross_entropy(logits, labels), "logits": logits}

    x, y = tokens(), tokens()
    return Model(), lambda model: model(x, y)["loss"]


@case
def counts_its_calls():
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.calls = nn.Linear(6, 8), nn.Linear(8, 5), 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return self.b(self.a(x) / self.calls)

    x = rows()
    return Model(), lambda model: model(x).square().mean()


@case
def reads_data():
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 5)

        def forward(self, x: Tensor) -> Tensor:
            y = self.a(x)
            return self.b(y if y.mean().item() > 0 else -y)

    x = rows()
    return Model(), lambda model: model(x).square().mean()


@case
def scaled_by_the_number_of_rows():
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 5)

        def forward(self, x: Tensor) -> Tensor:
            return self.b(self.a(x)) / x.shape[0]

    x = rows()
    return Model(), lambda model: model(x).square().sum()


@case
def position_in_the_batch():
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 5)

        def forward(self, x: Tensor) -> Tensor:
            return self.b(self.a(x) + torch.arange(x.shape[0])[:, None])

    x = rows()
    return Model(), lambda model: model(x).square().mean()


@case
def folds_time_into_the_batch():
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 5)

        def forward(self, x: Tensor) -> Tensor:
            return self.b(self.a(x.flatten(0, 1)).relu()).view(x.shape[0], x.shape[1], -1)

    x = torch.randn(12, 3, 6)
    return Model(), lambda model: model(x).square().mean()


@case
def returns_rows_of_time():
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 5)

        def forward(self, x: Tensor) -> Tensor:
            return self.b(self.a(x.flatten(0, 1)).relu())

    x, y = torch.randn(12, 3, 6), torch.randint(0, 5, (36,))
    return Model(), lambda model: F.cross_entropy(model(x), y)


@case
def returns_time_first():
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 5)

        def forward(self, x: Tensor) -> Tensor:
            return self.b(self.a(x).relu()).transpose(0, 1)

    x, y = torch.randn(12, 3, 6), torch.randn(3, 12, 5)
    return Model(), lambda model: F.mse_loss(model(x), y)


@case
def flattened_time_first():
    model, _ = returns_time_first()
    x, y = torch.randn(12, 3, 6), torch.randint(0, 5, (36,))
    return model, lambda model: F.cross_entropy(model(x).flatten(0, 1), y)


@case
def called_twice():
    x, z = rows(), rows()

    def step(model: nn.Module) -> Tensor:
        return (model(x) - model(z)).square().mean()

    return mlp(), step


@case
def own_output_again():
    x = rows(12, 5)
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 5))
    return model, lambda model: model(model(x)).square().mean()


@case
def two_backwards():
    x, y = rows(), torch.randn(12, 5)

    def step(model: nn.Module) -> Tensor:
        out = model(x)
        F.mse_loss(out, y).backward(retain_graph=True)
        return F.l1_loss(out, y)

    return mlp(), step


@case
def read_before_backward():
    x, y = rows(), torch.randn(12, 5)

    def step(model: nn.Module) -> Tensor:
        loss = F.mse_loss(model(x), y)
        return loss * (2.0 if loss.item() > 0.5 else 3.0)

    return mlp(), step


@case
def written_in_place():
    x, y = rows(), torch.randn(12, 5)

    def step(model: nn.Module) -> Tensor:
        out = model(x)
        out += 1
        out[0] = 0.5
        return F.mse_loss(out, y)

    return mlp(), step


@case
def written_in_place_under_a_view():
    x = rows()

    def step(model: nn.Module) -> Tensor:
        out = model(x) * 1.0
        view = out.view(12, 5, 1)
        out += 1
        return view.square().mean()

    return mlp(), step


@case
def gradient_accumulation():
    x, y = rows(), torch.randn(12, 5)

    def step(model: nn.Module) -> Tensor:
        (F.mse_loss(model(x), y) / 2).backward()
        return F.mse_loss(model(-x), y) / 2

    return mlp(), step


@case
def concatenated_outputs():
    x, z = rows(), rows()
    return mlp(), lambda model: torch.cat([model(x), model(z)]).square().mean()


@case
def halves_of_one_call():
    x, z = rows(), rows()

    def step(model: nn.Module) -> Tensor:
        one, two = model(torch.cat([x, z])).chunk(2)
        return (one * two).mean()

    return mlp(), step


@case
def triplets():
    a, p, n = rows(), rows(), rows()
    return mlp(), lambda model: F.triplet_margin_loss(model(a), model(p), model(n))


class _Scaled(torch.autograd.Function):
    """Its backward divides by the norm of what it was given."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.norm = x.norm()
        return 2 * x

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return 2 * gradients[0] / ctx.norm


@case
def autograd_function_in_the_loop():
    x, y = rows(), torch.randint(0, 5, (12,))

    def step(model: nn.Module) -> Tensor:
        out = model(x)
        return F.cross_entropy(out, y) + _Scaled.apply(out).square().mean()

    return mlp(), step


@case
def the_same_output_given_twice():
    x = rows()

    def step(model: nn.Module) -> Tensor:
        out = model(x)
        return torch.einsum("bi,bj->ij", out, out).square().mean()

    return mlp(), step


@case
def hook_on_the_output():
    x, y = rows(), torch.randn(12, 5)

    def step(model: nn.Module) -> Tensor:
        out = model(x)
        out.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
        return F.mse_loss(out, y)

    return mlp(), step
