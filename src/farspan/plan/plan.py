"""The plan: an ordered list of stages, and which stage owns each module or parameter.

    stages                 placement (name or glob -> stage)
    0  rank:0              "embed": 0   "blocks.0": 0   "blocks.1": 0
    1  rank:1/cuda:0       "blocks.*": 1                "head": 1

What the names mean for a given model is the business of `farspan.plan.resolve`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from farspan.documents import read_text
from farspan.errors import PlanError
from farspan.outputs import write_text
from farspan.plan import check, explain, plan_document, table
from farspan.plan.team import format_places, is_split, parse_places

__all__ = ["PLANNED_SECONDS", "Plan"]

PLANNED_SECONDS = "micro_batch_s"
"""The estimate that steps are compared with: seconds of a stage for each micro-batch."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Plan:
    """A placement of a model on ranks: the one thing that crosses from planning to running.

    Attributes:
        stages: Device string of each pipeline stage ("rank:1", "rank:1/cuda:0"); the index is the stage. The members
            of a wide stage ("rank:0+rank:1") take micro-batches in turn, those of a split one ("rank:0&rank:1") run
            each layer together; both divide its parameters among them.
        placement: Name of a module or parameter, or glob pattern of names, to stage; "" is the whole model. Among
            patterns that match the same name the later wins, so the order counts.
        schedule: "auto": the backward of a stage that another rank waits for is split where that is likely to pay, and
            its weight gradients fill the gaps; "zero-bubble": wherever another rank waits; "1f1b": every backward is
            one task, in turns with the forwards; "gpipe": all forwards, then all backwards.
        lookahead: How many boundary buffers a rank may hold beyond one for each stage, to hide transfers: one for a
            receive that is posted ahead, the others for micro-batches in flight beyond what the schedule needs ("1f1b"
            and "gpipe": all for receives). `farspan plan` asks for more where that makes the step shorter and fits.
        remat: What is computed again in the backward instead of being kept from the forward: True for each repeated
            block (without any, each leaf), or names of modules (or globs) for each call of these.
        micro_batches: Into how many micro-batches farspan cuts each batch that the model is called with in training; 1
            leaves batches as they are.
        gradient_reduction: How gradients are added up that come from other ranks: those of wide stages, and of tied
            weights. "exact": one by one, in the loop's order, to the last bit as in one process; "sum": each rank adds
            up those of its micro-batches and sends them once a step, which is less to send, and differs by rounding.
        tensor_layouts: How matrices of split stages are to lie on the members, where that is not to follow from what
            the model does: name of a module or parameter, or glob, to "column", "row", "vocab" (by the words of a
            vocabulary), "whole", or "sequence" (as it follows, with sums divided along the sequence). What is said of
            a part beats what is said of the whole.
        estimates: Numbers per stage for people to read: "num_parameters", "parameter_bytes", "share" (of the cost,
            of 1), and from `farspan plan` "peak_bytes", "limit_bytes" (memory), "busy" (share of the step), and
            "micro_batch_s" (seconds of work for each). Two plans that differ only here are equal.

    Raises:
        PlanError: A value is not of the right type, or names a stage that does not exist.

    Example:
        >>> plan = Plan.from_mapping({"embed": "rank:0", "blocks.*": "rank:1"})
        >>> plan.stages, plan.placement
        (('rank:0', 'rank:1'), {'embed': 0, 'blocks.*': 1})
        >>> Plan.from_json(plan.to_json()) == plan
        True
    """

    stages: tuple[str, ...]
    placement: Mapping[str, int]
    schedule: str = "auto"
    lookahead: int = 2
    remat: bool | tuple[str, ...] = False
    micro_batches: int = 1
    gradient_reduction: str = "exact"
    tensor_layouts: Mapping[str, str] = field(default_factory=dict[str, str])
    estimates: Mapping[str, Sequence[float]] = field(default_factory=dict[str, Sequence[float]])

    def __post_init__(self) -> None:
        stages = check.stages(self.stages)
        placement = check.placement(self.placement, len(stages))
        check.schedule(self.schedule)
        check.lookahead(self.lookahead)
        remat = check.remat(self.remat)
        check.micro_batches(self.micro_batches)
        check.gradient_reduction(self.gradient_reduction)
        estimates = check.estimates(self.estimates, len(stages))
        layouts = check.tensor_layouts(self.tensor_layouts)
        object.__setattr__(self, "tensor_layouts", layouts)
        object.__setattr__(self, "stages", stages)
        object.__setattr__(self, "placement", placement)
        object.__setattr__(self, "remat", remat)
        object.__setattr__(self, "estimates", estimates)

    def __eq__(self, other: object) -> bool:
        return self._key() == other._key() if isinstance(other, Plan) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._key())

    def __str__(self) -> str:
        return table.format_plan(
            stages=self.stages,
            placement=self.placement,
            schedule=self.schedule,
            num_ranks=self.num_ranks,
            remat=self.remat,
            estimates=self.estimates,
        )

    def explain(self, name: str) -> str:
        """Say where a module or parameter lies, by which entry, beside what, and what its stage takes.

        Raises:
            PlanError: No entry means it, or a name above it.

        Example:
            >>> print(Plan.from_mapping({"embed": "rank:0", "blocks.*": "rank:1"}).explain("blocks.3.mlp"))
            blocks.3.mlp lies on stage 1, rank:1, by the entry 'blocks.*'
              nothing else lies there
        """
        return explain.explain(name, stages=self.stages, placement=self.placement, estimates=self.estimates)

    @property
    def num_stages(self) -> int:
        """Returns how many pipeline stages there are."""
        return len(self.stages)

    @property
    def ranks(self) -> frozenset[int]:
        """The ranks that own a stage."""
        return frozenset(rank for stage in range(self.num_stages) for rank in self.ranks_of(stage))

    @property
    def num_ranks(self) -> int:
        """Returns how many ranks own a stage."""
        return len(self.ranks)

    def ranks_of(self, stage: int) -> tuple[int, ...]:
        """Returns the ranks that run `stage`, in the order in which they take micro-batches."""
        return tuple([place.rank for place in parse_places(self.stages[stage])])

    def is_split(self, stage: int) -> bool:
        """Returns whether the members of `stage` run each layer together."""
        return is_split(self.stages[stage])

    def rank_of(self, stage: int) -> int:
        """Returns the rank that runs `stage`: the first one, if there are several."""
        return self.ranks_of(stage)[0]

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, str | int]) -> Plan:
        """Make a plan from names (of modules or parameters, or globs) to device strings or numbers of ranks.

        Each distinct device string is a stage; stages are in order of their first rank, then of first appearance.

        >>> Plan.from_mapping({"blocks.0": "rank:0", "blocks.*": "rank:1/cpu"}).placement
        {'blocks.0': 0, 'blocks.*': 1}
        """
        places = {name: parse_places(text) for name, text in mapping.items()}
        written = {name: format_places(found, is_split=is_split(mapping[name])) for name, found in places.items()}
        first = {text: places[name][0].rank for name, text in written.items()}
        stages = sorted(dict.fromkeys(written.values()), key=first.__getitem__)
        return cls(stages=tuple(stages), placement={name: stages.index(text) for name, text in written.items()})

    def to_json(self) -> str:
        """Returns the plan as text to read and edit; the inverse of `from_json`, estimates included."""
        return plan_document.write(
            stages=self.stages,
            placement=self.placement,
            schedule=self.schedule,
            lookahead=self.lookahead,
            remat=self.remat,
            micro_batches=self.micro_batches,
            gradient_reduction=self.gradient_reduction,
            tensor_layouts=self.tensor_layouts,
            estimates=self.estimates,
        )

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Read what `to_json` wrote, or what a person made of it.

        Raises:
            PlanError: It is no plan; names the key at fault.
        """
        return cls._read(text, "this plan")

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write `to_json` to a file.

        Raises:
            FarspanError: It cannot be written; what was there before still is.
        """
        write_text(path, self.to_json())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Plan:
        """Read a plan from a file.

        Raises:
            PlanError: The file cannot be read or is no plan; names the file and the key at fault.
        """
        return cls._read(read_text(path, hint="farspan.plan_of(model).save(path)"), os.fspath(path))

    @classmethod
    def _read(cls, text: str, source: str) -> Plan:
        values = plan_document.read(text, source)
        try:
            return cls(**values)
        except PlanError as error:
            raise PlanError(f"{source}: {error.what}", why=error.why, hint=error.hint) from None

    def _key(self) -> tuple[object, ...]:
        ways = (self.schedule, self.lookahead, self.remat, self.micro_batches, self.gradient_reduction)
        return (self.stages, tuple(self.placement.items()), tuple(self.tensor_layouts.items()), *ways)
