"""Plain loops cut into micro-batches by farspan: gradients as with the whole batch, or a reason to leave it whole.

Each model of `models.py` takes two steps over two ranks with micro_batches=4, beside the plain model in every rank.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT)]

from benchmarks.common import arguments, finish, run_ranks  # noqa: E402
from benchmarks.lanes import programs  # noqa: E402
from benchmarks.lanes.models import CASES  # noqa: E402

import farspan  # noqa: E402
from farspan.errors import FarspanError  # noqa: E402
from farspan.execute.process.world import current_engine  # noqa: E402

BAR, BAR_OF_LOSSES = 1e-5, 1e-4
ROUNDINGS = 4
"""How many units in the last place a program may be off that computes with less precision, by autocast."""
NUM_STEPS = 2


def gradients(model: nn.Module, step: Any) -> tuple[list[float], list[Any]]:
    """Losses and gradients of two backwards that add up; the gradients as plain tensors."""
    losses: list[float] = []
    for _ in range(NUM_STEPS):
        loss = step(model)
        loss.backward()
        losses.append(loss.item())
    found: list[Any] = [None if item.grad is None else item.grad.detach().clone() for item in model.parameters()]
    return losses, [item if item is None or type(item) is torch.Tensor else item.read() for item in found]


def measured(name: str, num_lanes: int) -> dict[str, Any]:
    """One model: how far its gradients are from the whole batch's, and why it has stayed whole, if it has."""
    torch.manual_seed(0)
    model, step = CASES[name]()
    model.train()
    plain = copy.deepcopy(model)
    row: dict[str, Any] = {"name": name, "is_cut": False, "reason": "", "error": "", "difference": 0.0}
    expected_losses, expected = gradients(plain, step)
    farspan.distribute(model, measure=False, micro_batches=num_lanes)
    engine = current_engine()
    assert engine is not None
    try:
        losses, found = gradients(model, step)
    except FarspanError as error:
        return {**row, "error": f"{type(error).__name__}: {error.what}"}
    except Exception as error:  # torch's own, on every rank alike
        return {**row, "error": f"{type(error).__name__}: {error}", "is_unforeseen": True}
    batched = engine.recorder.batches.models[id(model)]
    row["is_cut"], row["reason"] = batched.is_cut, "; ".join(batched.reasons)
    pairs: list[tuple[Any, Any]] = [
        (a, b) for a, b in zip(expected, found, strict=True) if a is not None or b is not None
    ]
    if any(a is None or b is None for a, b in pairs):
        return {**row, "difference": float("inf")}
    size = max([float(a.norm()) for a, _ in pairs], default=1.0) or 1.0
    row["difference"] = max([float((a - b).norm()) / size for a, b in pairs], default=0.0)
    row["loss_difference"] = max(abs(a - b) / max(abs(a), 1e-12) for a, b in zip(expected_losses, losses, strict=True))
    return row


def worker(args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    names = args.only or list(CASES)
    rows: list[dict[str, Any]] = []
    for name in names:
        print(name, file=sys.stderr, flush=True)
        rows.append(measured(name, args.lanes))
    if farspan.rank() == 0:
        Path(args.worker).write_text(json.dumps(rows))


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--only", nargs="*", help="these models")
    parser.add_argument("--lanes", type=int, default=4)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--programs", action="store_true", help="the programs of loops and programs, too: ten minutes")
    args = parser.parse_args()
    if args.worker:
        worker(args)
        return
    words = ["--lanes", str(args.lanes), *(["--only", *args.only] if args.only else [])]
    rows = run_ranks(__file__, args.ranks, words, timeout_s=900) if not args.programs or args.only is None else []
    figure, wrong = shown("models", rows)
    if args.programs:
        others = [name for name in programs.names() if args.only is None or name in args.only]
        found = [programs.measured(name, args.lanes, 120.0) for name in others]
        second, more = shown("programs", found)
        figure, wrong, rows = f"{figure}; {second}", wrong + more, rows + found
    finish(args, rows=rows, figure=figure, holds=wrong == 0)


def shown(what: str, rows: list[dict[str, Any]]) -> tuple[str, int]:
    """Print a table; its sum, and how many are wrong."""
    wrong = 0
    for row in rows:
        bar = max(BAR, ROUNDINGS * row.get("precision", 0.0)) if not row.get("is_random") else float("inf")
        is_wrong = row.get("is_unforeseen") or (
            not row["error"] and not (row["difference"] <= bar and row.get("loss_difference", 0.0) <= BAR_OF_LOSSES)
        )
        wrong += is_wrong
        said = row["error"] or row["reason"] or ("draws: not compared" if row.get("is_random") else "")
        verdict = (
            "WRONG"
            if is_wrong
            else "skipped"
            if row.get("is_plain_error")
            else "error"
            if row["error"]
            else "cut"
            if row["is_cut"]
            else "whole"
        )
        print(f"{row['name']:36s} {verdict:7s} {row['difference']:9.1e}  {said}")
    num_cut, num_skipped = sum(row["is_cut"] for row in rows), sum(bool(row.get("is_plain_error")) for row in rows)
    num_errors = sum(bool(row["error"]) for row in rows) - num_skipped
    num_whole = len(rows) - num_cut - num_errors - num_skipped
    figure = f"{len(rows) - num_skipped} {what}: {num_cut} cut, {num_whole} whole, {num_errors} refused, {wrong} wrong"
    return figure + (f" ({num_skipped} skipped: they do not run plainly here)" if num_skipped else ""), wrong


if __name__ == "__main__":
    main()
