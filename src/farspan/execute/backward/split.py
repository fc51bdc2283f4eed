"""Splits one backward into B and W, by rules on autograd's nodes.

    x -- N1 -- N2 -- N3 -- loss        I: the nodes between the segment's inputs and what is differentiated
         |     |     |
         M1    M2    M3                border edges I -> M: all weight work lies on them
         w1    w2    w3

The first half runs the engine over I alone. Where a border node has a rule (`rules.py`), a hook keeps what its weight
gradient needs (the incoming gradient, what the forward saved); autograd skips the part that nobody asked for. The
second half evaluates the rules and lets the engine run the M's, so that hooks on parameters fire once, on the whole
gradient. What has no rule is done in the first half; nothing is computed twice, and the graph of I is freed after it.

A parameter is wholly in one half: hooks on it would see a part of its gradient otherwise, and parts would be added in
another order than autograd's. For the same reason one that some nodes use directly and others through a view does not
wait.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

from farspan.execute.backward.rules import RULES, WeightWork, can_wait
from farspan.torch_private import shape_at

__all__ = ["Deferred", "Split", "split_backward"]

_REENTRANT_CHECKPOINT = "CheckpointFunctionBackward"
"""Refuses to run for a part of its gradients."""


@dataclass(slots=True)
class Deferred:
    """The second half of a backward."""

    accumulators: frozenset[Any]
    """The accumulators of the parameters that will get their gradient."""
    shared: frozenset[Any]
    """Those of them that several nodes use: their gradients are added up in one run of the engine."""
    work: deque[_Later] = field(default_factory=deque)
    """The weight work, in the order in which B has found it."""

    def run(self) -> None:
        """Compute the weight gradients, and add them to `.grad`."""
        together: list[tuple[GradientEdge, torch.Tensor]] = []
        while self.work:
            later = self.work.popleft()
            gradients = [
                (GradientEdge(target, output), gradient.sum_to_size(shape_at(target, output)))
                for (target, output), gradient in zip(later.edges.values(), later.work([*later.edges]), strict=True)
            ]
            if self.shared.isdisjoint(later.accumulators):
                _run_engine(gradients)
            else:
                together += gradients
        if together:
            _run_engine(together)


@dataclass(slots=True)
class _Later:
    """The work of one border. Without its node: by way of that the whole graph would stay, down to the tensors that it
    begins at.
    """

    edges: dict[int, tuple[Any, int]]
    """The edges on which the gradients go on, by number of the node's input."""
    accumulators: frozenset[Any]
    work: WeightWork


@dataclass(slots=True)
class _Border:
    """A node between the inputs and the roots, with the numbers of its inputs whose gradients can wait."""

    node: Any
    targets: dict[int, frozenset[Any]]
    """The accumulators behind each of these edges."""


@dataclass(slots=True)
class Split:
    """The cut that splits a backward."""

    requested: set[Any]
    """The accumulators of the inputs whose gradients others wait for."""
    now: set[Any]
    """The parameters that get their gradient in B."""
    borders: list[_Border]

    def run_first_half(self, roots: Sequence[torch.Tensor], seeds: Sequence[torch.Tensor | None]) -> Deferred | None:
        """Compute the gradients of the inputs, and let the graph go; return the other half, if there is one."""
        if not self.borders:
            torch.autograd.backward(roots, seeds)
            return None
        uses = Counter(item for border in self.borders for target in border.targets.values() for item in target)
        deferred = Deferred(frozenset(uses), frozenset(item for item, count in uses.items() if count > 1))
        handles = [border.node.register_prehook(_keep(border, deferred)) for border in self.borders]
        try:
            inputs = [GradientEdge(node, 0) for node in (*self.requested, *self.now)]
            torch.autograd.backward(roots, seeds, inputs=inputs)
        finally:
            for handle in handles:
                handle.remove()
        return deferred if deferred.work else None


def split_backward(
    roots: Sequence[torch.Tensor], leaves: Sequence[torch.Tensor], whole: Sequence[torch.Tensor]
) -> Split:
    """Find what of a backward can wait.

    Args:
        roots: What is differentiated.
        leaves: The inputs whose gradients others wait for.
        whole: Parameters that must get theirs with them.
    """
    starts = [get_gradient_edge(root).node for root in roots]
    nodes = _postorder(starts)
    requested = {get_gradient_edge(leaf).node for leaf in leaves}
    inner = _leading_to(requested, nodes)
    behind = _accumulators_behind(nodes, inner)
    now = {get_gradient_edge(parameter).node for parameter in whole}
    now.update(*(behind[start] for start in starts if start not in inner))
    if any(node.name() == _REENTRANT_CHECKPOINT for node in nodes):
        now.update(*behind.values())
    return Split(requested, now, _borders(nodes, inner, behind, now))


def _keep(border: _Border, deferred: Deferred) -> Callable[[Any], None]:
    def hook(gradients: Any) -> None:
        if gradients[0] is not None:
            node, found = border.node, border.targets
            edges = {number: node.next_functions[number] for number in found}
            work = RULES[node.name()].take(node, gradients[0])
            deferred.work.append(_Later(edges, frozenset().union(*found.values()), work))

    return hook


def _run_engine(gradients: Sequence[tuple[GradientEdge, torch.Tensor]]) -> None:
    torch.autograd.backward([edge for edge, _ in gradients], [gradient for _, gradient in gradients])


def _postorder(starts: Sequence[Any]) -> list[Any]:
    """Returns all nodes that can be reached, each after those it leads to."""
    order: list[Any] = []
    seen: set[Any] = set()
    stack: list[tuple[Any, bool]] = [(start, False) for start in starts]
    while stack:
        node, is_left = stack.pop()
        if is_left:
            order.append(node)
        elif node not in seen:
            seen.add(node)
            stack.append((node, True))
            stack += [(item, False) for item, _ in node.next_functions if item is not None and item not in seen]
    return order


def _leading_to(requested: Collection[Any], nodes: Sequence[Any]) -> set[Any]:
    """Returns those of `nodes` that lead to one of `requested`, these included."""
    inner: set[Any] = set()
    for node in nodes:
        if node in requested or any(item in inner for item, _ in node.next_functions):
            inner.add(node)
    return inner


def _accumulators_behind(nodes: Sequence[Any], inner: Collection[Any]) -> dict[Any, frozenset[Any]]:
    """Returns for each node outside `inner` the accumulators of parameters it leads to."""
    behind: dict[Any, frozenset[Any]] = {}
    for node in nodes:
        if node in inner:
            continue
        if hasattr(node, "variable"):
            behind[node] = frozenset([node])
        else:
            behind[node] = frozenset().union(*(behind[item] for item, _ in node.next_functions if item is not None))
    return behind


def _borders(
    nodes: Sequence[Any], inner: Collection[Any], behind: Mapping[Any, frozenset[Any]], now: set[Any]
) -> list[_Border]:
    """Returns the borders whose work can wait; `now` grows by all parameters that another border needs at once."""
    borders: list[_Border] = []
    is_direct: dict[Any, bool] = {}
    for node in nodes:
        if node not in inner:
            continue
        targets: dict[int, frozenset[Any]] = {}
        for number, (target, _) in enumerate(node.next_functions):
            if target is None or target in inner:
                continue
            found = behind[target]
            if not can_wait(node, number):
                now |= found
                continue
            targets[number] = found
            for item in found:
                if is_direct.setdefault(item, target is item) != (target is item):
                    now.add(item)
        if targets:
            borders.append(_Border(node, targets))
    has_grown = True
    while has_grown:
        has_grown = False
        for border in borders:
            for number, found in list(border.targets.items()):
                if not now.isdisjoint(found):
                    del border.targets[number]
                    has_grown |= not found <= now
                    now |= found
    return [border for border in borders if border.targets]
