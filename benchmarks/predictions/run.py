"""What it takes to predict operations that are new, and a whole small program with them.

operations     functions of torch that a training loop calls, each time with a size that is new to the process,
               predicted as the recorder does it; and each alone on fake tensors, as torch itself would find it out.
three ranks    an MLP over three ranks that are threads of one process, three steps of four micro-batches with AdamW
               and the first step measured, all defaults; and the plain program. The first run of the process, which
               loads modules, is left out.

Compared is the time on the processor.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT)]
os.environ["FARSPAN_RECORD"] = "1"

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from benchmarks.common import arguments, finish  # noqa: E402
from tests.support.models import MLP  # noqa: E402
from tests.support.ranks import run_threads  # noqa: E402
from torch import Tensor  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402

import farspan  # noqa: E402
from farspan.call.infer import fallbacks  # noqa: E402
from farspan.call.infer.entry import meta_of  # noqa: E402
from farspan.call.modes import current_modes  # noqa: E402
from farspan.call.pytree.template import flatten_arguments, rebuild  # noqa: E402

OPERATION_BAR_MS = 1.0
PROGRAM_BAR_S = 0.6
DEPTH = 12
"""Calls of the program's between its first line and an operation."""


def plain(*shape: int) -> Tensor:
    return torch.randn(*shape)


def trained(*shape: int) -> Tensor:
    return torch.randn(*shape, requires_grad=True)


OPERATIONS: dict[str, Callable[[int], tuple[Any, ...]]] = {
    "add": lambda n: (torch.Tensor.add, trained(n, 12), trained(n, 12)),
    "div": lambda n: (torch.Tensor.div, plain(n, 12), plain(n, 12)),
    "add_ (an optimizer's)": lambda n: (torch.Tensor.add_, plain(n, 12), plain(n, 12)),
    "addcdiv_": lambda n: (torch.Tensor.addcdiv_, plain(n, 12), plain(n, 12), plain(n, 12)),
    "sqrt": lambda n: (torch.Tensor.sqrt, plain(n, 12)),
    "zeros_like": lambda n: (torch.zeros_like, plain(n, 12)),
    "relu": lambda n: (F.relu, trained(n, 12)),
    "gelu": lambda n: (F.gelu, trained(n, 12)),
    "matmul": lambda n: (torch.matmul, trained(n, 12), trained(12, 4)),
    "linear, three dimensions": lambda n: (F.linear, trained(2, n, 12), trained(4, 12), trained(4)),
    "view": lambda n: (torch.Tensor.view, trained(n, 12), n * 2, 6),
    "transpose": lambda n: (torch.Tensor.transpose, trained(n, 12), 0, 1),
    "a slice": lambda n: (torch.Tensor.__getitem__, trained(n, 12), (slice(None), 0)),
    "mean": lambda n: (torch.Tensor.mean, trained(n, 12)),
    "softmax": lambda n: (F.softmax, trained(n, 12), -1),
    "layer_norm": lambda n: (F.layer_norm, trained(n, 12), (12,), trained(12), trained(12)),
    "cross_entropy": lambda n: (F.cross_entropy, trained(n, 5), torch.zeros(n, dtype=torch.long)),
    "dropout": lambda n: (F.dropout, trained(n, 12), 0.1),
    "scaled_dot_product_attention": lambda n: (
        F.scaled_dot_product_attention,
        *(trained(2, 2, n, 8) for _ in range(3)),
    ),
}


def deeper(depth: int, run: Callable[[], None]) -> None:
    """Runs `run` below so many calls."""
    if depth:
        deeper(depth - 1, run)
    else:
        run()


def timed_ms(run: Callable[[], None], number: int) -> float:
    began = time.process_time()
    deeper(DEPTH, run)
    return 1e3 * (time.process_time() - began) / number


def operation_row(name: str, number: int) -> dict[str, Any]:
    """Milliseconds to predict an operation, and to run it on fakes, for so many sizes."""
    calls: list[tuple[Any, Any, Any, Any]] = []
    for size in range(3, number + 4):
        function, *args = OPERATIONS[name](size)
        template, tensors = flatten_arguments(tuple(args), {})
        calls.append((function, template, [meta_of(tensor) for tensor in tensors], current_modes()))

    def predict() -> None:
        for call in calls[1:]:
            fallbacks._find_out(*call, ())

    fallbacks._find_out(*calls[0], ())
    FakeTensorMode.cache_clear()
    predicted_ms = timed_ms(predict, number)
    FakeTensorMode.cache_clear()
    with FakeTensorMode():
        ready = []
        for function, template, metas, _ in calls:
            fakes = [
                torch.empty_strided(meta.shape, meta.stride, dtype=meta.dtype, requires_grad=meta.requires_grad)
                for meta in metas
            ]
            ready.append((function, rebuild(template, fakes)[0]))

        def run() -> None:
            for function, args in ready[1:]:
                function(*args)

        ready[0][0](*ready[0][1])
        FakeTensorMode.cache_clear()
        fake_ms = timed_ms(run, number)
    return {"what": name, "predicted_ms": round(predicted_ms, 3), "fake_ms": round(fake_ms, 3)}


def train(model: Any, x: Tensor, y: Tensor) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(3):
        optimizer.zero_grad()
        for shift in range(4):
            loss = F.cross_entropy(model(x + shift), y) / 4
            loss.backward()
        optimizer.step()
        loss.item()


def program_s(num_ranks: int) -> float:
    """Processor seconds of the program over so many ranks as threads; 0 for the plain one."""
    with tempfile.TemporaryDirectory() as cache:
        os.environ["XDG_CACHE_HOME"] = cache  # no plan is found that an earlier run has kept
        torch.manual_seed(0)
        state, x, y = MLP().state_dict(), torch.randn(6, 12), torch.randint(5, (6,))
        models = [MLP() for _ in range(max(1, num_ranks))]
        for model in models:
            model.load_state_dict(state)
        began = time.process_time()
        if num_ranks:
            run_threads(num_ranks, lambda rank: train(farspan.distribute(models[rank]), x, y))
        else:
            train(models[0], x, y)
        return time.process_time() - began


def main() -> None:
    parser = arguments(__doc__)
    args = parser.parse_args()
    torch.set_num_threads(1)
    number, turns = (40, 3) if args.quick else (200, 9)
    rows = [operation_row(name, number) for name in OPERATIONS]
    for row in rows:
        print(f"{row['what']:<30s} predicted {row['predicted_ms']:7.3f} ms   alone on fakes {row['fake_ms']:7.3f} ms")
    operation_ms = median(row["predicted_ms"] for row in rows)
    fake_ms = median(row["fake_ms"] for row in rows)
    num_below = sum(row["predicted_ms"] <= OPERATION_BAR_MS for row in rows)
    for num_ranks in (0, 3):
        program_s(num_ranks)
    found: dict[int, list[float]] = {0: [], 3: []}
    for _ in range(turns):
        for num_ranks, seconds in found.items():
            seconds.append(program_s(num_ranks))
    plain_s, ranks_s = median(found[0]), median(found[3])
    rows.append({"what": "an MLP, three steps", "plain_s": round(plain_s, 4), "three_ranks_s": round(ranks_s, 4)})
    print(f"an MLP, three steps: plain {plain_s:.4f} s, three ranks {ranks_s:.3f} s of processor")
    figure = (
        f"a new operation {operation_ms:.2f} ms (median; {num_below} of {len(OPERATIONS)} at most "
        f"{OPERATION_BAR_MS:g} ms; alone on fakes {fake_ms:.2f} ms), three ranks {ranks_s:.2f} s "
        f"(bars {OPERATION_BAR_MS:g} ms, {PROGRAM_BAR_S:g} s)"
    )
    finish(args, rows=rows, figure=figure, holds=operation_ms <= OPERATION_BAR_MS and ranks_s <= PROGRAM_BAR_S)


if __name__ == "__main__":
    main()
