"""The names of a model's parameters, which of them are the same parameter, and modules that must stay whole."""

from __future__ import annotations

from torch import nn

__all__ = ["keepers", "keeps_statistics", "tied"]

_BatchNorm = (
    nn.BatchNorm1d,
    nn.BatchNorm2d,
    nn.BatchNorm3d,
    nn.SyncBatchNorm,
    nn.InstanceNorm1d,
    nn.InstanceNorm2d,
    nn.InstanceNorm3d,
)


def tied(model: nn.Module) -> tuple[list[str], dict[str, str]]:
    """Returns the first name of every parameter, and for each further name of a tied one its first.

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


def keepers(model: nn.Module) -> set[str]:
    """Returns the names of modules without parameters that keep statistics of what they see: one rank must see it all.

    >>> keepers(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2, affine=False), nn.BatchNorm1d(2)))
    {'1'}
    """
    return {name for name, module in model.named_modules() if keeps_statistics(module) and not module.affine}


def keeps_statistics(module: nn.Module) -> bool:
    """Returns whether a module keeps statistics of what it sees: a normalisation over batches.

    >>> keeps_statistics(nn.BatchNorm1d(2)), keeps_statistics(nn.LayerNorm(2))
    (True, False)
    """
    return isinstance(module, _BatchNorm) and bool(module.track_running_stats)
