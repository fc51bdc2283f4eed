"""Compares the losses of two runs of the training scripts, bit for bit: exits with 1 if any differs.

python examples/compare_losses.py build/farspan.json build/plain.json
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

__all__ = ["compare", "main"]


def compare(farspan: list[float], plain: list[float]) -> tuple[str, bool]:
    """Returns a table of the steps that both have, and whether all are identical (and there are any).

    >>> print(compare([0.5, 0.25], [0.5])[0])
    step              farspan          one process  identical
       1                  0.5                  0.5  yes
    """
    rows = ["step              farspan          one process  identical"]
    identical = bool(farspan and plain)
    for step, (ours, theirs) in enumerate(zip(farspan, plain, strict=False), start=1):
        same = ours.hex() == theirs.hex()
        identical = identical and same
        rows.append(f"{step:4d}  {ours!r:>19}  {theirs!r:>19}  {'yes' if same else 'NO'}")
    return "\n".join(rows), identical


def main(farspan_file: str, plain_file: str) -> int:
    farspan, plain = (
        [float.fromhex(loss) for loss in json.loads(Path(file).read_text())] for file in (farspan_file, plain_file)
    )
    table, identical = compare(farspan, plain)
    print(table)
    if not identical:
        print("The losses differ.")
        return 1
    print("The losses are identical, to the last bit.")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
