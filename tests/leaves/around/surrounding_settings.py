"""What `surroundings.py` reads in another file."""

from torch import Tensor

RATE = 0.0
table = {"rate": 0.0}


def rate() -> float:
    return RATE + table["rate"]


def scaled(x: Tensor) -> Tensor:
    return x * (1 + rate())
