"""Bubble rates of the zero-bubble paper (P. Qi et al., 2023, arXiv 2401.10241, table 5), from its measured times.

1F1B, ZB-H1    the named schedules, simulated: the same figures as printed?
ZB-1p, ZB-2p   our automatic schedules with the same memory, p and 2p times M_B: at least as short as printed?
bound          what no schedule of one stage per rank can go below (README.md proves it)
ZB-V           two stages per rank, down and up, with the memory of ZB-1p. The paper has no figure; without a bar.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT)]

from benchmarks.bubble_rates.schedules import (  # noqa: E402
    Costs,
    interleaved,
    looped,
    one_f_one_b,
    straight,
    vee,
    zb_1p,
    zb_2p,
    zb_h1,
    zb_v,
)
from benchmarks.common import arguments, finish, published  # noqa: E402

from farspan.planner import own_links, simulate  # noqa: E402
from farspan.schedule import Schedule  # noqa: E402

EXACT_BAR = 1e-4
QUICK_MICRO_BATCHES = 48
PAPER_ROUNDS = 3
"""Stages per rank of the paper's interleaved 1F1B: 24 and 48 layers (embedding and head count as one) on 8 and 16."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One line of the table; times in ms, memory in M_B: what the forward of a stage keeps."""

    model: str
    num_ranks: int
    num_micro_batches: int
    forward: float
    backward: float
    weight: float
    latency: float
    weight_memory: float
    printed: dict[str, float]

    @classmethod
    def of(cls, row: dict[str, str]) -> Case:
        hidden, heads, sequence = (int(row[name]) for name in ("hidden", "heads", "seq"))
        return cls(
            model=row["model"],
            num_ranks=int(row["p"]),
            num_micro_batches=int(row["m"]),
            forward=float(row["T_F_ms"]),
            backward=float(row["T_B_ms"]),
            weight=float(row["T_W_ms"]),
            latency=float(row["T_comm_ms"]),
            weight_memory=32 / (34 + 5 * heads * sequence / hidden),  # M_W / M_B, section 2.3 there
            printed={name.removeprefix("bubble_"): float(row[name]) for name in row if name.startswith("bubble_")},
        )

    def costs(self, *, share: float = 1.0, is_split: bool = True) -> Costs:
        """Of a stage that is this share of a rank's."""
        if not is_split:
            return Costs(forward=share * self.forward, backward=share * (self.backward + self.weight), memory=share)
        return Costs(
            forward=share * self.forward,
            backward=share * self.backward,
            weight=share * self.weight,
            memory=share,
            weight_memory=share * self.weight_memory,
        )

    def bound(self, memory: float) -> float:
        """A bubble rate that no schedule goes below, if rank 0 holds at most `memory`; README.md proves it."""
        assert self.num_micro_batches > memory
        hops = (self.num_ranks - 1) * (self.forward + self.backward + 2 * self.latency)
        work = self.num_micro_batches * (self.forward + self.backward + self.weight)
        through = hops + self.num_micro_batches * (self.forward + self.backward) + self.weight
        before = hops + self.forward - int(memory) * self.forward
        after = hops - (memory - 1) * max(self.backward + self.weight, self.weight / self.weight_memory)
        return 1 - work / max(through, work + max(before, 0.0) + max(after, 0.0))


def measure(case: Case) -> dict[str, Any]:
    p, m, latency = case.num_ranks, case.num_micro_batches, case.latency
    split, half, loop = case.costs(), case.costs(share=0.5), case.costs(share=1 / PAPER_ROUNDS, is_split=False)
    chain = straight(p, m, split)
    row: dict[str, Any] = {"model": case.model, "num_ranks": p, "num_micro_batches": m, "printed": case.printed}
    rates: dict[str, float] = {}
    memory: dict[str, float] = {}
    seconds: dict[str, float] = {}

    def add(name: str, build: Any) -> None:
        began = time.perf_counter()
        schedule: Schedule = build()
        seconds[name] = time.perf_counter() - began
        simulated = simulate(schedule, link_of=own_links(latency=latency))
        rates[name] = simulated.bubble_rate
        memory[name] = max(map(simulated.peak_memory, range(p)))

    add("1F1B", lambda: one_f_one_b(straight(p, m, case.costs(is_split=False))))
    add("1F1B-I", lambda: interleaved(looped(p, PAPER_ROUNDS, m, loop)))
    add("ZB-H1", lambda: zb_h1(chain))
    add("ZB-1p", lambda: zb_1p(chain, latency=latency))
    add("ZB-2p", lambda: zb_2p(chain, latency=latency))
    add("ZB-V", lambda: zb_v(vee(p, m, half)))
    bounds = {"ZB-1p": case.bound(p), "ZB-2p": case.bound(2 * p)}
    row |= {"rates": rates, "memory": memory, "seconds": seconds, "bounds": bounds}
    row["holds"] = {
        "1F1B": abs(rates["1F1B"] - case.printed["1F1B"]) <= EXACT_BAR,
        "ZB-H1": abs(rates["ZB-H1"] - case.printed["ZB-H1"]) <= EXACT_BAR,
        "ZB-1p": round(rates["ZB-1p"], 4) <= case.printed["ZB-1p"] and memory["ZB-1p"] <= p + 1e-6,
        "ZB-2p": round(rates["ZB-2p"], 4) <= case.printed["ZB-2p"] and memory["ZB-2p"] <= 2 * p + 1e-6,
    }
    return row


def show(row: dict[str, Any]) -> None:
    rates, printed, bounds, memory = row["rates"], row["printed"], row["bounds"], row["memory"]
    print(f"\n{row['model']} on {row['num_ranks']} ranks, {row['num_micro_batches']} micro-batches")
    print("            ours   printed   bound    memory / M_B   found in")
    for name, rate in rates.items():
        there = f"{printed[name]:.4f}" if name in printed else "     -"
        bound = f"{bounds[name]:.4f}" if name in bounds else "     -"
        verdict = {True: "", False: "   DOES NOT HOLD", None: "   (no bar)"}[row["holds"].get(name)]
        took = f"{row['seconds'][name]:5.1f} s"
        print(f"  {name:7s} {rate:.4f}    {there}  {bound}     {memory[name]:11.1f}    {took}{verdict}")


def main() -> None:
    args = arguments(__doc__).parse_args()
    cases = [Case.of(row) for row in published("zero_bubble_tables.csv")]
    rows: list[dict[str, Any]] = []
    for case in cases:
        if not args.quick or case.num_micro_batches <= QUICK_MICRO_BATCHES:
            rows.append(measure(case))
            show(rows[-1])
    worst = max(abs(row["rates"][name] - row["printed"][name]) for row in rows for name in ("1F1B", "ZB-H1"))
    gains = [
        round(row["printed"][name] - round(row["rates"][name], 4), 4) for row in rows for name in ("ZB-1p", "ZB-2p")
    ]
    print()
    finish(
        args,
        rows=rows,
        figure=f"1F1B and ZB-H1 within {worst:.1e} of {2 * len(rows)} printed figures (bar {EXACT_BAR:.0e}); at "
        f"the same memory our bubble is {min(gains):.4f} to {max(gains):.4f} less than that of ZB-1p and ZB-2p (bar 0)",
        holds=all(all(row["holds"].values()) for row in rows),
    )


if __name__ == "__main__":
    main()
