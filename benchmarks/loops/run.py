"""Small training programs in the shape of well-known public ones: plainly, and with one line over 2 and 3 processes.

Each program of examples/loops is run as it is, and then with the line that stands in it as a comment. Printed lines,
losses and final weights are compared on every rank, to the last bit.
"""

from __future__ import annotations

import fnmatch
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from benchmarks.common import arguments, finish  # noqa: E402
from benchmarks.loops.programs import added_line, compare, names, run_program  # noqa: E402

NUM_RANKS = (2, 3)
QUICK = ("super_resolution", "word_lstm")


def measure(name: str, num_ranks: tuple[int, ...], timeout_s: float) -> dict[str, Any]:
    """One row of the table."""
    plain = run_program(name, None, timeout_s=timeout_s)
    row: dict[str, Any] = {"program": name, "line": added_line(name), "plain_s": plain.time_s, "error": plain.error}
    for number in num_ranks:
        got = run_program(name, number, timeout_s=timeout_s)
        verdict, difference = compare(plain, got, num_lines=len(plain.text.splitlines()))
        row[str(number)] = {"verdict": verdict, "difference": difference, "time_s": got.time_s}
    return row


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--only", metavar="PATTERN", action="append", help="programs whose name matches, as in a shell")
    parser.add_argument("--ranks", nargs="+", type=int, default=list(NUM_RANKS), metavar="N")
    parser.add_argument("--timeout", type=float, default=120.0, metavar="S", help="seconds for a run")
    args = parser.parse_args()
    num_ranks = (2,) if args.quick else tuple(args.ranks)
    patterns = args.only or (QUICK if args.quick else ["*"])
    chosen = [name for name in names() if any(fnmatch.fnmatch(name, pattern) for pattern in patterns)]
    heads = "".join(f"{f'{number} ranks':<16s}" for number in num_ranks)
    print(f"{'program':<18s}{'plain s':<9s}{heads}the line")
    rows = []
    for name in chosen:
        row = measure(name, num_ranks, args.timeout)
        rows.append(row)
        verdicts = "".join(f"{row[str(number)]['verdict']:<16s}" for number in num_ranks)
        print(f"{name:<18s}{row['plain_s']:<9.1f}{verdicts}{row['line']}", flush=True)
    equal = [sum(row[str(number)]["verdict"] == "bitwise" for row in rows) for number in num_ranks]
    parts = ", ".join(f"{count} over {number} ranks" for count, number in zip(equal, num_ranks, strict=True))
    finish(
        args,
        rows=rows,
        figure=f"bitwise equal, of {len(rows)} programs: {parts}",
        holds=bool(rows) and all(count == len(rows) for count in equal),
    )


if __name__ == "__main__":
    main()
