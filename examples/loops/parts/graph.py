"""A graph of nodes in communities: edges are likelier inside one, and so are certain features."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["draw_graph"]


def draw_graph(num_nodes: int, num_features: int, num_classes: int) -> tuple[Tensor, Tensor, Tensor]:
    """Features [nodes, features], the class of each node [nodes], and edges with loops, 0 or 1, [nodes, nodes]."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(num_classes, (num_nodes,), generator=generator)
    is_same = labels.unsqueeze(0) == labels.unsqueeze(1)
    chance = torch.where(is_same, 0.08, 0.01)
    edges = torch.rand(num_nodes, num_nodes, generator=generator).triu(1) > 1 - chance
    edges = (edges | edges.T | torch.eye(num_nodes, dtype=torch.bool)).float()
    taste = torch.rand(num_classes, num_features, generator=generator).square()
    features = (torch.rand(num_nodes, num_features, generator=generator) < taste[labels]).float()
    return features / features.sum(1, keepdim=True).clamp(min=1), labels, edges
