"""A graph with costs: what there is to place, what each part takes, and what flows between the parts.

A node is a call, or several; `forward_s` and `backward_s` are seconds for one micro-batch. Where a profile holds the
backward of a call as a node of its own, that node is marked `is_backward`: the order of a pipeline is that of the
forward nodes, and nodes with the same `together` lie on the same device.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from farspan.documents import MAX_AMOUNT, is_name
from farspan.errors import PlanError, quoted

__all__ = ["MORE_COSTS", "WHOLE_MODEL", "CostedEdge", "CostedGraph", "CostedNode", "NodeOption", "Seconds"]

WHOLE_MODEL = "(the model)"
"""Name of the node of a model that is one unit."""

MORE_COSTS = (
    "working_bytes",
    "forward_working_bytes",
    "split_working_bytes",
    "released_bytes",
    "split_released_bytes",
    "weight_flops",
    "left_bytes",
)
"""Costs of a node alone, and not of its options, that are plain numbers."""

Seconds = float | Mapping[str, float]
"""Seconds on a device of speed 1, or by kind of device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeOption:
    """Another way to run a node: remat, or split over several devices (tensor parallel), or both.

    Attributes:
        name: Unique among the options of a node and degree.
        tensor_parallel: Over how many devices; all nodes of a stage use the same degree.
        forward_s: As of the node; and so are the next four.
        border_bytes: Name of a neighbour: what this option moves in addition when that neighbour is elsewhere.
    """

    name: str
    tensor_parallel: int = 1
    forward_s: Seconds = 0.0
    backward_s: Seconds = 0.0
    parameter_bytes: float = 0.0
    saved_bytes: float = 0.0
    memory_bytes: float = 0.0
    border_bytes: Mapping[str, float] = field(default_factory=dict[str, float])


@dataclass(frozen=True, slots=True, kw_only=True)
class CostedNode:
    """A call, or calls that are not to be separated.

    Attributes:
        name: Unique in the graph.
        forward_s: Seconds of the forward of one micro-batch.
        backward_s: Seconds of its backward.
        parameter_bytes: What replicas have to reduce after the backward.
        saved_bytes: What stays of each micro-batch between forward and backward.
        memory_bytes: What lies there all the time: parameters, gradients, optimizer state, buffers.
        working_bytes: What it needs besides, while it runs.
        forward_working_bytes: The same of its forward alone.
        split_working_bytes: The same of its backward without the gradients of weights.
        weight_s: How much of backward_s is gradients of weights, which can be computed later.
        weight_flops: Floating-point operations of the forward of what has weights: they decide whether the backward of
            a stage is split.
        released_bytes: How much less than working_bytes its backward needs where no gradient comes to it from another
            stage: one that was made at its own is gone as soon as it was used.
        split_released_bytes: The same of split_working_bytes.
        left_bytes: What stays of each micro-batch between the backward and the gradients of weights, if it is.
        shared_bytes: What of saved_bytes other nodes keep too, by a word they share: it is there once on a device.
        devices: Names or kinds of the device classes that may run it; None for any.
        together: Nodes with the same word lie on the same device.
        is_backward: It is (part of) the backward of others: it has no say in the order of stages.
        options: Other ways to run it.
    """

    name: str
    forward_s: Seconds = 0.0
    backward_s: Seconds = 0.0
    parameter_bytes: float = 0.0
    saved_bytes: float = 0.0
    memory_bytes: float = 0.0
    working_bytes: float = 0.0
    forward_working_bytes: float = 0.0
    split_working_bytes: float = 0.0
    weight_s: Seconds = 0.0
    weight_flops: float = 0.0
    released_bytes: float = 0.0
    split_released_bytes: float = 0.0
    left_bytes: float = 0.0
    shared_bytes: Mapping[str, float] = field(default_factory=dict[str, float])
    devices: tuple[str, ...] | None = None
    together: str | None = None
    is_backward: bool = False
    options: tuple[NodeOption, ...] = ()

    def as_run(self, option: str = "") -> CostedNode:
        """Returns the node as it is with that option of degree 1: where remat is one, it works on what it has not
        kept."""
        for each in self.options:
            if each.name == option and each.tensor_parallel == 1:
                return replace(
                    self,
                    forward_s=each.forward_s,
                    backward_s=each.backward_s,
                    saved_bytes=each.saved_bytes,
                    memory_bytes=each.memory_bytes,
                    working_bytes=self.working_bytes + max(0.0, self.saved_bytes - each.saved_bytes),
                    shared_bytes={},
                )
        return self

    @property
    def least_bytes(self) -> float:
        """Returns what a device holds of it at least, with one micro-batch in flight, beside other nodes that keep the
        same."""
        return self.memory_bytes + self.saved_bytes - sum(self.shared_bytes.values())

    @property
    def names_of_ways(self) -> tuple[str, ...]:
        """The options of degree 1, after the empty name: as it is given."""
        return ("", *(option.name for option in self.options if option.tensor_parallel == 1))


@dataclass(frozen=True, slots=True, kw_only=True)
class CostedEdge:
    """A use, by one node, of what another node made.

    Attributes:
        source: Name of the node that makes it.
        target: Name of the node that uses it.
        size_bytes: What has to be moved if they are on different devices.
        time_s: What that takes, where this is known instead.
        is_saved: Its source keeps it for its own backward, and counts it in saved_bytes.
        is_saved_there: The same of its target.
        gradient_bytes: What its gradient takes at the source; None for as much as itself, 0 where it has none.
        is_parameter: It is the same in all micro-batches.
        value: Edges of one source with the same word carry the same value: sent once to each device that needs it.
    """

    source: str
    target: str
    size_bytes: float = 0.0
    time_s: float = 0.0
    value: str = ""
    is_saved: bool = False
    is_saved_there: bool = False
    gradient_bytes: float | None = None
    is_parameter: bool = False

    @property
    def has_gradient(self) -> bool:
        """Returns whether a gradient comes back: the same for all edges of a value."""
        return self.gradient_bytes != 0

    @property
    def sent_back_bytes(self) -> float:
        """Returns the bytes that its gradient has on its way."""
        return self.size_bytes if self.has_gradient else 0.0

    @property
    def held_back_bytes(self) -> float:
        """Returns the bytes that its gradient takes where it has arrived."""
        return self.size_bytes if self.gradient_bytes is None else self.gradient_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class CostedGraph:
    """Nodes and edges without circles, checked.

    Raises:
        PlanError: Two nodes have the same name, an edge ends nowhere, a cost is not a number from 0, ...

    Example:
        >>> a, b = CostedNode(name="a", forward_s=1.0), CostedNode(name="b", forward_s=2.0)
        >>> len(CostedGraph(nodes=(a, b), edges=(CostedEdge(source="a", target="b"),)).nodes)
        2
    """

    nodes: tuple[CostedNode, ...]
    edges: tuple[CostedEdge, ...] = ()
    source: str = "the graph"

    def __post_init__(self) -> None:
        if not self.nodes:
            raise PlanError(f"{self.source} has no nodes.", why="there is nothing to place.", hint='"nodes": [...]')
        names: set[str] = set()
        for node in self.nodes:
            if not is_name(node.name) or node.name in names:
                raise PlanError(
                    f'{self.source}: two nodes are called "{node.name}".'
                    if is_name(node.name)
                    else f"{self.source}: a node has no name.",
                    why="edges and plans name nodes.",
                    hint=f'"name": "{node.name or "node"}_2"',
                )
            names.add(node.name)
            self._check_node(node)
        sizes: dict[tuple[str, str], CostedEdge] = {}
        seen: set[tuple[str, str, str]] = set()
        for edge in self.edges:
            self._check_edge(edge, names, sizes, seen)
        self._check_order()

    def _check_node(self, node: CostedNode) -> None:
        where = f'{self.source}: node "{node.name}"'
        self._check_costs(node, where)
        for key in MORE_COSTS:
            _check_cost(getattr(node, key), f"{where}: {key}")
        for seconds in node.weight_s.values() if isinstance(node.weight_s, Mapping) else (node.weight_s,):
            _check_cost(seconds, f"{where}: weight_s")
        for word, size in node.shared_bytes.items():
            _check_cost(size, f'{where}: shared_bytes of "{word}"')
        shared = sum(node.shared_bytes.values())
        if shared > node.saved_bytes * (1 + 1e-9):
            raise PlanError(
                f"{where} shares {shared:g} bytes of the {node.saved_bytes:g} that it saves.",
                why="shared_bytes are a part of saved_bytes.",
                hint=f'"saved_bytes": {shared:g}',
            )
        if node.devices is not None and not node.devices:
            raise PlanError(f"{where} may run nowhere.", why='"devices" is empty.', hint='leave "devices" out')
        seen: set[tuple[str, int]] = set()
        for option in node.options:
            if option.tensor_parallel < 1 or (option.name, option.tensor_parallel) in seen:
                raise PlanError(
                    f'{where}: option "{option.name}" (tensor_parallel {option.tensor_parallel}) cannot be.',
                    why="a degree is a whole number from 1, and options of one degree have different names.",
                    hint='{"name": "remat", "tensor_parallel": 1, ...}',
                )
            seen.add((option.name, option.tensor_parallel))
            self._check_costs(option, f'{where}, option "{option.name}"')
            for neighbour, size in option.border_bytes.items():
                _check_cost(size, f'{where}, option "{option.name}": border_bytes of "{neighbour}"')

    def _check_costs(self, owner: CostedNode | NodeOption, where: str) -> None:
        for key in ("forward_s", "backward_s"):
            seconds: Seconds = getattr(owner, key)
            for value in seconds.values() if isinstance(seconds, Mapping) else (seconds,):
                _check_cost(value, f"{where}: {key}")
        for key in ("parameter_bytes", "saved_bytes", "memory_bytes"):
            _check_cost(getattr(owner, key), f"{where}: {key}")

    def _check_edge(
        self,
        edge: CostedEdge,
        names: set[str],
        sizes: dict[tuple[str, str], CostedEdge],
        seen: set[tuple[str, str, str]],
    ) -> None:
        where = f'{self.source}: edge "{edge.source}" -> "{edge.target}"'
        for end in (edge.source, edge.target):
            if end not in names:
                raise PlanError(f"{where} ends nowhere.", why=f'there is no node "{end}".', hint="name a node")
        _check_cost(edge.size_bytes, f"{where}: bytes")
        _check_cost(edge.time_s, f"{where}: seconds")
        if edge.gradient_bytes is not None:
            _check_cost(edge.gradient_bytes, f"{where}: gradient_bytes")
        if edge.source == edge.target or (edge.source, edge.target, edge.value) in seen:
            what = "begins where it ends" if edge.source == edge.target else "is there twice"
            raise PlanError(f"{where} {what}.", why="an edge is one node's use of another's value.", hint="take it out")
        seen.add((edge.source, edge.target, edge.value))
        first = sizes.setdefault((edge.source, edge.value), edge)
        if (first.size_bytes, first.time_s) != (edge.size_bytes, edge.time_s):
            raise PlanError(
                f'{where} costs something else than the edge to "{first.target}".',
                why="edges of one source carry the same value, unless they name different values.",
                hint='"value": "second output"',
            )
        for what, ours, theirs in (
            ("a parameter", edge.is_parameter, first.is_parameter),
            ("without gradient", not edge.has_gradient, not first.has_gradient),
        ):
            if ours != theirs:
                raise PlanError(
                    f'{where} is {"" if ours else "not "}{what}, unlike the edge to "{first.target}".',
                    why="edges of one source carry the same value, unless they name different values.",
                    hint='"value": "second output"',
                )

    def _check_order(self) -> None:
        waits = {node.name: 0 for node in self.nodes}
        targets: dict[str, list[str]] = {}
        for edge in self.edges:
            waits[edge.target] += 1
            targets.setdefault(edge.source, []).append(edge.target)
        ready = [name for name, count in waits.items() if count == 0]
        for name in ready:  # grows
            for target in targets.get(name, ()):
                waits[target] -= 1
                if waits[target] == 0:
                    ready.append(target)
        if len(ready) < len(self.nodes):
            left = [name for name, count in waits.items() if count]
            raise PlanError(
                f"{self.source} has a circle.",
                why=f"none of {len(left)} nodes can be the first to run: {', '.join(left[:4])}"
                + (", ..." if left[4:] else "."),
                hint="turn one of their edges round, or make them one node",
            )


def _check_cost(value: object, where: str) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= MAX_AMOUNT:
        why = f"a cost is a number from 0 to {MAX_AMOUNT:g}."
        raise PlanError(f"{where} is {quoted(value)}.", why=why, hint="0.001")
