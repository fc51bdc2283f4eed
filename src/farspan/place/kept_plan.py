"""Plans that were measured, on disk: a program that is started again begins with the plan that it ended with."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from farspan.documents import read_text
from farspan.errors import PlanError
from farspan.execute.engine import Engine
from farspan.outputs import keep_text
from farspan.plan import Plan
from farspan.plan.hints import Hints
from farspan.profile import cache_folder, this_device

__all__ = ["KeptPlan", "Widths"]

_log = logging.getLogger(__name__)
_VERSION = "farspan-measured/1"


@dataclass(frozen=True, slots=True)
class Widths:
    """What is asked of a plan that may have wide stages.

    Attributes:
        reduction: How their gradients are added up; None: exactly, where that hides behind compute.
    """

    reduction: str | None


class KeptPlan:
    """The plan of one model on as many ranks as there are here; rank 0 alone reads and writes it.

    Args:
        engine: This rank's.
        model: Not yet placed.
        units: Names of what is placed as a whole, in the model's order; together they hold every parameter.
        hints: What is asked of its plan.
        schedule: The schedule that it is to have; None for any.
        widths: What is asked of its wide stages; None where it has none.
    """

    def __init__(
        self,
        engine: Engine,
        model: nn.Module,
        units: Sequence[str],
        hints: Hints,
        schedule: str | None,
        widths: Widths | None = None,
    ) -> None:
        self._engine = engine
        self.units = units
        self.hints = hints
        self.schedule = schedule
        self.widths = widths
        shapes = [(name, tuple(item.shape), str(item.dtype)) for name, item in model.named_parameters()]
        here = (_VERSION, torch.__version__, this_device(), torch.get_num_threads(), engine.num_ranks)
        signature = (here, units, shapes, hints, schedule, widths)
        digest = hashlib.sha256(repr(signature).encode()).hexdigest()
        self.path: Path = cache_folder("plans") / f"{digest[:32]}.json"

    def load(self) -> Plan | None:
        """Returns the plan that was found before; None where there is none. All ranks call it, and get the same."""
        text = self._read() if self._engine.rank == 0 else ""
        text = self._engine.agreement.broadcast("the plan of before", text.encode(), 0).decode()
        return Plan.from_json(text) if text else None

    def save(self, plan: Plan) -> None:
        """Write it, if the folder can be written to."""
        if self._engine.rank == 0:
            keep_text(self.path, plan.to_json(), "the plan")

    def _read(self) -> str:
        """Returns the plan's text; nothing where there is none that can be used."""
        if not self.path.is_file():
            return ""
        try:
            text = read_text(self.path, hint="")
            plan = Plan.from_json(text)
        except PlanError as error:
            _log.warning("%s is no plan (%s): a new one is searched", self.path, error.what)
            return ""
        ranks = sorted(rank for stage in range(plan.num_stages) for rank in plan.ranks_of(stage))
        is_whole = all(any(each in plan.placement for each in _above(name)) for name in self.units)
        if not is_whole or ranks != list(range(self._engine.num_ranks)):
            _log.warning("%s is another model's plan: a new one is searched", self.path)
            return ""
        return text


def _above(name: str) -> list[str]:
    """Returns a module's name and those of all around it."""
    parts = name.split(".")
    return [".".join(parts[:count]) for count in range(len(parts), 0, -1)] + [""]
