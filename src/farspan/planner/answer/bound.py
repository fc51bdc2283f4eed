"""What no pipeline can beat, however it is cut: a lower bound for the step that is played.

With M micro-batches, t(s) the seconds that stage s takes for each, and T those of a whole micro-batch on the fastest
devices. A device is v times as fast at most. No stage can do more than all the work that falls to it, so

    step >= M * T / sum of v                 all devices, busy all the time
    step >= M * the longest piece            which is on one device; a piece is all that must be together
    step >= the longest path                 of one micro-batch

If all nodes follow from each other, and stages are a row, stage s also waits for the forward of the first micro-batch
through the stages before it, and these for the backward of the last one:

    step >= M * t(s) + t(1) + ... + t(s - 1)

so t(s) <= R(s) / M, with R(s) what is left of the step after the stages before, R(s + 1) = R(s) - t(s). Most work is
done if all stages take all they may, the fastest first: T <= step / M * sum over s of v(s) (1 - 1 / M)^(s - 1).
"""

from __future__ import annotations

import math

from farspan.cluster import Cluster
from farspan.planner.costed import CostedGraph
from farspan.planner.costed.problem import seconds_on

__all__ = ["lower_bound"]

_SAME = 1 - 1e-9


def lower_bound(
    graph: CostedGraph,
    cluster: Cluster,
    num_micro_batches: int,
    *,
    num_stages: int | None = None,
    is_row: bool = True,
) -> float:
    """Seconds that no step takes less than, with one device for each stage.

    Args:
        graph: What is run.
        cluster: Where.
        num_micro_batches: Of a step.
        num_stages: The most stages there may be; None for any number.
        is_row: Whether data flow from each stage only to later ones.

    Example:
        >>> from farspan.cluster import DeviceClass
        >>> from farspan.planner.costed import CostedEdge, CostedNode
        >>> nodes = tuple(CostedNode(name=name, forward_s=1.0, backward_s=2.0) for name in "ab")
        >>> graph = CostedGraph(nodes=nodes, edges=(CostedEdge(source="a", target="b"),))
        >>> cluster = Cluster(classes=(DeviceClass(name="x", kind="x", devices_per_host=2),))
        >>> round(lower_bound(graph, cluster, 4), 2)
        13.71
    """
    classes = cluster.classes
    table = {node.name: [seconds_on(node, each) for each in classes] for node in graph.nodes}
    least = {name: min(row) for name, row in table.items()}
    total = sum(least.values())
    if not total or not math.isfinite(total):
        return 0.0
    pieces: dict[str | int, list[float]] = {}
    for number, node in enumerate(graph.nodes):
        sums = pieces.setdefault(number if node.together is None else node.together, [0.0] * len(classes))
        sums[:] = map(sum, zip(sums, table[node.name], strict=True))
    longest = max(map(min, pieces.values()))
    speeds = [
        max((least[name] / row[number] for name, row in table.items() if row[number]), default=1.0)
        for number in range(len(classes))
    ]
    ordered = sorted(
        (speed for speed, each in zip(speeds, classes, strict=True) for _ in range(each.num_devices)), reverse=True
    )[: min(len(pieces), num_stages or len(pieces))]
    path = _longest_path(graph, least)
    left = 1 - 1 / num_micro_batches if is_row and path >= total * _SAME else 1.0
    share = sum(speed * left**number for number, speed in enumerate(ordered))
    return _SAME * max(num_micro_batches * total / share, num_micro_batches * longest, path)


def _longest_path(graph: CostedGraph, least: dict[str, float]) -> float:
    """The most seconds of pieces that follow from each other."""
    targets: dict[str, list[str]] = {}
    waits = dict.fromkeys(least, 0)
    for source, target in {(edge.source, edge.target) for edge in graph.edges}:
        targets.setdefault(source, []).append(target)
        waits[target] += 1
    ends = dict(least)
    ready = [name for name, count in waits.items() if not count]
    for name in ready:  # grows
        for target in targets.get(name, ()):
            ends[target] = max(ends[target], ends[name] + least[target])
            waits[target] -= 1
            if not waits[target]:
                ready.append(target)
    return max(ends.values())
