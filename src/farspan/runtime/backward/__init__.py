"""Splitting a backward: input gradients now, for whoever waits for them; weight gradients when there is time."""

from farspan.runtime.backward.split import Deferred as Deferred
from farspan.runtime.backward.split import Split as Split
from farspan.runtime.backward.split import split_backward as split_backward

__all__ = ["Deferred", "Split", "split_backward"]
