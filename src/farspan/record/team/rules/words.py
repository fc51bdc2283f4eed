"""Embeddings and losses over the words of a vocabulary, of which each member of a split stage has some.

    logits   [batch, words], split along words     from a matrix that is split by columns, the head
    F.cross_entropy(logits, target)                each member: two numbers for each row, of which the loss is made
    F.log_softmax(logits, -1)                      each member: its words' numbers, with the sums of all
    F.embedding(ids, table)                        where asked: each member its words' rows, added up

A head of which the logits are taken so stays split. Whatever else reads them gets them gathered.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from farspan.record.team.parts.shares import extent_of
from farspan.record.team.rules.protocol import Rules
from farspan.record.team.rules.word_parts import (
    LossTerms,
    log_shares,
    loss_of_terms,
    rows_of,
    terms_of_log_probabilities,
    terms_of_logits,
)
from farspan.record.team.team_tensor import TeamTensor, used

__all__ = ["RULES"]


def cross_entropy(
    splitting: Rules,
    input: Any,
    target: Any,
    weight: Any = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Any:
    """Record `F.cross_entropy` on logits that are split by words; NotImplemented where they are not."""
    is_plain = size_average is None and reduce is None
    terms = _terms(splitting, input, target, ignore_index, reduction, label_smoothing, has_normalizer=True)
    if terms is None or not is_plain or not _is_given(weight):
        return NotImplemented
    splitting.matrices.note_vocabulary(input._weights)
    return _loss(splitting, terms_of_logits, input, target, weight, terms)


def nll_loss(
    splitting: Rules,
    input: Any,
    target: Any,
    weight: Any = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
) -> Any:
    """Record `F.nll_loss` on log probabilities that are split by words; NotImplemented where they are not."""
    is_plain = size_average is None and reduce is None
    terms = _terms(splitting, input, target, ignore_index, reduction, 0.0, has_normalizer=False)
    if terms is None or not is_plain or not _is_given(weight):
        return NotImplemented
    splitting.matrices.note_vocabulary(input._weights)
    return _loss(splitting, terms_of_log_probabilities, input, target, weight, terms)


def log_softmax(splitting: Rules, input: Any, dim: Any = None, *more: Any, dtype: Any = None, **others: Any) -> Any:
    """Record `F.log_softmax` along words; NotImplemented along anything else."""
    del others, more
    if not _is_by_words(splitting, input) or type(dim) is not int or dim % input.dim() != input._dim:
        return NotImplemented
    split, at = input._split, input._dim
    made = dtype or (torch.float32 if torch.is_autocast_enabled(input.device.type) else input.dtype)
    parts = used(input)._parts
    stages = split.members
    normalizers = [splitting.record(_normalizer, (part, at), stage) for part, stage in zip(parts, stages, strict=True)]
    found = [
        splitting.record(log_shares, (part, normalizers, at, made), stage)
        for part, stage in zip(parts, stages, strict=True)
    ]
    return TeamTensor.of(splitting, split, found, at, input._weights)


def embedding(
    splitting: Rules,
    input: Any,
    weight: Any,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Any:
    """Record `F.embedding` of a table that is asked to be split by words; NotImplemented for any other."""
    del norm_type
    matrices, split = splitting.matrices, splitting.current
    view = matrices.view_of(weight)
    if view is None or split is None or not view.is_all or len(view.placed.meta.shape) != 2:
        return NotImplemented
    name = view.placed.name
    if matrices.asked.get(name) != "vocab" or name in matrices.kept_whole:
        return NotImplemented
    if max_norm is not None or scale_grad_by_freq or sparse:
        matrices.cannot(name, "its rows are scaled, or their gradient is, by what all ranks look up")
        return NotImplemented
    ids = input.join() if type(input) is TeamTensor else input
    num_words, num_parts = view.placed.meta.shape[0], len(split.members)
    padding_idx = padding_idx + num_words if padding_idx is not None and padding_idx < 0 else padding_idx
    matrices.note_vocabulary([name])
    terms = [
        splitting.record(
            rows_of,
            (ids, matrices.share_of(view, 0, member, split), extent_of(num_words, member, num_parts)[0], num_words),
            stage,
            {"padding_idx": padding_idx},
        )
        for member, stage in enumerate(split.members)
    ]
    return matrices.added_up(terms, split)


def _terms(
    splitting: Rules,
    input: Any,
    target: Any,
    ignore_index: int,
    reduction: str,
    smoothing: float,
    *,
    has_normalizer: bool,
) -> LossTerms | None:
    """Returns what a loss is; None where the members cannot find it with their words alone."""
    if not _is_by_words(splitting, input) or reduction not in ("mean", "sum", "none"):
        return None
    dim = 1 if input.dim() > 1 else 0
    is_class = isinstance(target, torch.Tensor) and not target.dtype.is_floating_point
    shape = [size for number, size in enumerate(input.shape) if number != dim]
    if input._dim != dim or not is_class or list(target.shape) != shape or not 0.0 <= smoothing <= 1.0:
        return None
    return LossTerms(dim, input.shape[dim], ignore_index, reduction, smoothing, has_normalizer)


def _is_by_words(splitting: Rules, item: Any) -> bool:
    is_split = type(item) is TeamTensor and item._dim is not None and item._sections == 1
    return is_split and item.dtype.is_floating_point and splitting.matrices.are_vocabularies(item._weights)


def _is_given(weight: Any) -> bool:
    """Returns whether weights of words are none, or plain numbers."""
    return weight is None or (isinstance(weight, torch.Tensor) and not weight.requires_grad)


def _loss(splitting: Rules, function: Any, logits: TeamTensor, target: Any, weight: Any, terms: LossTerms) -> Any:
    split, num_parts = logits._split, len(logits._parts)
    target, weight = [item.join() if type(item) is TeamTensor else item for item in (target, weight)]
    found: list[Any] = []
    for member, (part, stage) in enumerate(zip(used(logits)._parts, split.members, strict=True)):
        begin, _ = extent_of(terms.num_words, member, num_parts)
        found.append(splitting.record(function, (part, target, weight, begin, terms), stage))
    is_raised = torch.is_autocast_enabled(logits.device.type)
    dtype = torch.float32 if is_raised and logits.dtype in (torch.float16, torch.bfloat16) else logits.dtype
    return splitting.record(loss_of_terms, (found, target, weight, dtype, terms), split.home)


def _normalizer(logits: torch.Tensor, dim: int) -> torch.Tensor:
    return torch.logsumexp(logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits, dim)


RULES: dict[Any, Any] = {
    F.cross_entropy: cross_entropy,
    F.nll_loss: nll_loss,
    F.log_softmax: log_softmax,
    torch.log_softmax: log_softmax,
    torch.Tensor.log_softmax: log_softmax,
    F.embedding: embedding,
}
"""By function, how members of a split stage do it with their words."""
