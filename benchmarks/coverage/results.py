"""The rows of a run: one JSON file for each family and column, and what they say together."""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

__all__ = ["RIGHT", "VERDICTS", "Results", "divided", "report"]

RIGHT = ("bitwise", "close")
VERDICTS = (*RIGHT, "wrong", "named error", "crash", "hang")
MUST_NOT = ("wrong", "crash", "hang")
BAR_RIGHT, BAR_FAMILIES = 0.98, 140
"""Right for all but at most 2 %, which get an error that names what is not possible."""
BAR_SPLIT = 0.8
"""Of transformers' families with --tensor: at least one product is split by columns and the one behind it by rows."""


def divided(column: str) -> tuple[int, int]:
    """The number of stages of a column, and of the processes of each that run its layers together."""
    stages, _, tensor = column.partition("x")
    return int(stages), int(tensor or 1)


class Results:
    """Rows in a folder: FAMILY.COLUMN.json. A column is `local`, `torch`, a number of stages, or both axes (2x2)."""

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)

    def path(self, name: str, column: str) -> Path:
        return self.folder / f"{name}.{column}.json"

    def read(self, name: str, column: str) -> dict[str, Any] | None:
        try:
            return json.loads(self.path(name, column).read_text())
        except (OSError, ValueError):
            return None

    def write(self, name: str, column: str, row: dict[str, Any]) -> None:
        path = self.path(name, column)
        temporary = path.with_suffix(f".tmp{os.getpid()}")
        temporary.write_text(json.dumps({"family": name, "column": column, **row}, indent=1))
        os.replace(temporary, path)

    @contextlib.contextmanager
    def claim(self, name: str) -> Iterator[bool]:
        """Whether this process may work on a family; a claim whose owner has died is taken over."""
        path = self.folder / f"{name}.claim"
        for _ in range(2):
            try:
                claim = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY)
            except FileExistsError:
                if not self._is_dead(path):
                    yield False
                    return
                continue
            os.write(claim, str(os.getpid()).encode())
            os.close(claim)
            try:
                yield True
            finally:
                path.unlink(missing_ok=True)
            return
        yield False

    def _is_dead(self, path: Path) -> bool:
        """Move a dead owner's claim away; True if the claim is free now."""
        with contextlib.suppress(OSError, ValueError):
            owner = int(path.read_text())
            try:
                os.kill(owner, 0)
            except ProcessLookupError:
                aside = path.with_suffix(f".claim{os.getpid()}")
                os.rename(path, aside)
                if int(aside.read_text()) == owner:
                    aside.unlink()
                    return True
                os.rename(aside, path)  # another driver was faster
        return False


Rows = dict[tuple[str, str], dict[str, Any]]


def report(names: list[str], args: Any) -> tuple[str, bool, list[dict[str, Any]]]:
    """Print the tables, totals first; return the figure, whether the bar holds, and all rows."""
    results = Results(args.out)
    columns = [column for column in args.columns if column != "local"]
    rows = {
        (name, column): row for name in names for column in ("local", *columns) if (row := results.read(name, column))
    }
    local = [name for name in names if "recipe" in rows.get((name, "local"), {})]
    print(f"\n{len(local)} families train here in one process, of {sum(key[1] == 'local' for key in rows)} tried")
    rows = {(name, column): row for (name, column), row in rows.items() if column == "local" or name in set(local)}
    shares: list[float] = []
    shares_split: list[float] = []
    num_bad = 0
    for column in columns:
        verdicts = Counter(rows[name, column]["verdict"] for name in local if (name, column) in rows)
        label = "torch pipeline()" if column == "torch" else f"farspan, {column.replace('x', ' stages x tensor ')}"
        label = f"{label} stages" if column.isdigit() else label
        words = ", ".join(f"{number} {word}" for word, number in verdicts.most_common())
        print(f"{label:18s} {verdicts.total():4d}: {words}")
        if column != "torch" and verdicts:
            shares.append(sum(verdicts[word] for word in RIGHT) / verdicts.total())
            num_bad += sum(verdicts[word] for word in MUST_NOT)
        if "x" in column and verdicts:
            shares_split.append(_print_forms([rows[name, column] for name in local if (name, column) in rows]))
    _print_causes(rows, [column for column in columns if column != "torch"])
    if args.table:
        _print_table(names, rows, columns)
    share = min(shares, default=0.0)
    num_wanted = 1 if args.quick or args.only or args.sample > 1 else BAR_FAMILIES
    num_wanted = len(names) if args.tenth else num_wanted  # none of them may stop to train in one process
    bar_right = 1.0 if shares_split else BAR_RIGHT
    holds = share >= bar_right and len(local) >= num_wanted and not num_bad
    bar = f"bar {bar_right:.0%} of at least {num_wanted}, and 0"
    figure = f"{len(local)} families, {share:.1%} right, {num_bad} wrong, crashed or hung ({bar})"
    if shares_split:
        holds = holds and min(shares_split) >= BAR_SPLIT
        figure += f"; {min(shares_split):.0%} of transformers' families split (bar {BAR_SPLIT:.0%})"
    return figure, holds, list(rows.values())


def _print_forms(rows: list[dict[str, Any]]) -> float:
    """Print how the matrices of each family are split, and why some are whole; return the share of families split."""
    print(f"\n{'family':26s}{'columns':>8s}{'rows':>6s}{'whole':>6s}{'none':>6s}  whole: why (none: in no product)")
    num_split = num_counted = 0
    for row in rows:
        forms = row.get("forms", {})
        numbers = Counter(form for form, _ in forms.values())
        whys = Counter(why for form, why in forms.values() if form == "whole")
        reasons = "; ".join(f"{number} {why}" for why, number in whys.most_common())
        cells = f"{numbers['column']:8d}{numbers['row']:6d}{numbers['whole']:6d}{numbers['']:6d}"
        print(f"{row['family']:26s}{cells}  {reasons}")
        if not row["family"].startswith("torch."):
            num_counted += 1
            num_split += bool(numbers["column"] and numbers["row"])
    print(f"{num_split} of {num_counted} of transformers' families split\n")
    return num_split / num_counted if num_counted else 1.0


def _print_causes(rows: Rows, columns: list[str]) -> None:
    """What was not right, grouped by what was said: numbers and names in quotes left out."""
    groups: dict[tuple[str, str], list[str]] = {}
    for (name, column), row in rows.items():
        if column in columns and row["verdict"] not in RIGHT:
            cause = row.get("cause", "")
            general = "" if row["verdict"] == "wrong" else re.sub(r"\d+|'[^']*'|[\w.]*\.\d+[\w.]*", "#", cause)[:110]
            groups.setdefault((row["verdict"], general), []).append(f"{name}/{column}: {cause[:240]}")
    for (verdict, _), members in sorted(groups.items(), key=lambda item: -len(item[1])):
        print(f"\n{len(members)} x {verdict}: {members[0]}")
        others = [member.partition(":")[0] for member in members[1:]]
        if verdict == "wrong":
            print("\n".join(f"      {member}" for member in members[1:]))
        elif others:
            print("      also " + " ".join(others))


def _print_table(names: list[str], rows: Rows, columns: list[str]) -> None:
    print("\n" + f"{'family':36s}" + "".join(f"{column:14s}" for column in columns))
    for name in names:
        reason = rows.get((name, "local"), {}).get("reason")
        cells = [rows.get((name, column), {}).get("verdict", "-") for column in columns]
        text = f"does not train locally: {reason}"[:150] if reason else "".join(f"{cell:14s}" for cell in cells)
        print(f"{name:36s}{text}")
