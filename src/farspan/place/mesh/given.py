"""A mesh that the program has made, with torch's `init_device_mesh`: how many groups, stages and ranks of a layer.

init_device_mesh("cpu", (2, 3, 2), mesh_dim_names=("dp", "pp", "tp"))     data_parallel=2, stages=3, tensor_parallel=2
"""

from __future__ import annotations

from typing import Any

from farspan.errors import PlanError

__all__ = ["axes_of"]

_AXES = {"dp": "data_parallel", "pp": "stages", "tp": "tensor_parallel"}
_EXAMPLE = 'init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))'


def axes_of(mesh: Any, num_ranks: int, **given: Any) -> tuple[int, int, int]:
    """Returns the number of groups, of stages, and of ranks that run each layer together.

    Args:
        mesh: A `torch.distributed.device_mesh.DeviceMesh` with names among "dp", "pp" and "tp"; one that is not named
            has one place.
        num_ranks: Of the program.
        given: Arguments of `farspan.distribute` that say the same, by name, where they were given.

    Raises:
        PlanError: It is none, has other names, leaves ranks out, or has them in an order that is not farspan's; or
            something else says the same.
    """
    names, ranks = getattr(mesh, "mesh_dim_names", None), getattr(mesh, "mesh", None)
    if ranks is None or not hasattr(ranks, "tolist"):
        raise PlanError(
            f"mesh={mesh!r:.60} is no DeviceMesh.", why=f"it is of type {type(mesh).__name__}.", hint=f"mesh={_EXAMPLE}"
        )
    if not names or not set(names) <= set(_AXES):
        raise PlanError(
            f"the mesh's axes are named {list(names or ())}.",
            why='farspan knows "dp" (groups with data of their own), "pp" (stages) and "tp" (ranks of each layer).',
            hint=f"mesh={_EXAMPLE}",
        )
    other = next((name for name, value in given.items() if value is not None), None)
    if other is not None:
        raise PlanError(
            f"mesh= with {other}=.",
            why="the mesh says how ranks are used.",
            hint=f"leave out one of mesh= and {other}=",
        )
    order = [names.index(name) for name in _AXES if name in names]
    found = ranks.permute(order).flatten().tolist()
    if found != list(range(num_ranks)):
        raise PlanError(
            f"the mesh has the ranks {found[:8]}{'...' * (len(found) > 8)} of {num_ranks}.",
            why='group 0 has the first ranks, its stage 0 the first of these: all ranks in order, "dp" before "pp" '
            'before "tp".',
            hint=f"mesh={_EXAMPLE}, over all ranks",
        )
    sizes = {name: ranks.shape[number] for number, name in enumerate(names)}
    data, stages, tensor = (sizes.get(name, 1) for name in _AXES)
    return data, stages, tensor
