"""Resolves a plan's `remat` for one model: the modules whose calls are computed again in the backward."""

from __future__ import annotations

from collections.abc import Sequence

from farspan.plan.diagnose import module_not_found
from farspan.plan.resolve import matched

__all__ = ["resolve_remat"]


def resolve_remat(remat: bool | Sequence[str], modules: Sequence[str], blocks: Sequence[str]) -> list[str]:
    """Find the modules that `remat` means.

    True means the repeated blocks; where there are none the whole model, of which each leaf counts by itself. A glob
    counts at the outermost names it matches, as in a plan's placement: each call of one of these is computed again as
    a whole. A module of the result may lie below another one; the outer one counts.

    Args:
        remat: True, False, or names of modules and globs of them.
        modules: Names of all modules, "" included, parents before children.
        blocks: Those of the repeated blocks.

    Raises:
        PlanError: A name or a glob matches no module.

    Example:
        >>> modules = ["", "blocks", "blocks.0", "blocks.0.mlp", "blocks.1", "head"]
        >>> resolve_remat(["blocks.*", "head"], modules, ["blocks.0", "blocks.1"])
        ['blocks.0', 'blocks.1', 'head']
        >>> resolve_remat(True, modules, ["blocks.0", "blocks.1"])
        ['blocks.0', 'blocks.1']
    """
    if isinstance(remat, bool):
        return [*blocks] or [""] if remat else []
    found: dict[str, None] = {}
    for entry in remat:
        names = matched(entry, modules)
        if not names:
            raise module_not_found(entry, modules)
        found.update(dict.fromkeys(names))
    return list(found)
