"""How far `planner.simulate` is from the step times that were measured, on the cases of `schedule_efficiency`.

The simulator is given the orders that ran, the times that the layers sleep, and nothing for messages and for the host.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT)]

from benchmarks.common import arguments, finish  # noqa: E402
from benchmarks.schedule_efficiency.run import add_arguments, collect  # noqa: E402

BAR = 0.05


def main() -> None:
    parser = arguments(__doc__)
    add_arguments(parser)
    parser.add_argument(
        "--rows",
        metavar="FILE",
        nargs="+",
        help="take what schedule_efficiency and slow_links have written by --json",
    )
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for file in args.rows or []:
        rows += json.loads(Path(file).read_text())["rows"]
    rows = rows or collect(args)
    print("case                                        simulated    measured   error")
    for row in rows:
        simulated = row.get("simulated_s", row.get("bound_s"))
        row["error"] = abs(simulated / row["farspan_s"] - 1)
        print(f"{case_of(row):42s}  {simulated:7.3f} s  {row['farspan_s']:8.3f} s  {100 * row['error']:5.1f} %")
    worst = max(row["error"] for row in rows)
    figure = f"step time, simulated against measured: {100 * worst:.1f} % off at most (bar {100 * BAR:.0f} %)"
    finish(args, rows=rows, figure=figure, holds=worst <= BAR)


def case_of(row: dict[str, Any]) -> str:
    """A row of `slow_links`, or of `schedule_efficiency`."""
    if "mib" in row:
        return f"4 hosts, messages of {row['mib']} MiB, {row['schedule']}"
    return f"{row['num_ranks']} x {row['num_micro_batches']}, {row['stages']}, {row['shape']}, {row['schedule']}"


if __name__ == "__main__":
    main()
