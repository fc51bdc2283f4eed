"""What a member of a split stage computes of an embedding, or of a loss over words, with its words alone.

    log sum_w exp(l_w)        = log sum over members exp(lse of its words)
    l_target                  = the sum over members of l_target where it is one of its words, 0 elsewhere

So losses need a number or three for each position of every member, and no member holds the logits. These functions are
recorded as one call each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

__all__ = ["LossTerms", "log_shares", "loss_of_terms", "rows_of", "terms_of_log_probabilities", "terms_of_logits"]

_LOW = (torch.float16, torch.bfloat16)


@dataclass(frozen=True, slots=True)
class LossTerms:
    """How a loss over words is asked for.

    Attributes:
        dim: Of the logits along which the words lie.
        num_words: How many there are.
        ignore_index: The target that counts for nothing.
        reduction: "mean", "sum" or "none".
        smoothing: Share of the target's probability that all words get.
        has_normalizer: Whether it is given logits, not log probabilities.
    """

    dim: int
    num_words: int
    ignore_index: int
    reduction: str
    smoothing: float
    has_normalizer: bool


def rows_of(ids: torch.Tensor, rows: torch.Tensor, begin: int, num_words: int, padding_idx: int | None) -> torch.Tensor:
    """Returns an embedding of the words among `rows`, and 0 for all others.

    Args:
        ids: Numbers of words.
        rows: A member's part of the table.
        begin: Its first word.
        num_words: Of the whole table.
        padding_idx: The word whose row gets no gradient.
    """
    _check_words(ids, num_words)
    local = ids - begin
    is_other = (local < 0) | (local >= rows.shape[0])
    own_padding = None if padding_idx is None else padding_idx - begin
    if own_padding is not None and not 0 <= own_padding < rows.shape[0]:
        own_padding = None
    return F.embedding(local.masked_fill(is_other, 0), rows, own_padding).masked_fill(is_other.unsqueeze(-1), 0)


def terms_of_logits(
    logits: torch.Tensor, target: torch.Tensor, weight: torch.Tensor | None, begin: int, terms: LossTerms
) -> tuple[torch.Tensor, ...]:
    """Returns of a member's words the logarithm of the sum of exponentials, the target's logit, and with smoothing the
    weighted sum of logits.

    Args:
        logits: Of these words.
        target: The number of a word for each position.
        weight: Of each word of all, or None.
        begin: The first of these words.
        terms: What the loss is.
    """
    logits = logits.float() if logits.dtype in _LOW else logits
    found = (torch.logsumexp(logits, terms.dim), _picked(logits, target, begin, terms))
    return (*found, _summed(logits, weight, begin, terms)) if terms.smoothing else found


def terms_of_log_probabilities(
    logits: torch.Tensor, target: torch.Tensor, weight: torch.Tensor | None, begin: int, terms: LossTerms
) -> tuple[torch.Tensor, ...]:
    """Returns of a member's words the target's log probability."""
    return (_picked(logits, target, begin, terms),)


def loss_of_terms(
    found: Sequence[Sequence[torch.Tensor]],
    target: torch.Tensor,
    weight: torch.Tensor | None,
    dtype: torch.dtype,
    terms: LossTerms,
) -> torch.Tensor:
    """Returns the loss of which members have found the terms, added up in their order.

    Args:
        found: What `terms_of_logits` or `terms_of_log_probabilities` gave each.
        target: The number of a word for each position.
        weight: Of each word, or None.
        dtype: Of the result.
        terms: What the loss is.
    """
    columns = list(zip(*found, strict=True))
    normalizer = torch.logsumexp(torch.stack(list(columns.pop(0))), 0) if terms.has_normalizer else None
    is_ignored = target == terms.ignore_index
    words = target.masked_fill(is_ignored, 0)
    _check_words(words, terms.num_words)
    log_probability = _added(columns[0])
    if normalizer is not None:
        log_probability = log_probability - normalizer
    of_target = None if weight is None else weight.to(log_probability.dtype)[words].masked_fill(is_ignored, 0)
    loss = -log_probability if of_target is None else -log_probability * of_target
    if terms.smoothing:
        assert normalizer is not None
        everything = float(terms.num_words) if weight is None else weight.to(normalizer.dtype).sum()
        smooth = (normalizer * everything - _added(columns[1])) / terms.num_words
        loss = (1 - terms.smoothing) * loss + terms.smoothing * smooth
    loss = loss.masked_fill(is_ignored, 0)
    if terms.reduction == "mean":
        count = (~is_ignored).sum() if of_target is None else of_target.sum()
        loss = loss.sum() / count
    elif terms.reduction == "sum":
        loss = loss.sum()
    return loss.to(dtype)


def log_shares(logits: torch.Tensor, normalizers: Sequence[torch.Tensor], dim: int, dtype: torch.dtype) -> torch.Tensor:
    """Returns the log probabilities of a member's words.

    Args:
        logits: Of these words.
        normalizers: Of every member the logarithm of its sum of exponentials.
        dim: Along which the words lie.
        dtype: Of the result.
    """
    logits = logits.float() if logits.dtype in _LOW else logits
    return (logits - torch.logsumexp(torch.stack(list(normalizers)), 0).unsqueeze(dim)).to(dtype)


def _added(items: Sequence[torch.Tensor]) -> torch.Tensor:
    total = items[0]
    for item in items[1:]:
        total = total + item
    return total


def _picked(logits: torch.Tensor, target: torch.Tensor, begin: int, terms: LossTerms) -> torch.Tensor:
    local = target - begin
    is_other = (local < 0) | (local >= logits.shape[terms.dim]) | (target == terms.ignore_index)
    picked = logits.gather(terms.dim, local.masked_fill(is_other, 0).unsqueeze(terms.dim))
    return picked.squeeze(terms.dim).masked_fill(is_other, 0)


def _summed(logits: torch.Tensor, weight: torch.Tensor | None, begin: int, terms: LossTerms) -> torch.Tensor:
    if weight is None:
        return logits.sum(terms.dim)
    shape = [1] * logits.dim()
    shape[terms.dim] = -1
    own = weight.to(logits.dtype).narrow(0, begin, logits.shape[terms.dim])
    return (logits * own.view(shape)).sum(terms.dim)


def _check_words(ids: torch.Tensor, num_words: int) -> None:
    """Raise torch's own error if some number is no word's; the table that is read takes no memory."""
    F.embedding(ids.detach(), torch.zeros(1, 1, device=ids.device).expand(num_words, 1))
