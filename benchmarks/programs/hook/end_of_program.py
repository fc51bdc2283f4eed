"""What the harness asks at the end of a program: where the generators stand, and the weights of the models it can name.

One line that calls `leave` is appended to every program, also when it runs plainly. A model that is local to `main()`
is not seen, and so nothing but the program itself reads it: its last line may be the last of all.
"""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any


def leave(names: dict[str, Any]) -> None:
    """Write what this process ends with.

    Args:
        names: The program's global names.
    """
    import numpy as np
    import torch

    generators = {"torch": torch.get_rng_state().clone(), "numpy": np.random.get_state(), "python": random.getstate()}
    models = {name: item for name, item in names.items() if isinstance(item, torch.nn.Module)}
    weights = {
        f"{name}.{key}": item
        for name, model in sorted(models.items())
        for key, item in model.state_dict().items()
        if isinstance(item, torch.Tensor)
    }
    rank = os.environ.get("FARSPAN_RANK", os.environ.get("RANK", "0"))
    torch.save({"generators": generators, "weights": weights}, Path(os.environ["PROGRAMS_RESULT"], f"end{rank}.pt"))
