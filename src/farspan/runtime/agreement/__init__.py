"""What all ranks do alike, and how a difference between them is found and named."""

from farspan.runtime.agreement.agreement import Agreement as Agreement
from farspan.runtime.agreement.names import agree_on_names as agree_on_names

__all__ = ["Agreement", "agree_on_names"]
