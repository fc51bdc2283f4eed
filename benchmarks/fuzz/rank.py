"""One rank that is a process: runs the program of a file, and prints what it has seen."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from benchmarks.fuzz.compare import observed  # noqa: E402
from benchmarks.fuzz.ways import module_of, printing  # noqa: E402

import farspan  # noqa: E402


def main() -> None:
    os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp()
    out = sys.stdout
    file, way = Path(sys.argv[1]), json.loads(sys.argv[2])
    module = module_of(file.read_text(), file.stem, write=False)()
    with printing().kept() as printed:
        model = farspan.distribute(module.build(), **way["options"])
        found = observed(module.train, model, printed)
    print(json.dumps(dataclasses.asdict(found)), file=out)


main()
