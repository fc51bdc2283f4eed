"""A trial: the program runs up to its first steps, so that it is known what they take, and goes no further."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn, Self

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from farspan.call.draws.scope import active
from farspan.call.remat.repeated_blocks import repeated_blocks
from farspan.control.channel import SideChannel
from farspan.devices import name_of_device
from farspan.errors import PlanError
from farspan.execute.engine import Engine
from farspan.execute.optimizers.states import placed_in
from farspan.execute.process.world import current_engine, deadline_s, forget_engine, use_engine
from farspan.execute.teams import device_of
from farspan.place.measure.assemble import assemble, memory_of
from farspan.place.measure.fake_parameters import with_fake_parameters
from farspan.place.measure.profiling_executor import ProfilingExecutor, needs_data
from farspan.place.measure.state_sizes import state_bytes
from farspan.plan import Plan, resolve_remat
from farspan.plan.hints import Hints
from farspan.planner.auto import auto_plan
from farspan.profile import ProfileCache, this_device, units_of
from farspan.profile.step import StepProfile
from farspan.record.intercept import activate, install
from farspan.record.recorder import Recorder
from farspan.torch_private import fake_mode, is_fake_limit, put_modes, take_modes_of

__all__ = ["Trial", "TrialEnded", "current_trial"]

_LEAST_TIMED = 4
"""Micro-batches, the first of which is not timed."""
_thread = threading.local()


class TrialEnded(BaseException):
    """Ends a trial, when all is known: no `except Exception` of the program is to go on from here."""


def current_trial() -> Trial | None:
    """Returns the trial that runs in this thread, if there is one."""
    return getattr(_thread, "trial", None)


class Trial:
    """Runs the body of `with Trial(...)` on one rank, alone, until its first steps are over.

    Args:
        num_devices: For how many devices the model is to be cut: more devices, finer units. Asked for when the program
            distributes its model.
        is_dry: Nothing is computed; the work is counted.
        is_hollow: The model's weights are never there; only for what is dry.
        cache: Where measured profiles are kept; None for nowhere.
        hints: For the plan that is wanted; they win over those of the program.
        progress: Called after each task of what is measured, with how much of it is done, 0 to 1.

    Attributes:
        hints: Those and the program's, once it has distributed its model.

    Example:
        >>> import torch, farspan
        >>> with Trial(num_devices=lambda: 2) as trial:
        ...     model = farspan.distribute(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)))
        ...     optimizer = torch.optim.SGD(model.parameters())
        ...     for _ in range(9):
        ...         model(torch.ones(2, 4)).sum().backward()
        ...         optimizer.step()
        >>> [unit.name for unit in trial.profile().units]
        ['0', '1']
    """

    def __init__(
        self,
        *,
        num_devices: Callable[[], int],
        is_dry: bool = False,
        has_fake_weights: bool = False,
        cache: ProfileCache | None = None,
        hints: Hints | None = None,
        progress: Callable[[float], None] = lambda share: None,
    ) -> None:
        self.hints = Hints() if hints is None else hints
        self.num_devices = num_devices
        self.is_dry = is_dry
        self.mode = fake_mode() if is_dry else None
        self._fake = ExitStack()
        self.has_fake_weights = has_fake_weights
        self._names: list[str] = []
        self._num_micro_batches = 0
        self._is_in_step = False
        self._profile: StepProfile | None = None
        self._progress = progress
        self._cache = cache
        self._path: Path | None = None

    def __enter__(self) -> Self:
        install()
        self._outer = current_engine()
        self._outer_modes = [] if self._outer is None else take_modes_of(self._outer.recorder)
        if self.mode is not None and self.has_fake_weights:
            self._fake.enter_context(with_fake_parameters(self.mode))
        recorder = Recorder()
        recorder.batches.has_numbers = not self.is_dry
        self._engine = Engine(recorder, SideChannel.alone(), None, seed=0, deadline_s=deadline_s())
        self._profiler = self._engine.executor = ProfilingExecutor(
            self._engine,
            mode=self.mode,
            ended=self._end,
            about_to_time=self._about_to_time,
            has_run=self._has_run,
        )
        self._hook = register_optimizer_step_pre_hook(self._before_step)
        use_engine(self._engine)
        activate(recorder)
        _thread.trial = self
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> bool:
        _thread.trial = None
        self._fake.close()
        self._hook.remove()
        take_modes_of(self._engine.recorder)
        if self._outer is None:
            forget_engine()
        else:
            use_engine(self._outer)
            put_modes(self._outer_modes)
            active.recorder = self._outer.recorder if self._outer_modes else None
        if isinstance(error, TrialEnded):
            return True
        if self.is_dry and error is not None and is_fake_limit(error):
            raise needs_data(error) from error
        return False

    def plan_for(self, model: nn.Module, hints: Hints) -> Plan:
        """Returns the plan that the trial runs under: each unit that can be placed is a stage of its own.

        Args:
            model: The program's.
            hints: The program's.

        Raises:
            PlanError: It is the second model, or a hint matches nothing in it.
        """
        self._fake.close()
        if self._names:
            raise PlanError(
                "the program distributes a second model.",
                why="farspan plan knows the step of one model.",
                hint="a script that trains one of them",
            )
        self.hints = self.hints.over(hints)
        apart = self.hints.patterns
        if self.hints.remat:
            names = [name for name, _ in model.named_modules(remove_duplicate=False)]
            again = resolve_remat(self.hints.remat, names, repeated_blocks(model))
            self.hints = replace(self.hints, remat=again)
            apart += again
        self._names = [unit.name for unit in units_of(model, max(self.num_devices(), 2), apart)]
        placement = {name: stage for stage, name in enumerate(self._names)}
        if not placement:
            raise PlanError("the model has no parameters.", why="there is nothing to place.")
        return Plan(stages=("rank:0",) * len(placement), placement=placement, schedule="1f1b")

    def estimate_for(self, model: nn.Module) -> Plan:
        """Returns the plan with which a run on all devices would begin, as far as `micro_batches="auto"` asks."""
        units = units_of(model, max(self.num_devices(), 2), self.hints.patterns)
        count = min(self.num_devices(), len(units))
        return auto_plan(units, num_stages=count, devices=[f"rank:{rank}" for rank in range(count)])

    def profile(self) -> StepProfile:
        """Returns the costs of a step.

        Raises:
            PlanError: The program has ended without a step.
        """
        if self._profile is not None:
            return self._profile
        what = "trained a distributed model" if self._names else "called farspan.distribute"
        raise PlanError(
            f"the program has ended, and has not {what}.",
            why="its first training step says what there is to plan.",
            hint="model = farspan.distribute(model), then a step: loss.backward(); optimizer.step()",
        )

    def _before_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if current_trial() is not self or not placed_in(optimizer, self._engine.recorder.placed):
            return
        self._is_in_step = True
        if self._engine.recorder.has_pending():
            self._engine.flush("optimizer.step()")
        self._num_micro_batches = self._num_micro_batches or self._profiler.num_micro_batches
        if self._profiler.num_micro_batches >= _LEAST_TIMED:
            self._end()

    def _has_run(self, num_run: int, num_known: int) -> None:
        num_seen = self._profiler.num_micro_batches
        self._progress(num_run / num_known * min(1.0, num_seen / _LEAST_TIMED))

    def _about_to_time(self, signature: tuple[object, ...]) -> None:
        """End here with what was measured before, if it was."""
        if self._cache is None:
            return
        here = (torch.__version__, this_device(), torch.get_num_threads(), self._names)
        self._path = self._cache.path_of((*here, signature))
        known = self._cache.load(self._path)
        if known is None:
            return
        parameters = self._engine.parameters
        states, notes = state_bytes({id(item.tensor): item.tensor for item in parameters.values()})
        kept = [memory_of(parameters, stage, states) for stage in range(len(self._names))]
        units = tuple(
            replace(unit, trained_bytes=trained, memory_bytes=memory)
            for unit, (trained, memory) in zip(known.units, kept, strict=True)
        )
        self._profile = replace(known, units=units, notes=(*known.notes, *notes))
        raise TrialEnded

    def _uncut(self) -> list[str]:
        """Says why batches were not cut, where the program asks for it."""
        models = self._engine.recorder.batches.models.values()
        return [f"batches are not cut into micro-batches: {reason}" for model in models for reason in model.reasons]

    def _end(self) -> NoReturn:
        placed = {id(item.tensor): item.tensor for item in self._engine.parameters.values()}
        states, notes = state_bytes(placed)
        notes += self._uncut()
        if self.is_dry and not self._is_in_step and self._profiler.num_micro_batches == 1:
            notes.append("the program reads a value after one micro-batch: --micro-batches says how many a step has")
        self._profile = assemble(
            self._profiler.measured(),
            self._names,
            parameters=self._engine.parameters,
            states=states,
            device=name_of_device(device_of(self._engine.teams[0].leader)),
            num_micro_batches=self._num_micro_batches or self._profiler.num_micro_batches,
            notes=notes,
        )
        if self._cache is not None and self._path is not None:
            self._cache.save(self._path, self._profile)
        raise TrialEnded
