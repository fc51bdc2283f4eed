"""The functions that a user calls: distribute a model, look at its plan, run what is queued."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from torch import nn

from farspan.adapters import adapt_trainers
from farspan.adapters.shares import number_of_groups, this_group
from farspan.errors import PlanError, naming_keywords
from farspan.execute.optimizers.watched_steps import watch_optimizers
from farspan.execute.process.world import (
    begin_recording,
    current_engine,
    engine_of_this_thread,
    num_ranks_to_be,
    rank_to_be,
)
from farspan.execute.shards.shards import begin_sharding, check_shard
from farspan.execute.step.step_record import StepRecord
from farspan.execute.teams import stages_at
from farspan.place.alone import runs_as_it_is
from farspan.place.asked_plan import check_seed, check_wide, choose_plan, hints_of
from farspan.place.deferred.context import deferred_init as deferred_init
from farspan.place.deferred.models import fill_all, guarded_on_error, open_model
from farspan.place.kept_plan import Widths
from farspan.place.measure.trial import current_trial
from farspan.place.measured import begin_measured, is_measuring
from farspan.place.mesh.axis import check_tensor_parallel, tensor_axis
from farspan.place.mesh.given import axes_of
from farspan.place.mesh.groups import GroupsChoice
from farspan.place.mesh.lanes import check_micro_batches, cut_batches
from farspan.place.mesh.tensor import with_sums
from farspan.place.places import place_first
from farspan.place.pretrained.load import load_pretrained as load_pretrained
from farspan.place.repartition.stragglers import watch_of
from farspan.place.suitable import built_model, check_is_new, check_model
from farspan.place.weights import agree_on_model
from farspan.plan import Plan
from farspan.planner import Hints
from farspan.record.ops.explicit_placement import ops_at
from farspan.record.parameters.copying import plan_by_model
from farspan.state.counts import count_on

__all__ = [
    "data_rank",
    "data_world",
    "deferred_init",
    "distribute",
    "flush",
    "from_rank",
    "last_step",
    "load_pretrained",
    "on",
    "plan_of",
    "rank",
]

_Model = TypeVar("_Model", bound=nn.Module)


@guarded_on_error
@naming_keywords
def distribute(
    model: _Model | Callable[[], _Model],
    *,
    plan: str | os.PathLike[str] | Plan | Mapping[str, str | int] = "auto",
    stages: int | str = "auto",
    remat: bool | Sequence[str] | None = None,
    schedule: str | None = None,
    gradient_reduction: str | None = None,
    pins: Mapping[str, str | int] | None = None,
    together: Sequence[Sequence[str]] = (),
    max_memory: str | float | Mapping[str | int, str | float] | None = None,
    measure: bool | None = None,
    replan: bool | None = None,
    micro_batches: int | str | None = None,
    seed: int | None = None,
    data_parallel: int | str | None = None,
    shard: str | None = None,
    tensor_parallel: int | str | Mapping[str, int | str] | None = None,
    comm: Any = None,
    mesh: Any = None,
) -> _Model:
    """Split `model` over the ranks of this program and return it: same object, same class, same state_dict keys.

    Every rank calls it alike, and then runs the training loop it would run alone. Rank 0's parameters and buffers
    become everybody's, as with DDP, and so do its random generators. A launcher (`farspan run`, torchrun, anything that
    sets RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT) says which ranks there are; without one the world is one rank, and
    the program runs as it would without farspan unless an argument asks for what that does not have.
    torch.distributed stays as the script has set it up, or not: the ranks have groups of their own.

    Args:
        model: Any module, of the same class and shapes on every rank; its values are rank 0's. One that was built in
            `farspan.deferred_init()` gets its data here, on each rank just what that owns. A function without
            arguments is called to build one so: `lambda: Net(config)`.
        plan: "auto"; a `Plan`; the path of a plan's JSON file; or a mapping from names of modules or parameters (or
            glob patterns of them) to "rank:R" or "rank:R/device"; R alone, a number, will do.
        stages: How many pipeline stages an automatic plan has; one for each rank by default. If there are fewer stages
            than ranks, slow ones get several, which take micro-batches in turn. "wide": as many stages, of as many
            ranks each, as have the shortest step, found from what the first step takes. Gradients are then added up
            as `gradient_reduction` says; where it says nothing exactly, if that hides behind compute, else as sums.
        remat: Which activations are computed again in the backward instead of being kept from the forward; gradients
            are the same to the last bit. True: those of each repeated block, one block at a time (the entries of
            module lists, and of a `Sequential` of several of a kind; in a model without any, each module that is
            called as a whole). Names of modules (or glob patterns, `["blocks.*.mlp"]`): each call of one of these,
            wherever it runs. False: none. None: what the plan says.
        schedule: In which order each rank runs the forwards and backwards of the micro-batches; gradients are the same
            to the last bit. "auto": weight gradients are deferred, to fill gaps, where that is likely to pay;
            "zero-bubble": wherever another rank waits; "1f1b": nowhere (interleaved where a rank has several stages);
            "gpipe": nor does a backward start before all forwards. None: what the plan says.
        gradient_reduction: How gradients are added up that come from other ranks: those of wide stages ("rank:0+rank:1"
            in a plan), and of tied weights. "exact": in the loop's order, to the last bit as in one process; "sum":
            each rank adds up those of its micro-batches and sends them once a step, which is less to send, and differs
            by rounding. None: what the plan says.
        pins: What an automatic plan is to place where: names of modules or parameters (or glob patterns of them) to
            "rank:R" or "rank:R/device". The plan chooses for the rest.
        together: Groups of such names; what a group means is on one stage: `[["embed", "head"]]`.
        max_memory: The most that a rank of an automatic plan may hold: bytes, "14GiB", or {"rank:0": "14GiB"}. Before
            the first step that is of parameters and their gradients; where the step is measured, of everything.
        measure: Whether an automatic plan is searched again, from what the first training step takes on each rank, and
            parameters then move to it, once, between two steps. Until then the plan is an estimate, or what was found
            the last time (`~/.cache/farspan/plans`). Not with `remat`, nor with a number of stages that is not that of
            the ranks. None: unless the environment says FARSPAN_MEASURE=0.
        replan: Whether a plan whose first step was measured is searched again while the program trains, when a rank has
            become at least twice as slow as measured, compared with the others, or half as slow, for 30 s of training
            steps (the environment's FARSPAN_STRAGGLER says other seconds). Parameters then move between two steps, if
            another plan is likely to win more than predictions are off. Numbers stay the same; a line says what was
            found and done. Any other plan stays as it is, and the line is all. None: yes.
        micro_batches: How many micro-batches a batch is cut into where the model is called in training, so that the
            ranks overlap in a loop without gradient accumulation, each of at least two rows; "auto": the planner
            chooses, by the work of the first batch (`plan_of` says what). The program goes on as with the whole batch;
            numbers differ from its numbers by rounding, and dropout draws other masks. It is done only where it is
            certain: a model whose rows depend on each other (BatchNorm), or that counts its calls, stays whole, and the
            reason is said once. None: what the plan says; batches stay whole where it says nothing.
        seed: None: dropout masks and other random numbers drawn inside the model are those of the program without
            farspan, and torch's generator ends where it would end. A number: each call seeds its own draws by where in
            the model it stands, the same for every plan; nothing that the program draws itself is moved by them.
        data_parallel: Into how many groups of equal size the ranks are divided; group 0 has the first ones, and so on.
            Each group holds the whole model and trains it on batches of its own (`farspan.data_rank` says which), the
            gradients of all are averaged before the program reads them, at the latest when an optimizer steps. A plan,
            `stages`, "rank:R" and `farspan.from_rank` are about the ranks of one group, counted from 0. "auto": the
            number whose simulated step trains most batches a second, of those whose weights, gradients and optimizer
            state fit. None: as in the first call; one group.
        shard: What the groups divide among them: the state of the "optimizer", or the data of "parameters" too, which
            come when an operation needs them. Numbers stay the same, bit for bit. None: nothing.
        tensor_parallel: How many ranks run each layer of a stage together: each has some of the columns or rows of a
            matrix, and of the heads of an attention. What can be split is found by what the model does with it, and
            checked by numbers; the rest stays whole, and one line says why. Numbers differ by rounding from those of
            one process, and are the same each time. An automatic plan has as many stages as the ranks make; in a plan
            of one's own such a stage is "rank:0&rank:1". "auto": the number whose simulated step is the shortest, of
            those that fit. A mapping asks for single matrices: `{"degree": 2, "lm_head": "vocab", "*.gate": "whole"}`,
            names of modules or parameters (or glob patterns) to "column", "row", "vocab" or "whole", or "sequence",
            which divides sums along the sequence; without "degree" all ranks run each layer, or those of a plan of
            one's own.
        comm: A communicator of mpi4py, which the program goes on using: all its ranks call this, and all goes over MPI.
        mesh: A `DeviceMesh` of all ranks with axes "dp", "pp", "tp" (or some of them, in this order) in the place of
            `data_parallel`, `stages` and `tensor_parallel`.

    Returns:
        `model` itself.

    Raises:
        PlanError: The plan does not fit the model or the number of ranks, the ranks cannot be divided into so many
            groups or stages, `remat` names no module of the model, there is no such schedule, or `pins`, `together` and
            `max_memory` name what is not there, contradict each other or leave no plan.
        DivergenceError: The ranks' models have different parameters or buffers (names, shapes, dtypes, which are
            trained), or their plans differ.
        LaunchError: The other ranks cannot be found.

    Example:
        >>> import torch, farspan
        >>> model = farspan.distribute(torch.nn.Linear(4, 2))
        >>> model(torch.zeros(3, 4)).shape
        torch.Size([3, 2])
    """
    model = built_model(model)
    check_model(model)
    if mesh is not None:
        given = {"data_parallel": data_parallel, "stages": None if stages == "auto" else stages}
        ways = axes_of(mesh, num_ranks_to_be(), **given, tensor_parallel=tensor_parallel)
        data_parallel, stages, tensor_parallel = ways
    check_seed(seed)
    check_micro_batches(micro_batches)
    check_shard(shard, data_parallel)
    check_tensor_parallel(tensor_parallel, plan, pins=pins, together=together, max_memory=max_memory, measure=measure)
    trial = current_trial()
    seed = 0 if trial is not None and seed is None else seed  # it is about times, and may have no data
    open_model(model)
    groups: Any = GroupsChoice(model, micro_batches) if data_parallel == "auto" else data_parallel
    engine = engine_of_this_thread(seed, groups if trial is None else None, comm)
    asked = (pins, max_memory, remat, schedule, gradient_reduction, seed, micro_batches, tensor_parallel)
    is_all_open = plan == stages == "auto" and not together and all(each is None for each in asked)
    if is_all_open and engine.groups.num_groups == 1 and runs_as_it_is(engine, model):
        fill_all(model)
        plan_by_model[model] = chosen = choose_plan(model, plan, Hints(), 1)
        engine.console.show_plan(chosen)
        return model
    axis = tensor_axis(engine, model, tensor_parallel, plan, stages, micro_batches)
    begin_recording(engine)
    adapt_trainers()
    check_is_new(engine, model)
    if not engine.recorder.roots:
        engine.seed_draws(seed)  # from_rank may have made the engine
    begin_sharding(engine, shard)
    count_on(engine)
    agree_on_model(engine, model)
    hints = hints_of(plan, pins=pins, together=together, max_memory=max_memory, stages=stages, remat=remat)
    if trial is not None:
        estimated = chosen = trial.plan_for(model, hints)
        if isinstance(micro_batches, int):
            estimated = dataclasses.replace(chosen, micro_batches=micro_batches)
        elif micro_batches == "auto":
            estimated = trial.estimate_for(model)
        place_first(engine, model, chosen)
    else:
        chosen = choose_plan(model, plan, hints, engine.num_ranks, axis.places, may_be_wide=stages == "wide")
        if isinstance(micro_batches, int):
            chosen = dataclasses.replace(chosen, micro_batches=micro_batches)
        if remat is not None:
            chosen = dataclasses.replace(chosen, remat=remat)
        if schedule is not None:
            chosen = dataclasses.replace(chosen, schedule=schedule)
        if gradient_reduction is not None:
            chosen = dataclasses.replace(chosen, gradient_reduction=gradient_reduction)
        estimated = chosen = with_sums(axis.of(chosen, engine.num_ranks), gradient_reduction)
        is_open = (
            not axis.places
            and (
                isinstance(plan, str) and plan == "auto" and hints.stages in (None, engine.num_ranks) and remat is None
            )
            and engine.groups.num_groups == 1
        )
        if measure and not is_open:
            raise PlanError(
                "measure=True is for automatic plans.",
                why="plan= or remat= has chosen already, stages= is not the number of ranks, or there are groups\n"
                "(data_parallel=), which would measure different times.",
                hint="leave out the one or the other",
            )
        if stages == "wide":
            check_wide(is_open=is_open, is_measured=is_measuring(measure))
        watch = watch_of(engine, model, replan, is_measured=is_open and is_measuring(measure))
        if is_open and is_measuring(measure):
            widths = Widths(gradient_reduction) if stages == "wide" else None
            chosen = begin_measured(engine, model, chosen, hints, schedule, widths, watch)
        else:
            place_first(engine, model, chosen)
            watch.begin(chosen)
    watch_optimizers()
    plan_by_model[model] = chosen
    cut_batches(engine, model, estimated, micro_batches)
    engine.agreement_of_all.share_generators()
    engine.console.show_plan(chosen)
    if isinstance(groups, GroupsChoice) and groups.found is not None:
        engine.console.say(groups.said())
    if axis.said:
        engine.console.say(axis.said)
    return model


def plan_of(model: nn.Module) -> Plan:
    """Returns the plan a distributed model runs under: prints as a table; `save(path)` writes JSON that can be
    edited."""
    plan = plan_by_model.get(model)
    if plan is None:
        why = "a plan is of the object that distribute was given, not of a copy or of a module around it."
        raise PlanError("this model has not been distributed.", why=why, hint="model = farspan.distribute(model)")
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
    return engine_of_this_thread(None).inputs.from_rank(rank, batch)


@contextlib.contextmanager
def on(place: str) -> Iterator[None]:
    """Let the operations in the body run at a place: those outside modules that the plan places as a whole.

    In a model's forward or in the loop. An operation otherwise runs where the latest of its inputs was made: with a
    skip and what later layers made of it, on the later stage. Module calls stay where the plan puts them, an operation
    that writes in place stays with what it writes, and operations on plain tensors alone (masks, positions) run on
    every rank as ever. The innermost `on` counts.

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
        stages_at([], place, [], num_ranks_to_be())  # nothing is recorded yet: only its form counts
        yield
        return
    with ops_at(engine.recorder, place):
        yield


def rank() -> int:
    """Returns the number of this process among those of its group (all, without `data_parallel`); 0 without a launcher.

    Hardly anything needs it: a script that is run by all ranks alike prints and saves as in one process.

    Example:
        >>> import farspan
        >>> farspan.rank()
        0
    """
    engine = current_engine()
    return rank_to_be() if engine is None else engine.rank


def data_rank() -> int:
    """Returns the number of the group of ranks that this process is in, for samplers: from 0, below `data_world()`.

    Example:
        >>> import farspan
        >>> batches = list(range(8))
        >>> batches[farspan.data_rank() :: farspan.data_world()]
        [0, 1, 2, 3, 4, 5, 6, 7]
    """
    return this_group()


def data_world() -> int:
    """Returns the number of groups, each of which trains on batches of its own; 1 unless `distribute(data_parallel=k)`
    says so.

    Example:
        >>> import farspan
        >>> farspan.data_world()
        1
    """
    return number_of_groups()


def flush() -> None:
    """Run all that has been recorded. Every rank must call it; the loop needs it only to time or to free memory."""
    engine = current_engine()
    if engine is not None:
        engine.flush("farspan.flush()")


def last_step() -> StepRecord | None:
    """Returns how the last step ran (duration, bubble), once one has run. Every rank has it; a program of one process
    has none, unless an argument of `distribute` has made it one that is recorded.
    """
    engine = current_engine()
    return None if engine is None else engine.last_training_step
