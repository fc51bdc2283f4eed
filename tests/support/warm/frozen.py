"""Imported after all that tests need of torch: the collector of garbage does not look at it again.

Each full collection of a process took a quarter of a second for what never goes away, a tenth of the processor time of
all tests; and a forked process had to copy each page that the collector wrote into.
"""

from __future__ import annotations

import gc

__all__: list[str] = []

gc.freeze()
