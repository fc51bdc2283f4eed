"""Predicted against published step times, by a model and by the product; the order of AMP's trials.

The data is read from BENCHMARK_DATA. README.md says what is fitted, on which rows, and what is assumed.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parents[2]), str(Path(__file__).parent)]

from benchmarks.bubble_rates.schedules import Costs, one_f_one_b, straight  # noqa: E402
from benchmarks.common import arguments, finish, published  # noqa: E402
from families import Row, all_rows, hop_s, later_megatron_rows, stage_times, zero_bubble_s  # noqa: E402
from fitting import fit, median_error  # noqa: E402
from product import check_product  # noqa: E402
from ranking import rank_mixed, rank_trials  # noqa: E402
from transformer import Fitted  # noqa: E402

from farspan.planner import own_links, simulate  # noqa: E402

MEDIAN_BAR, RANK_BAR, MIXED_BAR = 0.10, 0.95, 0.70
RANGES = {  # low, start, high
    "peak_share": (0.3, 0.7, 1.0),
    "half_size": (1.0, 300.0, 2000.0),
    "flops_per_watt": (0.5e12, 1.4e12, 2e12),
    "fused_attention_share": (0.1, 0.5, 1.5),
    "float8_gain": (1.0, 1.6, 2.0),
    "memory_share": (0.2, 0.6, 1.0),
    "link_share": (0.1, 0.7, 1.0),
    "overlap": (0.05, 0.5, 1.0),
}
HOPPER = {"flops_per_watt": math.inf, "fused_attention_share": 1.0, "float8_gain": 2.0, "overlap": 1.0}
"""What only torchtitan's rows tell; the data sheets' values, for where none of them may be seen."""
SPLITS = 4


def main() -> None:
    args = arguments(__doc__).parse_args()
    rows = all_rows()
    families = list(dict.fromkeys(row.family for row in rows))
    training = [row for row in rows if row.is_training]
    held_out = [row for row in rows if not row.is_training]
    fitted = fit_rows(training)
    print("fitted on", len(training), "rows:", ", ".join(f"{name} {getattr(fitted, name):.3g}" for name in RANGES))
    report = [show(row, fitted) for row in rows]
    medians = by_table(held_out, fitted)
    print(f"held out: {len(held_out)} rows, {_percents(medians)}")
    later = list(later_megatron_rows())
    report += [show(row, fitted) for row in later]
    print(f"Megatron 2022 (no bar): {len(later)} rows, {error(later, fitted):.1%}")
    report += check_zero_bubble(fitted)
    if not args.quick:
        report += leave_one_out(rows, families)
        report += other_splits(rows)
    product = check_product(report, is_quick=args.quick)
    ranks, mixed = rank_trials(fitted, report), rank_mixed(fitted, report)
    holds = all(median <= MEDIAN_BAR for median in (*medians.values(), *product.values()))
    holds = holds and min(ranks) >= RANK_BAR and mixed >= MIXED_BAR
    figure = (
        f"median error of {len(held_out)} rows held out: {_percents(medians)} (bar {MEDIAN_BAR:.0%} each); "
        f"of farspan plan --roofline, nothing fitted: {_percents(product)} (same bar); "
        f"Spearman of AMP's held out homogeneous trials {min(ranks):.3f} or more (bar {RANK_BAR}), "
        f"of its mixed ones, nothing fitted, {mixed:.3f} (bar {MIXED_BAR})"
    )
    finish(args, rows=report, figure=figure, holds=holds)


def fit_rows(rows: Sequence[Row], fixed: dict[str, float] | None = None) -> Fitted:
    """All parameters but the `fixed` ones, to these rows."""
    fixed = fixed or {}
    found = fit(
        lambda free: [row.predict(Fitted(**fixed, **free)) for row in rows],
        [row.measured_s for row in rows],
        {name: values for name, values in RANGES.items() if name not in fixed},
    )
    return Fitted(**fixed, **found)


def error(rows: Sequence[Row], fitted: Fitted) -> float:
    return median_error([row.predict(fitted) for row in rows], [row.measured_s for row in rows])


def by_table(rows: Sequence[Row], fitted: Fitted) -> dict[str, float]:
    families = dict.fromkeys(row.family for row in rows)
    return {"all": error(rows, fitted)} | {family: error(of_family(rows, family), fitted) for family in families}


def _percents(medians: dict[str, float]) -> str:
    return ", ".join(f"{name} {value:.1%}" for name, value in medians.items())


def of_family(rows: Iterable[Row], family: str) -> list[Row]:
    return [row for row in rows if row.family == family]


def show(row: Row, fitted: Fitted) -> dict[str, Any]:
    predicted = row.predict(fitted)
    part = "fitted" if row.is_training else "held out"
    off = predicted / row.measured_s - 1
    print(f"{row.family:12} {row.name:72} {row.measured_s:8.3f} s {predicted:8.3f} s {off:+7.1%}  {part}", flush=True)
    return {
        "family": row.family,
        "name": row.name,
        "measured_s": row.measured_s,
        "predicted_s": predicted,
        "part": part,
    }


def other_splits(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Fitted on every fourth row: does the figure hang on which rows are fitted to?"""
    found: list[dict[str, Any]] = []
    for number in range(SPLITS):
        fitted = fit_rows(rows[number::SPLITS])
        tested = [row for index, row in enumerate(rows) if index % SPLITS != number]
        medians = by_table(tested, fitted)
        found.append({"split": number, "rows": len(tested), "median_errors": medians})
        print(f"fitted on row {number} of each {SPLITS}: {len(tested)} others, {_percents(medians)}", flush=True)
    return found


def leave_one_out(rows: Sequence[Row], families: Sequence[str]) -> list[dict[str, Any]]:
    """Each table predicted from the others alone."""
    found: list[dict[str, Any]] = []

    def add(name: str, fitted: Fitted, tested: Sequence[Row]) -> None:
        found.append({"left_out": name, "rows": len(tested), "median_error": error(tested, fitted)})
        print(f"left out: {name}: {len(tested)} rows, {found[-1]['median_error']:.1%}", flush=True)

    for family in families:
        others, tested = [row for row in rows if row.family != family], of_family(rows, family)
        fitted = fit_rows(others, HOPPER if family == "torchtitan" else None)
        add(family, fitted, tested)
        if family == "torchtitan":
            shared = {name: getattr(fitted, name) for name in RANGES if name not in HOPPER}
            fitted = fit_rows([row for row in tested if row.is_training], shared)
            tested = [row for row in tested if not row.is_training]
            add(f"{family}, but for its own {len(HOPPER)} parameters", fitted, tested)
    return found


def check_zero_bubble(fitted: Fitted) -> list[dict[str, Any]]:
    """The formula of 1F1B against the simulator; the stage times; and the table against itself."""
    found: list[dict[str, Any]] = []
    for row in published("zero_bubble_tables.csv"):
        p, m = int(row["p"]), int(row["m"])
        printed = [float(row[name]) / 1e3 for name in ("T_F_ms", "T_B_ms", "T_W_ms")]
        stage = stage_times(row, fitted)
        costs = Costs(forward=stage.forward, backward=stage.backward + stage.weight)
        simulated = simulate(one_f_one_b(straight(p, m, costs)), link_of=own_links(latency=hop_s(row, fitted)))
        measured = m * int(row["microbatch"]) / p / float(row["samples_per_gpu_s_1F1B"])
        found.append(
            {
                "model": row["model"],
                "m": m,
                "simulated_over_formula": simulated.step_time / zero_bubble_s(row, "1F1B", fitted),
                "stage_errors": [
                    ours / theirs - 1
                    for ours, theirs in zip((stage.forward, stage.backward, stage.weight), printed, strict=True)
                ],
                "measured_over_printed_stages": measured * (1 - float(row["bubble_1F1B"])) / (m * sum(printed)),
            }
        )
        last = found[-1]
        print(
            f"{row['model']:6} m={m:3}: simulated 1F1B / formula {last['simulated_over_formula']:.4f}; T_F, T_B, T_W "
            + ", ".join(f"{value:+.1%}" for value in last["stage_errors"])
            + f"; measured 1F1B / the table's own stage times {last['measured_over_printed_stages']:.3f}"
        )
    return found


if __name__ == "__main__":
    main()
