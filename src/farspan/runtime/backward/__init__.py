"""Splitting a backward: input gradients now, for whoever waits for them; weight gradients when there is time."""

from farspan.runtime.backward.split import Deferred as Deferred
from farspan.runtime.backward.split import backward_of_inputs as backward_of_inputs

__all__ = ["Deferred", "backward_of_inputs"]
