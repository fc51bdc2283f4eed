"""Gives a rank its place in the world of those that are left: number, channel, transports, and who runs each stage."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from farspan.comm.router import Router
from farspan.execute.copies.heirs import places_without, teams_without
from farspan.execute.optimizers.step_view import StepView
from farspan.record.parameters.copying import plan_by_model

if TYPE_CHECKING:
    from farspan.control.channel import SideChannel
    from farspan.execute.engine import Engine

__all__ = ["leave", "renumber"]


def leave(engine: Engine) -> None:
    """Ends all connections of the world before."""
    engine.values.close()
    engine.interrupt()
    engine.side.close(linger_s=0.0)
    transport, engine.transport = engine.transport, None
    if isinstance(transport, Router):
        transport.close()


def renumber(
    engine: Engine,
    side: SideChannel,
    router: Router | None,
    left: Sequence[int],
    heirs: Mapping[int, int],
    take: Callable[[], None],
) -> None:
    """Let the engine go on in a new world.

    Args:
        engine: This rank's, which has left the world before.
        side: The channel of those that are left.
        router: What carries their tensors.
        left: Their numbers of before, ascending.
        heirs: Who takes over what the others had, by these numbers.
        take: Takes over what is this rank's; called while ranks still have their numbers of before.
    """
    teams = teams_without(engine.teams, left, heirs)
    take()
    for model, plan in list(plan_by_model.items()):
        stages = places_without(plan.stages, left, heirs)
        plan_by_model[model] = engine.console.plan = dataclasses.replace(plan, stages=stages)
    engine.teams[:] = teams
    side.history, side.place = engine.side.history, engine.side.place
    engine.side, engine.rank, engine.num_ranks, engine.transport = side, side.rank, side.world_size, router
    engine.masks.rank = side.rank
    engine.agreement.side = engine.console.side = side
    engine.values.join(side)
    engine.channels = engine.new_channels(router, side)
    remat = engine.executor.remat
    remat.forget()
    engine.executor = engine.plain_executor()
    engine.executor.remat = remat
    engine.pace.begin(None)  # which compares ranks by their numbers
    steps = engine.values.optimizers
    if steps.view is not None:
        steps.view = StepView(engine)
