"""Train the PyTorch model you already have, in the loop you already have, on the machines you already have."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from farspan.launch.forked.launch import launch as launch  # in the place of the room of this name
from farspan.launch.rank.absent import watch_end
from farspan.launch.rank.imports import while_imported
from farspan.launch.rank.interrupts import signals_held

if TYPE_CHECKING:
    __version__: str

    from farspan.api import data_rank as data_rank
    from farspan.api import data_world as data_world
    from farspan.api import deferred_init as deferred_init
    from farspan.api import distribute as distribute
    from farspan.api import flush as flush
    from farspan.api import from_rank as from_rank
    from farspan.api import last_step as last_step
    from farspan.api import load_pretrained as load_pretrained
    from farspan.api import on as on
    from farspan.api import plan_of as plan_of
    from farspan.api import rank as rank
    from farspan.errors import FarspanError as FarspanError
    from farspan.execute.process.metrics import metrics as metrics
    from farspan.launch.roles.role import role as role
    from farspan.plan import Plan as Plan
    from farspan.services import expose as expose
    from farspan.services import service as service
    from farspan.state.loading.choice import latest as latest
    from farspan.state.loading.load import load as load
    from farspan.state.position.resumable import resumable as resumable
    from farspan.state.saving.save import save as save

__all__ = [
    "FarspanError",
    "Plan",
    "data_rank",
    "data_world",
    "deferred_init",
    "distribute",
    "expose",
    "flush",
    "from_rank",
    "last_step",
    "latest",
    "launch",
    "load",
    "load_pretrained",
    "metrics",
    "on",
    "plan_of",
    "rank",
    "resumable",
    "role",
    "save",
    "service",
]

_HOMES = {
    "data_rank": "farspan.api",
    "data_world": "farspan.api",
    "deferred_init": "farspan.api",
    "distribute": "farspan.api",
    "expose": "farspan.services",
    "flush": "farspan.api",
    "from_rank": "farspan.api",
    "last_step": "farspan.api",
    "load_pretrained": "farspan.api",
    "metrics": "farspan.execute.process.metrics",
    "on": "farspan.api",
    "plan_of": "farspan.api",
    "rank": "farspan.api",
    "FarspanError": "farspan.errors",
    "Plan": "farspan.plan",
    "load_ipython_extension": "farspan.launch.forked.magic",
    "latest": "farspan.state.loading.choice",
    "load": "farspan.state.loading.load",
    "role": "farspan.launch.roles.role",
    "resumable": "farspan.state.position.resumable",
    "save": "farspan.state.saving.save",
    "service": "farspan.services",
}


def __getattr__(name: str) -> Any:
    """Resolve public names on first use, so that importing farspan does not import torch."""
    if name == "__version__":
        return _version()
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'farspan' has no attribute {name!r}")
    return getattr(import_module(home), name)


def _version() -> str:
    from importlib import metadata  # takes longer than all else here

    try:
        return metadata.version("farspan")
    except metadata.PackageNotFoundError:
        return "0+unknown"  # run from its source


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, "__version__"})


while_imported("torch", signals_held)
watch_end("farspan.comm.rendezvous.messenger")
