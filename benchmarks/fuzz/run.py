"""Draws training programs, runs each plainly and on ranks, and shrinks each that differs to a file that runs alone.

A program is a function of the seed and its number alone. Two worker processes keep torch and farspan loaded; ranks are
threads of a worker. Compared on every rank, bit for bit: what the loop records, the final weights, what modules keep,
random generators, printed lines; up to rounding, against float64, where batches or layers are split.
"""

from __future__ import annotations

import dataclasses
import json
import math
import multiprocessing
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from benchmarks.common import arguments, finish  # noqa: E402
from benchmarks.fuzz.program import Drawn, Way, in_words, standalone  # noqa: E402
from benchmarks.fuzz.ranks import serve  # noqa: E402
from benchmarks.fuzz.shrink import MOST_TRIES, features_of, fitting, same_kind, shrink, without  # noqa: E402

NUM_WORKERS = 2
TASK_S = 600.0
RECYCLED_AFTER = 400
NUM_REPEATS = 4
MOST_HANGS = 10
MOST_KNOWN = 4
MOST_NAMED = 0.03
FINDINGS = ("wrong", "printed", "unnamed", "crash", "hang")


@dataclasses.dataclass
class Finding:
    """A difference made small."""

    kind: str
    text: str
    number: int
    features: set[str]
    file: str = ""
    programs: list[int] = dataclasses.field(default_factory=list)


class Worker:
    """A process that runs programs, and its successors."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.process: Any = None
        self.count = 0

    def ask(self, *task: Any) -> dict[str, Any]:
        """The answer to a task; where the process dies or stands still, an outcome that says so."""
        if self.process is None or self.count >= RECYCLED_AFTER:
            self.stop()
            context = multiprocessing.get_context("spawn")
            self.connection, other = context.Pipe()
            self.process = context.Process(target=serve, args=(other, self.folder))
            self.process.start()
            other.close()
            self.count = 0
        self.count += 1
        self.connection.send(task)
        try:
            if self.connection.poll(TASK_S):
                answer = self.connection.recv()
                if any(one["kind"] in ("hang", "slow") for one in answer.get("outcomes", [])):
                    self.stop()
                return answer
            gone = {"kind": "hang", "text": f"no answer after {TASK_S:g} s"}
        except EOFError:
            self.process.join()
            gone = {"kind": "crash", "text": f"the worker ended with {self.process.exitcode}"}
        self.stop()
        return {"outcomes": [gone], "drawn": None, "cpu_s": 0.0}

    def stop(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.join()
        self.process = None


class Search:
    """Programs that are run, and what was found."""

    def __init__(self, seed: int, out: Path | None, *, is_shrunk: bool = True) -> None:
        self.seed, self.out, self.is_shrunk = seed, out, is_shrunk
        self.rows: list[dict[str, Any]] = []
        self.findings: list[Finding] = []
        self.lock = threading.Lock()
        self.known_file = out / "known.json" if out else None
        if self.known_file and self.known_file.exists():
            for one in json.loads(self.known_file.read_text()):
                self.findings.append(Finding(**{**one, "features": {*one["features"]}}))

    def run(self, numbers: list[int], num_workers: int = NUM_WORKERS, within_s: float = math.inf) -> None:
        """Runs programs, and begins none once `within_s` is over."""
        waiting, until_s = iter(numbers), time.monotonic() + within_s
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:

            def work() -> None:
                worker = Worker(folder)
                try:
                    while (number := self._next(waiting, until_s)) is not None:
                        self._run_one(worker, number)
                except BaseException:
                    traceback.print_exc()
                    raise
                finally:
                    worker.stop()

            threads = [threading.Thread(target=work) for _ in range(num_workers)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()

    def _next(self, waiting: Any, until_s: float) -> int | None:
        with self.lock:
            return next(waiting, None) if time.monotonic() < until_s else None

    def _run_one(self, worker: Worker, number: int) -> None:
        began = time.monotonic()
        answer = worker.ask("run", self.seed, number)
        if "failed" in answer:
            raise RuntimeError(f"program {number}: {answer['failed']}")
        drawn = answer["drawn"] or {"ways": []}
        ways = [in_words(way) for way in drawn["ways"]] or ["no worker was left to say how"]
        outcomes = [{**one, "way": way} for one, way in zip(answer["outcomes"], ways, strict=False)]
        row = {"number": number, "cpu_s": answer["cpu_s"], "wall_s": time.monotonic() - began, "outcomes": outcomes}
        with self.lock:
            self.rows.append(row)
            if len(self.rows) % 50 == 0:
                print(f"{len(self.rows)} programs", flush=True)
        for one in outcomes:
            if one["kind"] != "equal":
                print(f"{number:5d}  {one['kind']:8s} {one['way']}: {one['text'][:150]}", flush=True)
        for one, way in zip(answer["outcomes"], drawn["ways"], strict=False):
            if one["kind"] in FINDINGS and self.is_shrunk:
                self._look_into(worker, number, drawn, way, one)

    def _look_into(self, worker: Worker, number: int, drawn: Drawn, way: Way, outcome: dict[str, str]) -> None:
        """Shrinks a finding, unless a known one explains it; then the program without that is tried once more."""
        for _ in range(MOST_KNOWN):
            known = self._known(drawn, way, outcome)
            if known is None:
                self._shrink(worker, number, drawn, way, outcome)
                return
            known.programs.append(number)
            cleaned = without(drawn, known.features)
            if cleaned is None:
                return
            drawn, way = cleaned, fitting(way, cleaned["model"])
            found = worker.ask("try", drawn, [way]).get("outcomes")
            if not found or found[0]["kind"] not in FINDINGS:
                return
            outcome = found[0]

    def _shrink(self, worker: Worker, number: int, drawn: Drawn, way: Way, outcome: dict[str, str]) -> None:
        def stays(other: Drawn, other_way: Way) -> bool:
            found = worker.ask("try", other, [other_way]).get("outcomes")
            return bool(found) and _are_alike(found[0], outcome)

        small, small_way = shrink(drawn, way, stays, MOST_HANGS if outcome["kind"] == "hang" else MOST_TRIES)
        again = [worker.ask("try", small, [small_way]).get("outcomes") for _ in range(NUM_REPEATS)]
        kept = [one[0] for one in again if one and one[0]["kind"] == outcome["kind"]]
        features = features_of(small, small_way)
        text = kept[0]["text"] if kept else outcome["text"]
        finding = Finding(kind=outcome["kind"], text=text, number=number, features=features, programs=[number])
        with self.lock:
            self.findings.append(finding)
        print(f"       -> {finding.kind}: {sorted(features)}: {text[:150]}", flush=True)
        if self.out is not None:
            self._write(worker, finding, small, small_way, f"{len(kept)} of {NUM_REPEATS} runs")

    def _write(self, worker: Worker, finding: Finding, small: Drawn, way: Way, often: str) -> None:
        """Writes the file of a finding, with whether it is one where ranks are processes, and its line in INDEX.md."""
        assert self.out is not None and self.known_file is not None
        self.out.mkdir(parents=True, exist_ok=True)
        features = sorted(finding.features)
        words = [name.split()[-1] for name in features if name.split()[0] in ("block", "feature", "loop")]
        finding.file = f"{finding.kind}_{finding.number}_{'_'.join(words[:3]) or 'plain'}.py"
        file = self.out / finding.file
        head = (
            f"Program {finding.number} of seed {self.seed}, made small: {finding.kind} in {often}.\n\n{finding.text}\n"
        )
        head += f"what it has: {', '.join(features)}\n"
        file.write_text(standalone(small, way, head))
        confirmed = worker.ask("confirm", str(file), way["ranks"]).get("confirmed", "not tried")
        file.write_text(standalone(small, way, head + confirmed))
        with self.lock:
            with (self.out / "INDEX.md").open("a") as index:
                line = f"{finding.kind}, {', '.join(features)} ({often}; {confirmed}): {finding.text[:200]}"
                index.write(f"- {finding.file}: {line}\n")
            known = [{**dataclasses.asdict(one), "features": sorted(one.features)} for one in self.findings]
            self.known_file.write_text(json.dumps(known, indent=1))

    def _known(self, drawn: Drawn, way: Way, outcome: dict[str, str]) -> Finding | None:
        """A finding that is all in this program, and ended alike."""
        has = features_of(drawn, way)
        with self.lock:
            for finding in self.findings:
                if finding.features <= has and _are_alike(dataclasses.asdict(finding), outcome):
                    return finding
        return None


def _are_alike(one: dict[str, Any], other: dict[str, Any]) -> bool:
    if one["kind"] != other["kind"] or one["kind"] in ("wrong", "printed"):
        return one["kind"] == other["kind"]
    return same_kind(one["text"]) == same_kind(other["text"])


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--programs", type=int, default=500, metavar="N")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--first", type=int, default=0, help="the number of the first program")
    parser.add_argument("--only", type=int, action="append", metavar="NUMBER", help="these programs")
    parser.add_argument("--out", type=Path, metavar="DIR", help="where findings are written")
    parser.add_argument("--seconds", type=float, default=math.inf, help="no program begins later than that")
    parser.add_argument("--workers", type=int, default=NUM_WORKERS)
    parser.add_argument("--no-shrink", action="store_true", help="count only")
    args = parser.parse_args()
    number = 40 if args.quick else args.programs
    began = time.monotonic()
    search = Search(args.seed, args.out, is_shrunk=not (args.no_shrink or args.quick))
    search.run(args.only or list(range(args.first, args.first + number)), args.workers, args.seconds)
    rows = sorted(search.rows, key=lambda row: row["number"])
    counts = Counter(outcome["kind"] for row in rows for outcome in row["outcomes"])
    runs = sum(counts.values())
    cpu_s = sum(row["cpu_s"] for row in rows)
    wall_s = time.monotonic() - began
    print(f"{len(rows)} programs, {runs} runs in {wall_s:.0f} s; {cpu_s:.0f} s of processor without shrinking")
    for finding in search.findings:
        print(f"{finding.kind:8s} {len(finding.programs):4d} x, first {finding.number}: {sorted(finding.features)}")
    bad = sum(counts[kind] for kind in FINDINGS)
    parts = ", ".join(f"{counts[kind]} {kind}" for kind in FINDINGS)
    finish(
        args,
        rows=[*rows, *({**dataclasses.asdict(one), "features": sorted(one.features)} for one in search.findings)],
        figure=f"of {runs} runs of {len(rows)} drawn programs {counts['equal']} are equal to one process, {bad} differ "
        f"({parts}), {counts['error']} end in errors that limits name",
        holds=bad == 0 and counts["error"] <= MOST_NAMED * len(rows),
    )


if __name__ == "__main__":
    main()
