"""What running a backward takes besides autograd: catching what leaves a segment; splitting it into input gradients
now, for whoever waits for them, and weight gradients when there is time.
"""

from farspan.runtime.backward.caught import caught_at as caught_at
from farspan.runtime.backward.split import Deferred as Deferred
from farspan.runtime.backward.split import Split as Split
from farspan.runtime.backward.split import split_backward as split_backward

__all__ = ["Deferred", "Split", "caught_at", "split_backward"]
