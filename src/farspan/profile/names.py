"""The names of a model's parameters, and which of them are the same parameter."""

from __future__ import annotations

from torch import nn

__all__ = ["tied"]


def tied(model: nn.Module) -> tuple[list[str], dict[str, str]]:
    """The first name of every parameter, and for each further name of a tied one its first.

    >>> model = nn.ModuleDict({"embed": nn.Embedding(4, 2), "head": nn.Linear(2, 4, bias=False)})
    >>> model["head"].weight = model["embed"].weight
    >>> tied(model)
    (['embed.weight'], {'head.weight': 'embed.weight'})
    """
    first: dict[int, str] = {}
    aliases: dict[str, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if id(parameter) in first:
            aliases[name] = first[id(parameter)]
        else:
            first[id(parameter)] = name
    return list(first.values()), aliases
