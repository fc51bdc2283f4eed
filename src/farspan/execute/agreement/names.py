"""Classes that one rank's text names: all ranks have them, or all raise the same error.

    every rank   has the text    names it does not know  --gather-->  the same RecordError on all, or none

Only the first time that a name occurs: what all have once, all keep.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from farspan.call.wire.decoder import unknown_class
from farspan.call.wire.structure import names_in, unknown_names
from farspan.execute.agreement.agreement import Agreement

if TYPE_CHECKING:
    from farspan.call.leaf import Target

__all__ = ["agree_on_names"]


def agree_on_names(agreement: Agreement, text: bytes, target: Target | None = None) -> None:
    """Raise if some rank does not know a class that `text` names; all ranks call it together.

    Args:
        agreement: Of this rank.
        text: Of a batch, or of what a call gives; the same on every rank.
        target: What is called.

    Raises:
        RecordError: The same on every rank.
    """
    names = [name for name in names_in(text) if name not in agreement.names]
    if not names:
        return
    blobs = agreement.gather("classes that a rank names", json.dumps(unknown_names(names, target)).encode())
    unknown = [name for name in names if any(json.dumps(name).encode() in blob for blob in blobs)]
    if unknown:
        ranks = [rank for rank, blob in enumerate(blobs) if json.dumps(unknown[0]).encode() in blob]
        listed = ", ".join(map(str, ranks))
        raise unknown_class(unknown[0], f"rank {listed}" if len(ranks) == 1 else f"ranks {listed}")
    agreement.names.update(names)
