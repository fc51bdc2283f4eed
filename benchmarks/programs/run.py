"""Programs of every kind in the shape of well-known public ones: plainly, and with one line over 2 and 3 processes.

Each program of scripts/ is run as it is, and then with the line that stands in it as a comment, in fresh folders.
Every printed line, every written file, the final weights and the generators at the end are compared, to the last bit.
"""

from __future__ import annotations

import fnmatch
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from benchmarks.common import arguments, finish  # noqa: E402
from benchmarks.programs.programs import (  # noqa: E402
    added_line,
    differences,
    missing_packages,
    names,
    run_and_compare,
    run_program,
)

NUM_RANKS = (2, 3)
NUM_PROGRAMS = 40
QUICK = ("reptile", "save_whole_model", "wgan_clip")


def measure(name: str, num_ranks: tuple[int, ...], timeout_s: float) -> dict[str, Any]:
    """One row of the table: the plain run, and what differs from it."""
    with TemporaryDirectory() as folder:
        plain = run_program(name, None, Path(folder, "plain"), timeout_s=timeout_s, hash_seed="0")
        row: dict[str, Any] = {"program": name, "line": added_line(name), "plain_s": plain.time_s, "error": plain.error}
        row["files"] = sum(file.is_file() for file in plain.folder.rglob("*"))
        row["lines"] = len(plain.text.splitlines())
        for number in num_ranks:
            if number == 0:  # the plain program once more: whether it is the same at all
                again = run_program(name, None, Path(folder, "again"), timeout_s=timeout_s, hash_seed="1")
                found, time_s = differences(plain, again), again.time_s
            else:
                found, time_s = run_and_compare(name, number, plain, timeout_s=timeout_s)
            row[str(number)] = {"bitwise": not found, "differences": found, "time_s": time_s}
    return row


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--only", metavar="PATTERN", action="append", help="programs whose name matches, as in a shell")
    parser.add_argument(
        "--ranks", nargs="+", type=int, default=list(NUM_RANKS), metavar="N", help="0 runs it plainly a second time"
    )
    parser.add_argument("--timeout", type=float, default=120.0, metavar="S", help="seconds for a run")
    args = parser.parse_args()
    num_ranks = (2,) if args.quick else tuple(args.ranks)
    patterns = args.only or (QUICK if args.quick else ["*"])
    chosen = [name for name in names() if any(fnmatch.fnmatch(name, pattern) for pattern in patterns)]
    print(
        f"{'program':<28s}{'plain s':<9s}{'lines':<7s}{'files':<7s}"
        + "".join(f"{n} ranks".ljust(12) for n in num_ranks)
    )
    rows, skipped = [], []
    for name in chosen:
        if missing := missing_packages(name):
            skipped.append(name)
            print(
                f"{name:<28s}SKIPPED, does not count: needs {', '.join(missing)} (make programs-packages)", flush=True
            )
            continue
        row = measure(name, num_ranks, args.timeout)
        rows.append(row)
        verdicts = "".join(("bitwise" if row[str(n)]["bitwise"] else "DIFFERS").ljust(12) for n in num_ranks)
        print(f"{name:<28s}{row['plain_s']:<9.1f}{row['lines']:<7d}{row['files']:<7d}{verdicts}", flush=True)
        for number in num_ranks:
            for difference in row[str(number)]["differences"][:6]:
                print(f"    {number} ranks  {difference}", flush=True)
    equal = [sum(row[str(number)]["bitwise"] for row in rows) for number in num_ranks]
    parts = ", ".join(f"{count} over {number} ranks" for count, number in zip(equal, num_ranks, strict=True))
    enough = len(rows) >= (1 if args.only or args.quick else NUM_PROGRAMS)
    finish(
        args,
        rows=rows,
        figure=f"bitwise equal, of {len(rows)} programs ({len(skipped)} skipped): {parts}",
        holds=enough and all(count == len(rows) for count in equal),
    )


if __name__ == "__main__":
    main()
