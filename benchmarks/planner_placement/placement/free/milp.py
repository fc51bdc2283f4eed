"""Free placements as an integer program, for HiGHS (scipy, optional): a proven bound, and sometimes a better placement.

    x[g, d] in {0, 1}       group g lies on device d                     sum over d of x[g, d] = 1
    a[v, d] >= x[g, d]      some pin g of value v lies on d
    b[v, d] <= x[g, d]      all pins of v lie on d                       (of two pins g, h: a >= x[g] - x[h], b = 0)
    minimise L              sum over g of time[g, d] x[g, d] + sum over v of cost[v, d] (a[v, d] - b[v, d]) <= L
                            sum over g of memory[g] x[g, d] <= limit[d]

The i-th heaviest group lies on one of the first i devices of its class: these are alike.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from benchmarks.planner_placement.placement.problem import Problem

__all__ = ["MAX_CHOICES", "has_solver", "solve_milp"]

MAX_CHOICES = 1_200
"""Groups times devices; larger programs do not come to a bound better than the simple one in seconds."""
_SAFE = 1e-5


def has_solver() -> bool:
    return importlib.util.find_spec("scipy") is not None


def solve_milp(problem: Problem, known: Sequence[int], *, seconds: float) -> tuple[list[int] | None, float]:
    """A placement better than `known` if one was found, and a bound below which no placement is."""
    optimize: Any = importlib.import_module("scipy.optimize")
    sparse: Any = importlib.import_module("scipy.sparse")
    value = problem.max_load(known)
    classes = problem.class_of_devices()
    num_groups, num_values, num_devices = problem.num_groups, len(problem.pins), len(classes)
    num_x, num_y = num_groups * num_devices, num_values * num_devices
    load = num_x + 2 * num_y
    upper = np.ones(load + 1)  # of the load too: nothing worse than what is known
    rows: list[tuple[dict[int, float], float, float]] = []
    rows += [
        ({group * num_devices + device: 1.0 for device in range(num_devices)}, 1.0, 1.0) for group in range(num_groups)
    ]
    for each, pins in enumerate(problem.pins):
        for device in range(num_devices):
            a = num_x + each * num_devices + device
            for pin in pins:
                x = pin * num_devices + device
                if len(pins) == 2:
                    other = (sum(pins) - pin) * num_devices + device
                    rows.append(({a: 1.0, x: -1.0, other: 1.0}, 0.0, math.inf))
                    upper[a + num_y] = 0.0
                else:
                    rows.append(({a: 1.0, x: -1.0}, 0.0, math.inf))
                    rows.append(({a + num_y: 1.0, x: -1.0}, -math.inf, 0.0))
    for device, kind in enumerate(classes):
        row = {load: -1.0}
        for group in range(num_groups):
            x = group * num_devices + device
            if math.isfinite(problem.time_s[group, kind]):
                row[x] = float(problem.time_s[group, kind]) / value
            else:
                upper[x] = 0.0
        for each in range(num_values):
            a = num_x + each * num_devices + device
            row[a] = float(problem.cost_s[each, kind]) / value
            row[a + num_y] = -row[a]
        rows.append((row, -math.inf, 0.0))
        if problem.memory_bytes.sum() > problem.limits[kind]:
            share = problem.memory_bytes / problem.limits[kind]
            rows.append(({group * num_devices + device: float(share[group]) for group in range(num_groups)}, 0.0, 1.0))
    _break_symmetry(problem, upper)
    entries = [(index, column, factor) for index, (row, _, _) in enumerate(rows) for column, factor in row.items()]
    at, columns, factors = (np.array(part) for part in zip(*entries, strict=True))
    matrix: Any = sparse.csr_array((factors, (at, columns)), shape=(len(rows), load + 1))
    objective = np.zeros(load + 1)
    objective[load] = 1.0
    integrality = np.zeros(load + 1)
    integrality[:num_x] = 1
    found: Any = optimize.milp(
        objective,
        integrality=integrality,
        bounds=optimize.Bounds(np.zeros(load + 1), upper),
        constraints=optimize.LinearConstraint(matrix, [row[1] for row in rows], [row[2] for row in rows]),
        # Its presolve has called the second-best placement of three nodes the best (tests/planner/placement).
        options={"time_limit": seconds, "mip_rel_gap": 1e-6, "presolve": False},
    )
    bound = value * (1 - _SAFE) if found.status == 2 else 0.0  # 2: nothing is as good as what is known
    if found.mip_dual_bound is not None and math.isfinite(found.mip_dual_bound):
        bound = max(bound, value * (float(found.mip_dual_bound) - _SAFE))
    if found.x is None:
        return None, bound
    device_of = [int(row.argmax()) for row in np.asarray(found.x)[:num_x].reshape(num_groups, num_devices)]
    return (device_of if problem.max_load(device_of) < value else None), bound


def _break_symmetry(problem: Problem, upper: np.ndarray) -> None:
    heaviest = np.argsort(-np.where(np.isfinite(problem.time_s), problem.time_s, 0.0).max(axis=1), kind="stable")
    first = 0
    for count in problem.counts:
        for rank, group in enumerate(heaviest[:count]):
            upper[group * problem.num_devices + first + rank + 1 : group * problem.num_devices + first + count] = 0.0
        first += count
