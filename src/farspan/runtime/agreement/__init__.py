"""What all ranks do alike, and how a difference between them is found and named."""

from farspan.runtime.agreement.agreement import Agreement as Agreement

__all__ = ["Agreement"]
