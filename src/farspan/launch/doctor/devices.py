"""Lists the GPUs that torch can use, as a line of JSON: a program of its own, for it imports torch."""

from __future__ import annotations

import json
import sys

__all__ = ["main"]


def main() -> int:
    """Writes the devices, and why there are none, to standard output."""
    import torch

    why = ""
    devices: list[dict[str, object]] = []
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            free, total = torch.cuda.mem_get_info(index)
            devices.append({"name": torch.cuda.get_device_name(index), "memory_bytes": total, "free_bytes": free})
    elif torch.version.cuda is None and torch.version.hip is None:
        why = f"torch {torch.__version__} is a build for the CPU alone"
    else:
        try:
            torch.cuda.init()
        except RuntimeError as error:  # says what is wrong with the driver
            why = str(error).splitlines()[0]
    sys.stdout.write(json.dumps({"devices": devices, "why": why}) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
