"""What a user calls: distribute a model, look at its plan, run what is queued."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from farspan.adapters import adapt_trainers
from farspan.errors import PlanError
from farspan.lazy import glue_at, place, repeated_blocks
from farspan.plan import Plan, parse_place, resolve, resolve_remat
from farspan.planner import auto_plan
from farspan.profile import atoms, keepers, tied
from farspan.runtime.optimizers.watch import watch_optimizers
from farspan.runtime.step.observe import StepRecord
from farspan.runtime.step.sites import StageSite, site_of, stages_at
from farspan.runtime.trial import current_trial
from farspan.runtime.world import current_engine, engine_of_this_thread, num_ranks_to_be
from farspan.schedule import LEAST_WEIGHT_WORK_S

__all__ = ["distribute", "flush", "from_rank", "last_step", "on", "plan_of"]

_PLAN = "_farspan_plan"


def distribute(
    model: nn.Module,
    *,
    plan: str | os.PathLike[str] | Plan | Mapping[str, str] = "auto",
    stages: int | str = "auto",
    remat: bool | Sequence[str] | None = None,
    schedule: str | None = None,
    seed: int = 0,
) -> nn.Module:
    """Split `model` over the ranks of this program and return it: same object, same class, same state_dict keys.

    Every rank calls it alike, and then runs the training loop it would run alone. Under a launcher (`farspan run`,
    torchrun, anything that sets RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT) torch.distributed is set up if it was not;
    without one the world is one rank.

    Args:
        model: Any module, built alike on every rank.
        plan: "auto"; a `Plan`; the path of a plan's JSON file; or a mapping from names of modules or parameters (or
            glob patterns of them) to "rank:R" or "rank:R/device".
        stages: How many pipeline stages an automatic plan has; one for each rank by default.
        remat: Which activations are computed again in the backward instead of being kept from the forward; gradients
            are the same to the last bit. True: those of each repeated block, one block at a time (the entries of
            module lists, and of a `Sequential` of several of a kind; in a model without any, each module that is
            called as a whole). Names of modules (or glob patterns, `["blocks.*.mlp"]`): each call of one of these,
            wherever it runs. False: none. None: what the plan says.
        schedule: In which order each rank runs the forwards and backwards of the micro-batches; gradients are the same
            to the last bit. "auto": weight gradients are put off, to fill gaps, where that is likely to pay;
            "zero-bubble": wherever another rank waits; "1f1b": nowhere (interleaved where a rank has several stages);
            "gpipe": nor does a backward start before all forwards. None: what the plan says.
        seed: Of the dropout masks and other random numbers drawn inside the model.

    Returns:
        `model` itself.

    Raises:
        PlanError: The plan does not fit the model or the number of ranks, `remat` names no module of the model, or
            there is no such schedule.
        LaunchError: The other ranks cannot be found.

    Example:
        >>> import torch, farspan
        >>> model = farspan.distribute(torch.nn.Linear(4, 2))
        >>> model(torch.zeros(3, 4)).shape
        torch.Size([3, 2])
    """
    if not isinstance(model, nn.Module):
        raise PlanError(
            f"distribute takes a torch.nn.Module, not a {type(model).__name__}.",
            hint="model = farspan.distribute(model)",
        )
    if hasattr(model, _PLAN):
        raise PlanError("this model has been distributed already.", hint="call farspan.distribute(model) once")
    engine = engine_of_this_thread(seed)
    adapt_trainers()
    if not engine.recorder.roots:
        engine.sow(seed)  # from_rank may have made the engine
    trial = current_trial()
    chosen = trial.plan_for(model) if trial is not None else _choose_plan(model, plan, stages, engine.num_ranks)
    if remat is not None and trial is None:
        chosen = dataclasses.replace(chosen, remat=remat)
    if schedule is not None and trial is None:
        chosen = dataclasses.replace(chosen, schedule=schedule)
    parameters, aliases = tied(model)
    resolved = resolve(
        chosen,
        parameters=parameters,
        aliases=aliases,
        modules=[name for name, _ in model.named_modules()],
        world_size=engine.num_ranks,
        indivisible=keepers(model),
    )
    names = [name for name, _ in model.named_modules(remove_duplicate=False)]
    again = resolve_remat(chosen.remat, names, repeated_blocks(model))
    engine.agreement.agree_on("plan", chosen.to_json())
    engine.agreement.agree_on(
        "model", "\n".join(f"{name} {tuple(item.shape)}" for name, item in model.named_parameters())
    )
    sites = [site_of(parse_place(text)) for text in chosen.stages]
    numbers = [engine.stage_number(site, occurrence) for site, occurrence in _occurrences(sites)]
    number = len(engine.recorder.roots)
    placed = place(
        model,
        engine.recorder,
        owner=resolved.owner,
        leaf_stage=resolved.leaf_stage,
        stages=numbers,
        is_mine=[site.rank == engine.rank for site in sites],
        devices=[site.device for site in sites],
        prefix=f"model{number}." if number else "",
    )
    engine.lookahead = chosen.lookahead
    engine.schedule = chosen.schedule
    engine.least_weight_work_s = LEAST_WEIGHT_WORK_S[chosen.schedule]
    engine.add_parameters(placed)
    engine.executor.remat.add(model, again)
    watch_optimizers()
    object.__setattr__(model, _PLAN, chosen)
    engine.agreement.share_generators()
    engine.console.show_plan(chosen)
    return model


def plan_of(model: nn.Module) -> Plan:
    """The plan a distributed model runs under: prints as a table; `save(path)` writes JSON that can be edited."""
    plan = getattr(model, _PLAN, None)
    if plan is None:
        raise PlanError("this model has not been distributed.", hint="model = farspan.distribute(model)")
    return plan


def from_rank(rank: int, batch: Any) -> Any:
    """Give all ranks a batch that one of them alone has read.

    Without it every rank reads the same batches by itself. Every rank calls it alike, once for each batch. The others
    get the structure and its plain values at once; its tensors are recorded ones on every rank, and their data go only
    where a call needs them, or where they are read (`item`, `tolist`). It runs nothing of what has been recorded. With
    one rank `batch` is returned as it is.

    The random generators of all ranks become those of `rank` wherever they differ, for loaders draw from them.

    Args:
        rank: The one that has read.
        batch: On that rank: lists, tuples, dictionaries, dataclasses, with tensors, numbers and strings. What the
            others pass does not count. Its tensors must not be written to before what uses them has run.

    Returns:
        The batch, with recorded tensors in the place of its tensors.

    Raises:
        PlanError: There is no such rank.
        RecordError: The batch holds what cannot be sent, such as a tensor that requires grad; on every rank.
        DivergenceError: The ranks name different ranks.

    Example:
        >>> import torch, farspan
        >>> reader = iter([{"x": torch.ones(2, 3), "name": "first"}])  # on rank 0; the others need none
        >>> batch = farspan.from_rank(0, next(reader))
        >>> batch["name"], batch["x"].shape, batch["x"].sum().item()
        ('first', torch.Size([2, 3]), 6.0)
    """
    return engine_of_this_thread(0).inputs.from_rank(rank, batch)


@contextlib.contextmanager
def on(place: str) -> Iterator[None]:
    """Let the operations in the body run at a place: those outside modules that the plan places as a whole.

    In a model's forward or in the loop. An operation otherwise runs where its largest input is. Module calls stay where
    the plan puts them, an operation that writes in place stays with what it writes, and operations on plain tensors
    alone (masks, positions) run on every rank as ever. The innermost `on` counts.

    `x.to("rank:1/cuda:0")` moves one tensor: the result is a copy that lives there (or `x` itself, if it does), its
    gradient flows back, and operations on it run there by their usual rule. A plain tensor, which every rank has, gives
    a recorded one that lives there; nothing is sent for it.

    A module in whose forward a place is named is not called as one unit: its parts are.

    Args:
        place: "rank:1", "rank:1/cuda:0", "rank:1/cpu". A rank alone means whichever of its devices an input is on,
            else the one where the plan has put something.

    Raises:
        PlanError: There is no such rank, or it is no place.
        RecordError: A module that runs as one unit reaches it in one run and did not in another.

    Example:
        >>> import torch, farspan
        >>> model = farspan.distribute(torch.nn.Linear(4, 2))
        >>> with farspan.on("rank:0"):
        ...     loss = model(torch.zeros(3, 4).to("rank:0")).square().mean()
    """
    engine = current_engine()
    if engine is None:
        stages_at([], place, num_ranks_to_be())  # nothing is recorded yet: only its form counts
        yield
        return
    with glue_at(engine.recorder, place):
        yield


def flush() -> None:
    """Run all that has been recorded. Every rank must call it; the loop needs it only to time or to free memory."""
    engine = current_engine()
    if engine is not None:
        engine.flush("farspan.flush()")


def last_step() -> StepRecord | None:
    """How the last step ran (duration, bubble), once one has run. Every rank has it."""
    engine = current_engine()
    return None if engine is None else engine.last_training_step


def _choose_plan(model: nn.Module, plan: Any, stages: int | str, num_ranks: int) -> Plan:
    if stages != "auto" and (not isinstance(stages, int) or isinstance(stages, bool) or stages < 1):
        raise PlanError(f"stages={stages!r} is not a number of stages.", hint='stages="auto", or an integer from 1')
    if isinstance(plan, str) and plan == "auto":
        num_stages = num_ranks if isinstance(stages, str) else stages
        return auto_plan(
            atoms(model, num_stages), num_stages=num_stages, devices=[f"rank:{rank}" for rank in range(num_ranks)]
        )
    if isinstance(plan, Plan):
        chosen = plan
    elif isinstance(plan, Mapping):
        chosen = Plan.from_mapping(plan)
    elif isinstance(plan, (str, os.PathLike)):
        chosen = Plan.load(Path(plan))
    else:
        raise PlanError(
            f"plan={plan!r} is no plan.",
            hint='plan="auto", a farspan.Plan, the path of its JSON file, or a mapping of names',
        )
    if isinstance(stages, int) and stages != chosen.num_stages:
        raise PlanError(
            f"stages={stages} was asked for, the plan has {chosen.num_stages}.",
            hint="leave out one of plan= and stages=",
        )
    return chosen


def _occurrences(sites: list[StageSite]) -> list[tuple[StageSite, int]]:
    """Each site with how many stages before it have the same rank and device."""
    seen: dict[tuple[int, torch.device], int] = {}
    result: list[tuple[StageSite, int]] = []
    for site in sites:
        key = (site.rank, site.device)
        result.append((site, seen.get(key, 0)))
        seen[key] = seen.get(key, 0) + 1
    return result
