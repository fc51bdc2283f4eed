"""Models whose rows meet in some way, or for which no rule says that they do not."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from tests.call.rows.snippets import Forward, floats, of, row_numbers
from torch import Tensor

__all__ = ["WHOLE"]


class _Centred(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0] - grads[0].mean(0)


def _gradient_of_mean(m: Any, x: Tensor) -> Any:
    x = x.clone().requires_grad_()
    loss = F.mse_loss(x @ m.w, torch.zeros_like(x))
    return loss, torch.autograd.grad(loss, x, create_graph=True)[0]


def _gradient_of_mean_by_function(m: Any, x: Tensor) -> Any:
    return x @ m.w, torch.func.grad(lambda y: F.mse_loss(y @ m.w, torch.zeros_like(y)))(x)


def _other_data(m: Any, x: Tensor) -> Tensor:
    y = x @ m.w
    y.data = y.data - y.data.mean(0)
    return y


def _data_centred(m: Any, x: Tensor) -> Tensor:
    y = x @ m.w * 1
    y.data.sub_(y.data.mean(0))
    return y


def _counted(m: Any, x: Tensor) -> Tensor:
    m.plain[0] += 1
    return x @ m.w * m.plain[0]


def _rounded_sum(m: Any, x: Tensor) -> Any:
    total = torch.empty((), dtype=torch.long)
    total.copy_((x @ m.w).detach().sum())
    return x @ m.w, total


def _view_of_centred(m: Any, x: Tensor) -> Tensor:
    y = x @ m.w * 1
    view = y.view(-1, 36)
    y.sub_(y.mean(0))
    return view.tanh()


def _through_a_transposed_view(m: Any, x: Tensor) -> Tensor:
    y = (x @ m.w)[:, 0] * 1
    y.t().copy_(y.clone().flip(0).t())
    return y


def _weighted_mean(m: Any, x: Tensor) -> Tensor:
    loss: Any = F.mse_loss
    return loss(x @ m.w, x, weight=x.abs())


def _row_by_row(m: Any, x: Tensor) -> Tensor:
    return torch.stack([row @ m.w for row in x])


def _padded(m: Any, x: Tensor) -> Tensor:
    return F.pad(x @ m.w, (0, 0, 0, 9))


WHOLE: dict[str, tuple[Forward, Any]] = {
    **of(
        floats,
        mean_of_rows=lambda m, x: x @ m.w - x.mean(0),
        mean_of_all=lambda m, x: (x @ m.w).mean(),
        softmax_over_rows=lambda m, x: (x @ m.w).softmax(0),
        softmax_over_rows_at_the_end=lambda m, x: (x.permute(1, 2, 0) @ torch.eye(6).double()).softmax(-1),
        cumulative_over_rows=lambda m, x: (x @ m.w).cumsum(0),
        flipped_rows=lambda m, x: (x @ m.w).flip(0),
        rolled_rows=lambda m, x: (x @ m.w).roll(1, 0),
        rolled_flat=lambda m, x: (x @ m.w).roll(1),
        sorted_rows=lambda m, x: (x @ m.w).sort(0).values,
        similarity=lambda m, x: (x[:, 0] @ m.w) @ x[:, 0].t(),
        similarity_diagonal=lambda m, x: ((x[:, 0] @ m.w) @ x[:, 0].t()).diagonal(),
        first_row=lambda m, x: (x @ m.w) * x[0],
        other_rows=lambda m, x: (x @ m.w)[torch.randperm(x.shape[0])],
        half_of_rows=lambda m, x: (x @ m.w)[: x.shape[0] // 2],
        without_last=lambda m, x: (x @ m.w)[:-1],
        two_in_one=lambda m, x: (x @ m.w).view(-1, 2, 6, 6).sum(1),
        inner_view=lambda m, x: (x @ m.w).transpose(0, 1).reshape(-1, 6, 6),
        heads_in_front=lambda m, x: (x @ m.w).reshape(6, -1, 6).softmax(1),
        batch_norm=lambda m, x: F.batch_norm(x @ m.w, None, None, m.b, training=True),
        scaled_by_rows=lambda m, x: (x @ m.w) / x.shape[0],
        scaled_by_elements=lambda m, x: (x @ m.w).sum() / x.numel(),
        filled_with_number=lambda m, x: (x @ m.w) / torch.full_like(m.b, x.shape[0]),
        filled_with_share=lambda m, x: (x @ m.w) * torch.full_like(m.b, 1 / x.shape[0]),
        filled=lambda m, x: (x @ m.w) * torch.full((6,), x.shape[0]),
        number_as_tensor=lambda m, x: (x @ m.w) * torch.tensor(x.shape[0]),
        row_of_table_by_number=lambda m, x: x @ m.w + m.table[x.shape[0]],
        rows_of_table_by_number=lambda m, x: x @ m.w + m.table[x.shape[0] : x.shape[0] + 6],
        part_of_table_by_number=lambda m, x: x @ m.w + m.table.split([x.shape[0], 6, 14 - x.shape[0]])[1],
        table_rolled_by_number=lambda m, x: x @ m.w + m.table.roll(x.shape[0], 0)[:6],
        rolled_by_number=lambda m, x: (x @ m.w).roll(x.shape[0] // 2, 1),
        padded_by_number=lambda m, x: x @ m.w + F.pad(m.table, (0, 0, x.shape[0], -x.shape[0]))[:6],
        padded_with_number=lambda m, x: x @ m.w + F.pad(m.b[:5], (0, 1), value=1 / x.shape[0]),
        positions_of_rows=lambda m, x: x[:, 0] @ m.w + m.table[row_numbers(x)],
        numbers_of_rows=lambda m, x: x[:, 0] @ m.w + row_numbers(x)[:, None],
        own_number_in_both=lambda m, x: _padded(m, x)[(row_numbers(x),) * 2],
        own_number_in_both_set=lambda m, x: _padded(m, x).index_put((row_numbers(x),) * 2, m.b),
        padded_numbers_of_rows=lambda m, x: (x @ m.w)[F.pad(row_numbers(x)[:, None], (0, 1))[:, 1], 0],
        small_numbers_of_rows=lambda m, x: (x @ m.w)[row_numbers(x).to(torch.int8).long()],
        scattered_from_longer=lambda m, x: torch.zeros(4, dtype=x.dtype)
        .scatter_add(0, (x.sum((1, 2)) > 0).long(), (x @ m.w)[:, 0, :2].reshape(-1).detach())
        .mul(m.b[:4])
        .sum(),
        one_draw_for_all=lambda m, x: (x @ m.w) * torch.rand(1),
        gradient_of_mean=_gradient_of_mean,
        gradient_of_mean_by_function=_gradient_of_mean_by_function,
        own_backward_centred=lambda m, x: _Centred.apply(x @ m.w),
        other_data=_other_data,
        data_centred=_data_centred,
        counted=_counted,
        rounded_sum=_rounded_sum,
        bits_of_sum=lambda m, x: (x @ m.w, (x @ m.w).detach().sum().view(torch.int64)),
        sum_rounded_later=lambda m, x: (x @ m.w, (x @ m.w).detach().sum(0).sum(dtype=torch.long)),
        sum_squared=lambda m, x: (x @ m.w).sum().square(),
        sum_and_constant=lambda m, x: (x @ m.w).sum() + m.b.sum(),
        weight_alone=lambda m, x: (x @ m.w, m.b.square().sum()),
        view_of_centred=_view_of_centred,
        through_a_transposed_view=_through_a_transposed_view,
        row_by_row=_row_by_row,
        weighted_mean=_weighted_mean,
        two_losses=lambda m, x: F.mse_loss(x @ m.w, x) + F.l1_loss(x, x @ m.w),
        loss_and_penalty=lambda m, x: F.mse_loss(x @ m.w, x) + m.w.square().sum(),
        loss_of_broadcast=lambda m, x: F.mse_loss((x @ m.w).sum((1, 2))[:, None], x[:, 0, 0]),
        probabilities_weighted=lambda m, x: F.cross_entropy((x @ m.w)[:, 0], x[:, 1].softmax(-1), m.plain + 1),
        contrast=lambda m, x: F.cross_entropy((x[:, 0] @ m.w) @ x[:, 1].t(), row_numbers(x)),
        reads_data=lambda m, x: x @ m.w if x.sum() > 0 else x @ m.w + 1,
        chosen_rows=lambda m, x: (x @ m.w)[x[:, 0, 0] > 0],
        number_returned=lambda m, x: (x @ m.w, x.shape[0]),
        branch_by_number=lambda m, x: x @ m.w if x.shape[0] > 4 else x @ m.w + 1,
        instance_norm_of_one=lambda m, x: F.instance_norm((x @ m.w).transpose(0, 1)[None, :, :, 0]),
    ),
}  # fmt: skip
