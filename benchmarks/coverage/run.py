"""Model families under `farspan.distribute(model, stages=N)`, in N processes, against the plain loop in one.

For each family: find a tiny model that trains here in one process, the same way twice; train it in 2 and in 3
processes; compare; and let torch.distributed.pipelining.pipeline() split it. With --tensor K each stage is K processes
that run its layers together. A row is a JSON file in --out, so a run can be interrupted and taken up again, and several
drivers can share a folder.
"""

from __future__ import annotations

import fnmatch
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
STRIDE = 10
"""Families are taken in strides, for neighbours by name are alike: an early look at the rows sees all kinds."""

sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from benchmarks.common import arguments, finish  # noqa: E402
from benchmarks.coverage.forks import Ended, die_with_parent, run_forked, warm_up  # noqa: E402
from benchmarks.coverage.results import RIGHT, VERDICTS, Results, divided, report  # noqa: E402


def work(names: list[str], args: Any) -> None:
    """One worker: all families that nobody else has done or is doing."""
    results = Results(args.out)
    for name in names:
        columns = [column for column in args.columns if not _is_done(results.read(name, column), args)]
        if not columns or ((row := results.read(name, "local")) and "reason" in row and "local" not in columns):
            continue
        with results.claim(name) as is_mine:
            if is_mine:
                _work_on(name, columns, results, args)


def _is_done(row: dict[str, Any] | None, args: Any) -> bool:
    if row is None:
        return False
    if row["column"] == "local":
        return not (args.again and "reason" in row)
    return not args.again or row.get("verdict") in RIGHT or row["column"] == "torch"


def _work_on(name: str, columns: list[str], results: Results, args: Any) -> None:
    from benchmarks.coverage.case import prepare, run_rank, split_by_torch

    folder = tempfile.mkdtemp(prefix="coverage")
    began = time.monotonic()
    try:
        known = None if "local" in columns else (results.read(name, "local") or {}).get("recipe")
        entry = lambda: prepare(name, folder, known, with_noise=bool(args.tensor))  # noqa: E731
        (ended,) = run_forked([entry], timeout_s=args.timeout)
        prepared: dict[str, Any] = ended.result or {
            "reason": f"{'late' if ended.is_late else 'died'}: {_reason(ended)}"
        }
        if known is None or "recipe" in prepared:  # what has trained once and does not now is not taken off the count
            results.write(name, "local", {**prepared, "time_s": time.monotonic() - began})
        if "reason" in prepared:
            _say(name, "local", f"does not train: {prepared['reason']}")
            return
        if columns == ["local"]:
            _say(name, "local", prepared["recipe"]["class_name"])
        for column in columns:
            began = time.monotonic()
            if column == "torch":
                row = torch_verdict(run_forked([lambda: split_by_torch(name, prepared)], timeout_s=args.timeout)[0])
            elif column != "local":
                stages, tensor = divided(column)
                rank = lambda stages=stages, tensor=tensor: run_rank(name, prepared, stages, tensor, folder)  # noqa: E731
                row = verdict_of(run_forked([rank] * (stages * tensor), timeout_s=args.timeout, as_ranks=True))
            else:
                continue
            results.write(name, column, {**row, "time_s": time.monotonic() - began})
            _say(name, column, f"{row['verdict']} {row.get('cause', '')}")
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _say(name: str, column: str, text: str) -> None:
    print(f"{name:32s} {column:6s} {text}"[:200], flush=True)


def _reason(ended: Ended) -> str:
    if ended.failure:
        return f"{ended.failure['kind']}: {' '.join(ended.failure['lines'][:1])}"
    lines = ended.text.strip().splitlines()
    return lines[-1][:200] if lines else f"exit status {ended.code}"


def verdict_of(ranks: list[Ended]) -> dict[str, Any]:
    """One row of how the ranks of a case ended."""
    row: dict[str, Any] = {"num_late": sum(rank.is_late for rank in ranks), "codes": [rank.code for rank in ranks]}
    every = sorted((rank.failure for rank in ranks if rank.failure), key=lambda found: not found["remote_traceback"])
    failures = [failure for failure in every if not failure["is_remote"]] or every
    unnamed = [failure for failure in failures if failure["is_remote"] or not failure["is_named"]]
    died = [rank for rank in ranks if not rank.is_late and rank.code != 0 and rank.failure is None]
    if failures:
        first = (unnamed or failures)[0]
        row["verdict"] = "crash" if unnamed else "named error"
        row["cause"] = f"{first['kind']}: {' '.join(first['lines'][:1])}"
        row["failures"] = failures
    elif died:
        row["verdict"], row["cause"] = "crash", f"a rank ended with {died[0].code}"
        row["text"] = died[0].text
    elif row["num_late"]:
        row["verdict"], row["cause"] = "hang", f"{row['num_late']} of {len(ranks)} ranks did not end"
        row["text"] = [rank.text[-3000:] for rank in ranks]
    else:
        worst = max(
            (rank.result for rank in ranks),
            key=lambda result: (VERDICTS.index(result["verdict"]), result["difference"]),
        )
        row.update(worst)
        if worst["verdict"] == "wrong":
            row["cause"] = "; ".join(
                [*worst["complaints"], *(f"{key}: {text}" for key, text in worst["worst"].items())]
            )
    return row


def torch_verdict(ended: Ended) -> dict[str, Any]:
    if ended.result is not None:
        return {"verdict": "splits", "where": ended.result}
    return {"verdict": "late" if ended.is_late else "fails", "cause": _reason(ended), "failure": ended.failure}


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--out", default=str(ROOT / "build" / "coverage"), help="folder of the rows")
    parser.add_argument("--only", metavar="PATTERN", action="append", help="families whose name matches, as in a shell")
    parser.add_argument("--tenth", action="store_true", help="those of tenth.txt: quick ones of every kind")
    parser.add_argument("--sample", type=int, default=1, metavar="N", help="every Nth family by name")
    parser.add_argument("--stages", nargs="+", metavar="N", help="2 3; with --tensor 1 2")
    parser.add_argument("--tensor", type=int, metavar="K", help="processes that run each layer together")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--timeout", type=float, default=120.0, metavar="S", help="seconds for a case")
    parser.add_argument("--no-torch", action="store_true", help="without the column of torch's pipeline()")
    parser.add_argument("--list", action="store_true", help="only see which families train in one process")
    parser.add_argument("--again", action="store_true", help="do again what was not right")
    parser.add_argument("--report", action="store_true", help="only print what the rows say")
    parser.add_argument("--table", action="store_true", help="print a line for each family")
    args = parser.parse_args()
    args.stages = args.stages or (["1", "2"] if args.tensor else ["2", "3"])
    args.stages = [f"{number}x{args.tensor}" for number in args.stages] if args.tensor else args.stages
    if args.quick:
        args.sample, args.stages, args.no_torch = max(args.sample, 90), args.stages[:1], True
    args.columns = [] if args.list else [*args.stages, *([] if args.no_torch or args.tensor else ["torch"])]
    args.columns = ["local", *args.columns] if args.list or args.again else args.columns
    warm_up(with_farspan=not (args.list or args.report))
    from benchmarks.coverage.families import family_names

    names = sorted(family_names())
    if args.tenth:
        tenth = (Path(__file__).parent / "tenth.txt").read_text().split()
        unknown = sorted(set(tenth) - set(names))
        if unknown:
            raise SystemExit(f"tenth.txt names families that this transformers has not: {', '.join(unknown)}")
        names = tenth
    if args.only:
        names = [name for name in names if any(fnmatch.fnmatch(name, pattern) for pattern in args.only)]
    names = names[:: args.sample]
    if not args.report:
        _run_workers([name for start in range(STRIDE) for name in names[start::STRIDE]], args)
    figure, holds, rows = report(names, args)
    finish(args, rows=rows, figure=figure, holds=holds)


def _run_workers(names: list[str], args: Any) -> None:
    pids = []
    for _ in range(args.workers):
        pid = os.fork()
        if pid == 0:
            try:
                die_with_parent()
                work(names, args)
            finally:
                sys.stdout.flush()
                os._exit(0)
        pids.append(pid)
    for pid in pids:
        os.waitpid(pid, 0)


if __name__ == "__main__":
    main()
