"""`python -m farspan`, the same as the command `farspan`."""

from __future__ import annotations

import sys

from farspan.cli.main import main

__all__: list[str] = []

if __name__ == "__main__":
    sys.exit(main())
