"""Turns a search with hints into the same problem with fewer ways to go.

hint          what becomes of it
pins          a class of one device for each such rank, on which alone the units may run; and, as a plan numbers its
              ranks without gaps, a stage on each rank before it
together      a `together` word of the graph
max_memory    memory of the device
stages        exactly so many stages
remat         the costs of the units with it, and no choice

A search cuts a graph into a chain of stages. Units of one group that cannot be in one stage of a chain (`embed` and
`head` with the blocks between them elsewhere) are searched as if all lay where most of their work is: the edges of the
others are taken out.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from farspan.cluster import Cluster
from farspan.errors import PlanError
from farspan.plan.hints import Hints, Meaning, meaning_of
from farspan.plan.resolve import matched, with_ancestors
from farspan.planner.constraints.divide import divide
from farspan.planner.cost_model import WHOLE_MODEL, CostedEdge, CostedGraph, CostedNode
from farspan.planner.cost_model.colocation import group_nodes, seconds_on, strongly_connected
from farspan.planner.partition_dp.lattice import linear_order

__all__ = ["HintedProblem", "hinted_problem"]


@dataclass(frozen=True, slots=True, kw_only=True)
class HintedProblem:
    """A graph and a cluster, and what the hints have made of them.

    Attributes:
        graph: Every plan for it keeps the hints.
        cluster: Its device classes.
        searched: The graph without the edges that no chain of stages can keep.
        hints: The user's.
        num_named: There must be so many ranks at least.
        whys: Of each unit that a hint speaks of, which, in words.
        again: Nodes that the hints have computed again.
    """

    graph: CostedGraph
    cluster: Cluster
    searched: CostedGraph
    hints: Hints = field(default_factory=Hints)
    num_named: int = 0
    whys: Mapping[str, str] = field(default_factory=dict[str, str])
    again: frozenset[str] = frozenset()

    @property
    def is_chain(self) -> bool:
        """Returns whether every plan that is searched is a chain of stages."""
        return self.searched is self.graph

    @property
    def least(self) -> dict[str, int]:
        """Returns by class how many of its devices have a rank that must be there; empty if there is no such rank."""
        if not self.num_named:
            return {}
        return {
            each.name: sum(number < self.num_named for number, _ in self.cluster.devices(each))
            for each in self.cluster.classes
        }


def hinted_problem(graph: CostedGraph, cluster: Cluster, hints: Hints) -> HintedProblem:
    """Returns the problem of finding a plan that keeps `hints`.

    Args:
        graph: Its nodes are modules or parameters of the model.
        cluster: Its devices, counted host by host, are the ranks that hints speak of.
        hints: The user's.

    Raises:
        PlanError: A hint names what is not there, or hints contradict each other.
    """
    if not hints:
        return HintedProblem(graph=graph, cluster=cluster, searched=graph)
    name_of = {"" if node.name == WHOLE_MODEL else node.name: node.name for node in graph.nodes}
    words: dict[str, list[str]] = {}
    for name, node in zip(name_of, graph.nodes, strict=True):
        if node.together is not None:
            words.setdefault(node.together, []).append(name)
    meaning = meaning_of(hints, list(name_of), cluster.num_devices, inseparable=list(words.values()))
    cluster = divide(cluster, hints, {place.rank: place for place in meaning.places.values()})
    again = _chosen(hints.remat, list(name_of))
    word_of = {name: f"with {group[0]}" for group in meaning.groups for name in group}
    nodes: list[CostedNode] = []
    for name, node in zip(name_of, graph.nodes, strict=True):
        node = node if again is None else _forced(node, name in again)
        nodes.append(
            replace(node, together=word_of.get(name, node.together), devices=_devices(node, name, meaning, cluster))
        )
    hinted = replace(graph, nodes=tuple(nodes))
    return HintedProblem(
        graph=hinted,
        cluster=cluster,
        searched=_as_a_row(graph, hinted),
        hints=hints,
        num_named=meaning.num_named,
        whys={name_of[name]: why for name, why in meaning.whys.items()},
        again=frozenset(name_of[name] for name in again or ()),
    )


def _devices(node: CostedNode, name: str, meaning: Meaning, cluster: Cluster) -> tuple[str, ...] | None:
    """Returns the classes that may run a node: where it is pinned, that rank's own."""
    if name not in meaning.places:
        return node.devices
    rank = meaning.places[name].rank
    kind = next(each for each in cluster.classes if any(number == rank for number, _ in cluster.devices(each)))
    if all(math.isinf(seconds_on(node.as_run(way), kind)) for way in node.names_of_ways):
        raise PlanError(
            f"{node.name!r} cannot be on rank {rank}.",
            why=f"it is {meaning.whys.get(name, 'together with what is pinned there')}, a device of "
            f"{kind.whole!r}, which may not run it.",
            hint="another rank, or seconds for that kind of device",
        )
    return (kind.name,)


def _chosen(remat: bool | Sequence[str] | None, names: Sequence[str]) -> set[str] | None:
    """Returns the units that are computed again; None where the search is to choose."""
    if remat is None:
        return None
    if isinstance(remat, bool):
        return set(names) if remat else set()
    nodes = with_ancestors(names)
    chosen = {name for pattern in remat for name in matched(pattern, nodes)}
    return {name for name in names if any(_is_in(name, each) for each in chosen)}


def _is_in(unit: str, name: str) -> bool:
    return not name or unit == name or unit.startswith(f"{name}.")


def _forced(node: CostedNode, is_again: bool) -> CostedNode:
    """Returns a node with no choice of remat: as it is given, or with the option that computes it again."""
    ways = node.names_of_ways
    return replace(node.as_run(ways[1] if is_again and len(ways) > 1 else ""), options=())


def _as_a_row(graph: CostedGraph, hinted: CostedGraph) -> CostedGraph:
    """`hinted`, or where its groups and its edges form circles that `graph` has not: without some edges.

    Of a group on a circle stays what lies next to each other in a linear order, the part with the most work. Parts of
    one order form a chain. What is taken out leaves an edge from what was before it to what was after it.
    """
    part_of, before = group_nodes(graph)
    num_parts = max(part_of) + 1
    words = {node.together or node.name: number for number, node in enumerate(hinted.nodes)}
    label = [0] * num_parts
    work = [0.0] * num_parts
    for node, part in zip(hinted.nodes, part_of, strict=True):
        label[part] = words[node.together or node.name]
        work[part] += _any_seconds(node)
    place = {part: at for at, part in enumerate(linear_order(num_parts, before))}
    members: dict[int, list[int]] = {}
    for part in sorted(range(num_parts), key=lambda part: place[part]):
        members.setdefault(label[part], []).append(part)
    taken_out: set[int] = set()
    pairs = set(before)
    while circling := _on_circles(label, pairs, taken_out):
        for each in circling:
            runs = _runs(members[each], place)
            kept = max(runs, key=lambda run: sum(work[part] for part in run))
            out = set(members[each]) - set(kept)
            members[each] = kept
            for part in out:
                pairs = _past(part, pairs)
            taken_out |= out
    if not taken_out:
        return hinted
    gone = {node.name for node, part in zip(hinted.nodes, part_of, strict=True) if part in taken_out}
    edges = [edge for edge in hinted.edges if not {edge.source, edge.target} & gone]
    first: dict[int, str] = {}
    for node, part in zip(hinted.nodes, part_of, strict=True):
        first.setdefault(part, node.name)
    edges += [CostedEdge(source=first[a], target=first[b], value="past") for a, b in sorted(pairs - set(before))]
    return replace(hinted, edges=tuple(edges))


def _on_circles(label: Sequence[int], pairs: set[tuple[int, int]], taken_out: set[int]) -> list[int]:
    """Labels of several parts that lie on a circle with other labels."""
    labels = {(label[a], label[b]) for a, b in pairs if label[a] != label[b]}
    component = strongly_connected(max(label) + 1, labels)
    sizes = Counter(component)
    left = Counter(label[part] for part in range(len(label)) if part not in taken_out)
    return sorted(each for each, count in left.items() if count > 1 and sizes[component[each]] > 1)


def _runs(parts: Sequence[int], place: Mapping[int, int]) -> list[list[int]]:
    """Parts, in order, as runs of neighbours."""
    runs: list[list[int]] = []
    for part in parts:
        if runs and place[part] == place[runs[-1][-1]] + 1:
            runs[-1].append(part)
        else:
            runs.append([part])
    return runs


def _past(part: int, pairs: set[tuple[int, int]]) -> set[tuple[int, int]]:
    """Pairs without those of a part: what was before it comes before what was after it."""
    sources = [a for a, b in pairs if b == part]
    targets = [b for a, b in pairs if a == part]
    return {pair for pair in pairs if part not in pair} | {(a, b) for a in sources for b in targets}


def _any_seconds(node: CostedNode) -> float:
    return sum(
        seconds if isinstance(seconds, float | int) else min(seconds.values(), default=0.0)
        for seconds in (node.forward_s, node.backward_s)
    )
