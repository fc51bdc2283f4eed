"""Lists where stages of a pipeline may begin: all prefixes of a graph, or where these are too many, the cheapest to cut
at.

Of a long graph, a linear order is taken, its work divided into as many shares as there may be cuts, and in each share
the prefix with the fewest bytes across is kept: between the blocks of a transformer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from farspan.planner.cost_model.costed_graph import CostedGraph, Seconds
from farspan.planner.partition_dp.lattice import all_prefixes, linear_order

__all__ = ["MAX_CUTS", "good_prefixes"]

MAX_CUTS = 280


def good_prefixes(
    graph: CostedGraph, group_of: Sequence[int], before: Sequence[tuple[int, int]]
) -> tuple[list[int], bool]:
    """Prefixes between which stages may lie, and whether these are all there are."""
    num_groups = max(group_of) + 1
    prefixes = all_prefixes(num_groups, before, limit=MAX_CUTS)
    if prefixes is not None:
        return prefixes, True
    order = linear_order(num_groups, before)
    place = {group: index for index, group in enumerate(order)}
    work, across = np.zeros(num_groups), np.zeros(num_groups + 1)
    index_of = {node.name: index for index, node in enumerate(graph.nodes)}
    for node, group in zip(graph.nodes, group_of, strict=True):
        work[place[group]] += _any(node.forward_s) + _any(node.backward_s)
    reach: dict[tuple[str, str], list[int]] = {}
    sizes: dict[tuple[str, str], float] = {}
    for edge in graph.edges:
        places = reach.setdefault((edge.source, edge.value), [place[group_of[index_of[edge.source]]]])
        places.append(place[group_of[index_of[edge.target]]])
        sizes[edge.source, edge.value] = edge.size_bytes + edge.time_s
    for key, places in reach.items():  # prefix p, the first p groups, is crossed if min < p <= max
        across[min(places) + 1] += sizes[key]
        if max(places) + 1 <= num_groups:
            across[max(places) + 1] -= sizes[key]
    across = np.cumsum(across)
    share = np.concatenate(([0.0], np.cumsum(work))) / (work.sum() or 1.0)
    share = (
        0.5 * share + 0.5 * np.arange(num_groups + 1) / num_groups
    )  # work that is in few nodes leaves cuts to others
    shares = np.minimum((share * MAX_CUTS).astype(int), MAX_CUTS - 1)
    chosen = {0, num_groups}
    for number in range(MAX_CUTS):
        inside = np.flatnonzero(shares == number)
        if len(inside):
            chosen.add(int(inside[across[inside].argmin()]))
    found, prefix = [0], 0
    for index, group in enumerate(order, start=1):
        prefix |= 1 << group
        if index in chosen:
            found.append(prefix)
    return found, False


def _any(seconds: Seconds) -> float:
    return min(seconds.values(), default=0.0) if isinstance(seconds, Mapping) else seconds
