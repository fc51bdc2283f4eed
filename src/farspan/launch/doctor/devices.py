"""Lists the GPUs that torch can use, as a line of JSON: a program of its own, for it imports torch."""

from __future__ import annotations

import json
import sys

__all__ = ["main"]


def main() -> int:
    """Writes the devices, and why there are none, to standard output."""
    import torch

    from farspan.devices import accelerators, name_of_device

    why = ""
    devices: list[dict[str, object]] = []
    for device in accelerators():
        free, total = torch.accelerator.get_memory_info(device)
        devices.append({"name": name_of_device(device), "memory_bytes": total, "free_bytes": free})
    kind = torch.accelerator.current_accelerator()
    if kind is None:
        why = f"torch {torch.__version__} is a build for the CPU alone"
    elif not devices:
        try:
            torch.empty(0, device=kind)
        except (RuntimeError, AssertionError) as error:  # says what is wrong with the driver
            why = str(error).splitlines()[0]
    sys.stdout.write(json.dumps({"devices": devices, "why": why}) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
