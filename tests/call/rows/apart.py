"""Models whose rows stay apart, and are to be known to."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from tests.call.rows.snippets import Forward, floats, of, row_numbers, with_labels, with_numbers, with_square
from torch import Tensor

__all__ = ["APART"]


def _in_place(m: Any, x: Tensor) -> Tensor:
    y = x @ m.w
    y[:, 0] = 0
    y[:, 1:3].mul_(2)
    y[:, -1] += x[:, 0]
    return y


def _filled(m: Any, x: Tensor) -> Tensor:
    y = x.new_zeros(x.shape[0], 6)
    for number in range(6):
        y[:, number] = (x[:, number] @ m.w).sum(-1)
    return y


def _added_up(m: Any, x: Tensor) -> Tensor:
    total = torch.zeros((), dtype=x.dtype)
    for number in range(3):
        total += (x[:, number] @ m.w).tanh().sum()
    return total


def _recurrent(m: Any, x: Tensor) -> Tensor:
    state = x.new_zeros(x.shape[0], 6)
    for step in x.unbind(1):
        state = (step + state @ m.w).tanh()
    return state


class _Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return 2 * x

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return 2 * grads[0] * ctx.saved_tensors[0].sign().square()


def _checkpointed(m: Any, x: Tensor) -> Tensor:
    from torch.utils.checkpoint import checkpoint

    return checkpoint(lambda y: (y @ m.w).tanh(), x @ m.w, use_reentrant=False)  # type: ignore[no-any-return]


def _forces(m: Any, x: Tensor) -> Any:
    x = x.clone().requires_grad_()
    energy = (x @ m.w).tanh().sum()
    return energy, torch.autograd.grad(energy, x, create_graph=True)[0]


APART: dict[str, tuple[Forward, Any]] = {
    **of(
        floats,
        product=lambda m, x: x @ m.w,
        linear=lambda m, x: F.linear(x, m.w, m.b).relu(),
        linear_of_two_dims=lambda m, x: F.linear(x[:, 0], m.w, m.b),
        batched_product=lambda m, x: (x @ m.w).bmm(x.transpose(1, 2)),
        product_with_same_matrix=lambda m, x: x.transpose(1, 2) @ x @ m.w,
        matrix_from_the_left=lambda m, x: m.w @ x,
        einsum=lambda m, x: torch.einsum("btd,ed->bte", x, m.w),
        einsum_of_two=lambda m, x: torch.einsum("btd,bsd->bts", x @ m.w, x),
        vector=lambda m, x: x @ m.b,
        vector_of_each_row=lambda m, x: (x[:, 0] @ m.w) @ m.b,
        outer=lambda m, x: x[:, 0, :, None] * x[:, 1, None, :] @ m.w,
        baddbmm=lambda m, x: torch.baddbmm(m.b, x, x @ m.w),
        time_first=lambda m, x: (x.transpose(0, 1) @ m.w).tanh(),
        time_first_flat=lambda m, x: (x.transpose(0, 1).reshape(-1, 6) @ m.w).view(6, -1, 6).transpose(0, 1),
        batch_last=lambda m, x: m.w @ x.permute(1, 2, 0).reshape(6, -1).view(6, 6, -1)[0],
        flat=lambda m, x: (x.reshape(-1, 6) @ m.w).view(-1, 6, 6),
        flat_rows=lambda m, x: x.reshape(-1, 6) @ m.w,
        flattened=lambda m, x: F.linear(x.flatten(1), m.w.repeat(1, 6)),
        unflattened=lambda m, x: (x @ m.w).flatten(0, 1).unflatten(0, (-1, 2, 3)),
        heads=lambda m, x: (x @ m.w).view(-1, 6, 2, 3).transpose(1, 2).reshape(-1, 6, 3),
        unsqueezed=lambda m, x: (x @ m.w)[:, None].squeeze(1).unsqueeze(-1),
        squeezed_all=lambda m, x: (x[:, :1] @ m.w).squeeze(),
        expanded=lambda m, x: x @ m.w + m.b.expand(x.shape[0], 6, 6),
        expanded_as=lambda m, x: x @ m.w + m.b.expand_as(x),
        token_in_front=lambda m, x: torch.cat([m.b.expand(x.shape[0], 1, 6), x], 1) @ m.w,
        repeated_weight=lambda m, x: x @ m.w + m.w.repeat(x.shape[0], 1, 1),
        repeated_rows=lambda m, x: (x @ m.w).repeat(2, 1, 1)[: x.shape[0]],
        repeat_interleaved=lambda m, x: (x @ m.w).repeat_interleave(2, 0),
        both_halves=lambda m, x: torch.cat([x @ m.w, x], 0).chunk(2)[0],
        stacked=lambda m, x: torch.stack([x @ m.w, x], 0).transpose(0, 1),
        stacked_behind=lambda m, x: torch.stack([x @ m.w, x], -1),
        joined_by_width=lambda m, x: torch.cat([x @ m.w, x], -1),
        halves_of_width=lambda m, x: (x @ m.w).chunk(2, -1)[1],
        three_of_width=lambda m, x: (x @ m.w).split([1, 2, 3], -1)[2],
        unbound=lambda m, x: (x @ m.w).unbind(1)[2],
        first_step=lambda m, x: (x @ m.w)[:, 0],
        last_steps=lambda m, x: (x @ m.w)[:, -3:],
        every_second=lambda m, x: (x @ m.w)[..., ::2],
        strange_index=lambda m, x: (x @ m.w)[:, None, 1:, [0, 0, 5]],
        steps_by_list=lambda m, x: (x @ m.w)[:, torch.tensor([5, 0])],
        two_lists=lambda m, x: (x @ m.w)[:, torch.tensor([5, 0]), torch.tensor([1, 1])],
        own_rows=lambda m, x: (x @ m.w)[row_numbers(x), x.sum((1, 2)).long().remainder(6)],
        own_rows_in_two=lambda m, x: (x @ m.w)[row_numbers(x)[:, None], x[:, 0].argsort(-1)],
        own_rows_set=lambda m, x: (x @ m.w).index_put((row_numbers(x), x[:, 0].argmax(-1)), m.b),
        gathered=lambda m, x: (x @ m.w).gather(2, x.argsort(-1)),
        gathered_smaller=lambda m, x: (x @ m.w).gather(1, x.argsort(-1)[:, :2, :3]),
        scattered=lambda m, x: (x @ m.w).scatter(1, x.argsort(-1), x),
        scattered_number=lambda m, x: (x @ m.w).scatter(2, x.argmax(-1, keepdim=True), 0.5),
        scatter_added=lambda m, x: (x @ m.w).scatter_add(1, x.argsort(-1), x),
        index_selected=lambda m, x: (x @ m.w).index_select(1, torch.tensor([3, 0])),
        index_added=lambda m, x: (x @ m.w).index_add(1, torch.tensor([3, 0]), x[:, :2]),
        masked=lambda m, x: (x @ m.w).masked_fill(x > 0, 0.0),
        masked_in_place=lambda m, x: (x @ m.w).masked_fill_(torch.ones(6, 6).triu(1).bool(), -9.0).softmax(-1),
        set_by_mask=lambda m, x: torch.where(x > 0, x @ m.w, m.b),
        softmax=lambda m, x: (x @ m.w).softmax(-1),
        softmax_by_time=lambda m, x: (x @ m.w).log_softmax(1),
        normalised=lambda m, x: F.normalize(x @ m.w, dim=-1),
        layer_norm=lambda m, x: F.layer_norm(x @ m.w, (6,), m.b),
        layer_norm_of_two=lambda m, x: F.layer_norm(x @ m.w, (6, 6), m.w, m.w),
        rms_norm=lambda m, x: F.rms_norm(x @ m.w, (6,), m.b),
        group_norm=lambda m, x: F.group_norm(x @ m.w, 3, m.b, m.b),
        standardised=lambda m, x: (x @ m.w - x.mean(-1, keepdim=True)) / x.std(-1, keepdim=True),
        variance=lambda m, x: (x @ m.w).var((1, 2)),
        norm=lambda m, x: (x @ m.w).norm(dim=1),
        largest=lambda m, x: (x @ m.w).max(1).values,
        largest_of_two=lambda m, x: torch.max(x @ m.w, x),
        median=lambda m, x: (x @ m.w).median(-1).values,
        logsumexp=lambda m, x: (x @ m.w).logsumexp((1, 2)),
        cumulative=lambda m, x: (x @ m.w).cumsum(1),
        cumulative_largest=lambda m, x: (x @ m.w).cummax(1).values,
        sorted_by_width=lambda m, x: (x @ m.w).sort(-1, descending=True).values,
        top=lambda m, x: (x @ m.w).topk(2, 1).values,
        gated=lambda m, x: F.glu(x @ m.w, -1),
        flipped=lambda m, x: (x @ m.w).flip(1),
        rolled=lambda m, x: (x @ m.w).roll((1, 2), (1, 2)),
        padded=lambda m, x: F.pad(x @ m.w, (1, 0, 2, 3), value=1.5),
        causal=lambda m, x: (x @ m.w).tril(),
        diagonal=lambda m, x: (x @ m.w).diagonal(dim1=1, dim2=2),
        windows=lambda m, x: (x @ m.w).unfold(1, 3, 2),
        swapped=lambda m, x: (x @ m.w).mT,
        attention=lambda m, x: F.scaled_dot_product_attention(x @ m.w, x, x),
        attention_of_heads=lambda m, x: F.scaled_dot_product_attention(
            (x @ m.w).view(-1, 6, 2, 3).transpose(1, 2), *[x.view(-1, 6, 2, 3).transpose(1, 2)] * 2, is_causal=True
        ),
        conv=lambda m, x: F.conv1d(x, m.w[..., None], m.b),
        conv_of_images=lambda m, x: F.conv2d(x[:, None], m.w[:, None, None], m.b, padding=2),
        conv_transposed=lambda m, x: F.conv_transpose1d(x, m.w[..., None], m.b),
        pooled=lambda m, x: F.avg_pool2d((x @ m.w)[:, None], 2),
        pooled_largest=lambda m, x: F.max_pool2d((x @ m.w)[:, None], 2),
        pooled_along=lambda m, x: F.max_pool1d(x @ m.w, 2),
        pooled_to_one=lambda m, x: F.adaptive_avg_pool2d((x @ m.w)[:, None], 1).flatten(1),
        scaled_up=lambda m, x: F.interpolate((x @ m.w)[:, None], scale_factor=2, mode="bilinear"),
        scaled_up_nearest=lambda m, x: F.interpolate(x @ m.w, scale_factor=2),
        reflected=lambda m, x: F.pad(x @ m.w, (1, 2), mode="reflect"),
        sampled=lambda m, x: F.grid_sample((x @ m.w)[:, None], x[..., :2].unsqueeze(1).tanh(), align_corners=False),
        columns=lambda m, x: F.unfold((x @ m.w)[:, None], 3),
        shuffled=lambda m, x: F.pixel_unshuffle((x @ m.w)[:, None], 2),
        instance_norm=lambda m, x: F.instance_norm(x @ m.w, weight=m.b, bias=m.b),
        frozen_batch_norm=lambda m, x: F.batch_norm(x @ m.w, torch.zeros(6).double(), torch.ones(6).double(), m.b),
        inverse=lambda m, x: torch.linalg.inv(x @ m.w + 30 * torch.eye(6)),
        distances=lambda m, x: (x @ m.w)[:, :, None].sub(x[:, None]).square().sum(-1),
        fourier=lambda m, x: torch.fft.rfft(x @ m.w, dim=1).abs(),
        complex_numbers=lambda m, x: torch.view_as_real(torch.view_as_complex((x @ m.w).view(-1, 6, 3, 2)) ** 2),
        in_place=_in_place,
        filled=_filled,
        added_up=_added_up,
        recurrent=_recurrent,
        own_backward=lambda m, x: _Twice.apply(x @ m.w),
        checkpointed=_checkpointed,
        forces=_forces,
        total=lambda m, x: (x @ m.w).square().sum(),
        total_of_columns=lambda m, x: ((x @ m.w).sum((0, 1)) * m.b).sum() / 7,
        total_and_rows=lambda m, x: ((x @ m.w).square().sum(), x @ m.w),
        gram_of_rows=lambda m, x: ((x[:, 0] @ m.w).t() @ x[:, 1] * m.w).sum(),
        count=lambda m, x: (x @ m.w, (x > 0).sum()),
        mean_inside=lambda m, x: F.mse_loss(x @ m.w, x),
        mean_of_probabilities=lambda m, x: F.cross_entropy((x @ m.w)[:, 0], x[:, 1].softmax(-1), label_smoothing=0.1),
        mean_of_logits=lambda m, x: F.binary_cross_entropy_with_logits(x @ m.w, x.sigmoid(), pos_weight=m.plain + 2),
        mean_scaled_and_rows=lambda m, x: (F.huber_loss(x @ m.w, x) * 0.5, x @ m.w),
        constant_beside=lambda m, x: (x @ m.w, torch.ones(6)),
        same_twice=lambda m, x: (x @ m.w,) * 2,
        embedded=lambda m, x: F.embedding(x.argsort(-1), m.table),
        table_by_rows=lambda m, x: m.table[x.argsort(-1)[:, 0]],
        table_by_time=lambda m, x: x @ m.w + m.table[: x.shape[1]],
        one_hot=lambda m, x: F.one_hot(x.argmax(-1), 6).double() @ m.w,
        zeros=lambda m, x: x @ m.w + torch.zeros(x.shape[0], 1, 6).double(),
        bucketed=lambda m, x: m.table[torch.bucketize(x, torch.linspace(-1, 1, 5).double())],
        grad_scaled=lambda m, x: (x @ m.w).detach() + (x @ m.w),
        dropped=lambda m, x: F.dropout(x @ m.w, 0.5, m.training),
    ),
    **of(
        with_numbers,
        embedding=lambda m, x, n: F.embedding(n, m.table) + x,
        embedding_padded=lambda m, x, n: F.embedding(n, m.table, padding_idx=3) @ m.w,
        positions=lambda m, x, n: F.embedding(n, m.table) + m.table[torch.arange(n.shape[1])] + x,
        gathered_by_numbers=lambda m, x, n: (x @ m.w).gather(1, n[..., None].expand(-1, -1, 6)),
        mask_of_numbers=lambda m, x, n: (x @ m.w) * (n > 2)[..., None],
        masked_mean=lambda m, x, n: ((x @ m.w) * (n > 2)[..., None]).sum(1) / (n > 2).sum(1, keepdim=True).clamp_min(1),
        mask_for_attention=lambda m, x, n: F.scaled_dot_product_attention(x @ m.w, x, x, (n >= 0)[:, None]),
        last_of_each=lambda m, x, n: (x @ m.w)[row_numbers(x), (n > 2).sum(-1).clamp_max(5)],
        class_of_each_step=lambda m, x, n: F.cross_entropy((x @ m.w).flatten(0, 1), n.flatten()),
        class_by_dim=lambda m, x, n: F.cross_entropy((x @ m.w).transpose(1, 2), n, ignore_index=2),
        set_by_numbers=lambda m, x, n: (x @ m.w).index_put((row_numbers(x)[:, None], n), torch.ones(6).double()),
    ),
    **of(
        with_labels,
        classes=lambda m, x, y: F.cross_entropy((x @ m.w)[:, 0], y),
        classes_smoothed=lambda m, x, y: F.cross_entropy((x @ m.w)[:, 0], y, label_smoothing=0.1),
        classes_weighted=lambda m, x, y: F.cross_entropy((x @ m.w)[:, 0], y, m.plain + 2, label_smoothing=0.1),
        sum_of_classes=lambda m, x, y: F.cross_entropy((x @ m.w)[:, 0], y, reduction="sum"),
        loss_of_each=lambda m, x, y: F.cross_entropy((x @ m.w)[:, 0], y, reduction="none"),
    ),
    **of(
        with_square,
        square_mask=lambda m, x, t: (x @ m.w) * t,
        mask_of_scores=lambda m, x, t: ((x @ m.w) @ x.transpose(1, 2)).masked_fill(t > 0, -9.0).softmax(-1),
        square_may_be_rows=lambda m, x, t: x[:, 0] @ m.w * t,
        square_weight=lambda m, x, t: x @ m.w @ t,
    ),
}  # fmt: skip
