"""Adapts trainers of other packages to the fact that this is one process, in which rank 0 writes.

They wrap models in DDP and shard data because launch variables are there. One file for each package; nothing of a
package is imported unless the program imports it.
"""

from farspan.adapters.adapt import adapt_trainers as adapt_trainers

__all__ = ["adapt_trainers"]
