"""Mutants: planted faults, and the tests that notice them. The quick tier of tests is chosen by what it notices.

plant    copies the repository, with faults that can be switched on one at a time
map      runs all tests of the copy without a fault: what each takes, and what it reaches
select   chooses the quick tier, and writes tests/left_to_test_all.txt
hunt     runs for each fault the tests that reach it, those of the quick tier first, until one fails
report   counts what the quick tier notices of what all tests notice
quick    all of these with few faults, over the tests of two rooms
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT)]

from benchmarks.common import finish  # noqa: E402
from benchmarks.mutants.choose import LeftOut, choose, left_out_lines, write_list  # noqa: E402
from benchmarks.mutants.hunt import hunt, read_hunt, tests_of  # noqa: E402
from benchmarks.mutants.plant import plant, points_of  # noqa: E402
from benchmarks.mutants.suite import map_tests, read_rows, refresh_tool  # noqa: E402

BAR = 0.05
LIST = ROOT / "tests" / "left_to_test_all.txt"
QUICK_PATHS = ["tests/schedule", "tests/plan"]
QUICK_FAULTS = 25
KINDS = ("quick", "only all", "nothing", "not reached", "at import", "not known")


def run_plant(args: argparse.Namespace) -> None:
    """Copies the repository, with faults that can be switched on one at a time."""
    points = plant(ROOT, args.folder / "tree", num_faults=args.faults, seed=args.seed, blocks=args.blocks)
    for file in (*args.folder.glob("map*"), *args.folder.glob("hunt*")):
        file.unlink()  # of other faults
    counts = Counter(point.rule for point in points)
    for rule, count in counts.most_common():
        print(f"{count:6d}  {rule}")
    print(f"{len(points) - counts['block']} faults and {counts['block']} blocks in {args.folder / 'tree'}")


def run_map(args: argparse.Namespace) -> None:
    """Runs all tests without a fault: what each takes, and what it reaches."""
    tree = args.folder / "tree"
    refresh_tool(ROOT, tree)
    map_tests(tree, args.folder, args.paths or ["tests"], num_workers=args.workers, num_files=args.files)
    found = read_rows(args.folder)
    outcomes = Counter(test.outcome for test in found.tests.values())
    for test in found.tests.values():
        if test.outcome in ("failed", "died"):
            print(f"{test.outcome}: {test.name}")
    total_s = sum(test.cpu_s for test in (*found.tests.values(), *found.shared.values()))
    print(f"{len(found.tests)} tests ({', '.join(f'{n} {name}' for name, n in outcomes.items())}), {total_s:.0f} s")


def run_select(args: argparse.Namespace) -> None:
    """Chooses the quick tier, and writes the list of the other tests."""
    points, tests = points_of(args.folder / "tree"), read_rows(args.folder)
    blocks = sum(1 << point.number for point in points if point.rule == "block")
    hunted = read_hunt(args.folder)
    witnesses = {fault: found.noticed_by for fault, found in hunted.items() if not (args.half and fault % 2)}
    choice = choose(tests, witnesses, blocks, limit_s=args.limit_s)
    passed = [name for name, test in tests.tests.items() if test.outcome == "passed"]
    lines = left_out_lines(passed, set(choice.chosen))
    write_list(args.list, lines)
    for point in points:
        if point.number in choice.unnoticed:
            print(f"noticed by none of them: {point.file}:{point.line}, {point.rule}")
    print(f"{choice.num_blocks} of {choice.num_blocks_of_all} blocks that a test reaches")
    print(f"{len(choice.chosen)} of {len(passed)} tests, {choice.cost_s:.0f} s; {len(lines)} lines in {args.list}")


def run_hunt(args: argparse.Namespace) -> None:
    """Runs for each fault the tests that reach it until one fails."""
    refresh_tool(ROOT, args.folder / "tree")
    code = hunt(
        args.folder / "tree",
        args.folder,
        LeftOut.read(args.list),
        num_workers=args.workers,
        budget_s=args.budget_s,
        quick_budget_s=args.quick_budget_s,
        is_all=args.all,
        is_again=args.again,
        only=args.only,
    )
    if code:
        sys.exit(f"pytest ended with {code}: see {args.folder / 'hunt.log'}; a second call goes on")


def judged(args: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each fault: what notices it."""
    left_out, tests, found = LeftOut.read(args.list), read_rows(args.folder), read_hunt(args.folder)
    rows: list[dict[str, Any]] = []
    for point in points_of(args.folder / "tree"):
        if point.rule == "block" or (args.half and not point.number % 2):
            continue
        each = found.get(point.number)
        noticed_by = each.noticed_by if each else []
        if any(name not in left_out for name in noticed_by):
            kind = "quick"
        elif noticed_by:
            kind = "only all"
        elif not tests_of(point, tests):
            kind = "at import" if tests.collected >> point.number & 1 else "not reached"
        elif each is None or each.is_capped or each.unsure:
            kind = "not known"
        else:
            kind = "nothing"
        rows.append({**asdict(point), "kind": kind, "noticed_by": noticed_by})
    return rows


def run_report(args: argparse.Namespace) -> None:
    """Counts what the quick tier notices of what all tests notice."""
    rows = judged(args)
    for kind in KINDS[1:]:
        chosen = [row for row in rows if row["kind"] == kind]
        if chosen:
            print(f"{'noticed by ' if kind in ('only all', 'nothing') else ''}{kind}:")
        for row in chosen:
            print(f"  {row['file']}:{row['line']}  {row['rule']}: {row['change']}")
            for name in row["noticed_by"]:
                print(f"      {name}")
    for field in ("room", "rule"):
        print(f"\n{field:<24s}" + "".join(f"{kind:>12s}" for kind in KINDS))
        for value in sorted({row[field] for row in rows}):
            counts = Counter(row["kind"] for row in rows if row[field] == value)
            print(f"{value:<24s}" + "".join(f"{counts[kind]:12d}" for kind in KINDS))
    counts = Counter(row["kind"] for row in rows)
    print(f"{'all':<24s}" + "".join(f"{counts[kind]:12d}" for kind in KINDS))
    num_noticed = counts["quick"] + counts["only all"]
    share = counts["only all"] / num_noticed if num_noticed else 1.0
    figure = f"{share:.1%} of {num_noticed} faults that tests notice are not noticed by the quick tier (bar {BAR:.0%})"
    finish(args, rows=rows, figure=figure, holds=share <= BAR)


def run_quick(args: argparse.Namespace) -> None:
    """All of these with few faults, over the tests of two rooms."""
    args.folder.mkdir(parents=True, exist_ok=True)
    args.faults, args.blocks, args.paths, args.files = QUICK_FAULTS, True, QUICK_PATHS, 4
    args.limit_s, args.list = 10.0, args.folder / "left_to_test_all.txt"
    args.budget_s, args.quick_budget_s, args.all, args.again, args.only = 20.0, 20.0, False, False, []
    args.check, args.json, args.half = False, None, False
    for command in (run_plant, run_map, run_select, run_hunt, run_select, run_report):
        command(args)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    common: dict[str, Any] = {"formatter_class": argparse.ArgumentDefaultsHelpFormatter}
    main_parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = main_parser.add_subparsers(required=True)

    def command(name: str, act: Callable[[argparse.Namespace], None]) -> argparse.ArgumentParser:
        made = commands.add_parser(name, help=act.__doc__, **common)
        made.set_defaults(act=act)
        made.add_argument("--folder", type=Path, default=Path("/tmp/mutants"), help="of the copy, and of all rows")
        return made

    planting = command("plant", run_plant)
    planting.add_argument("--faults", type=int, default=400, metavar="N", help="how many; three in each room at least")
    planting.add_argument("--seed", type=int, default=0, help="of the draw")
    planting.add_argument("--blocks", action=argparse.BooleanOptionalAction, default=True, help="probe each block")
    mapping = command("map", run_map)
    mapping.add_argument("paths", nargs="*", help="files and folders of tests; all without")
    mapping.add_argument("--files", type=int, default=25, metavar="N", help="that one process runs")
    hunting = command("hunt", run_hunt)
    hunting.add_argument("--budget-s", type=float, default=240.0, help="for tests outside the quick tier, a fault")
    hunting.add_argument("--quick-budget-s", type=float, default=1e9, help="for those of the quick tier, a fault")
    hunting.add_argument("--all", action="store_true", help="go on after the first test that notices a fault")
    hunting.add_argument("--again", action="store_true", help="what the quick tier is not known to notice, once more")
    hunting.add_argument("--only", type=int, nargs="*", default=[], metavar="NUMBER", help="these faults alone")
    for each in (mapping, hunting):
        each.add_argument("--workers", type=int, default=2, metavar="N", help="processes at a time")
    selecting = command("select", run_select)
    selecting.add_argument("--limit-s", type=float, default=420.0, help="processor seconds of the quick tier")
    quick = command("quick", run_quick)
    quick.set_defaults(folder=Path("/tmp/mutants_quick"), seed=0, workers=2)
    reporting = command("report", run_report)
    reporting.add_argument("--check", action="store_true", help="exit 0 only where the claim's bar holds")
    reporting.add_argument("--json", metavar="FILE", help="write all rows")
    for each in (selecting, reporting):
        each.add_argument("--half", action="store_true", help="choose by faults of even numbers; report the others")
    for each in (hunting, selecting, reporting):
        each.add_argument("--list", type=Path, default=LIST, help="of the tests that are not in the quick tier")
    return main_parser


def main() -> None:
    args = parser().parse_args()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # what it has started ends, too
    args.folder = args.folder.resolve()
    args.folder.mkdir(parents=True, exist_ok=True)
    args.act(args)


if __name__ == "__main__":
    main()
