"""The program of one rank for one step: its tasks in order, and for every channel the order of its messages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from farspan.graph import BackwardSegment, Call, Edge, Meta, Segment, Value
from farspan.plan import Worker
from farspan.schedule import Kind, Schedule

__all__ = ["PROLOGUE", "Action", "Channel", "Message", "Program"]

PROLOGUE = -1
"""Stands in place of a task for what is sent before the first one."""


class Channel(NamedTuple):
    """One direction between two workers of different ranks: messages arrive in the order of sending.

    Attributes:
        source: Who sends.
        target: Who receives.
        number: Distinguishes the channels from the one rank to the other: even for activations, odd for gradients, and
            of each two the second pair for parameters.
        is_between_gpus: Whether tensors go from the memory of one device to that of another; else through the host's.
    """

    source: Worker
    target: Worker
    number: int
    is_between_gpus: bool = False

    @property
    def is_gradient(self) -> bool:
        """Returns whether gradients go through it."""
        return bool(self.number & 1)

    @property
    def is_of_parameters(self) -> bool:
        """Returns whether values or gradients of parameters go through it, beside the tasks."""
        return bool(self.number & 2)


class Message:
    """The tensors that one task sends to one worker: one message (or a few, if they are large)."""

    __slots__ = (
        "channel",
        "dst",
        "is_between_gpus",
        "is_gradient",
        "items",
        "src",
        "strides",
        "task",
        "tensors",
        "works",
    )

    def __init__(self, task: int, channel: Channel, items: Sequence[Value | Edge]) -> None:
        self.task = task
        """The sending task's index; -1 for what is sent before the first task."""
        self.channel = channel
        self.src = channel.source.rank
        self.dst = channel.target.rank
        self.is_gradient = channel.is_gradient
        self.is_between_gpus = channel.is_between_gpus
        self.items = items
        self.tensors: list[Any] = []
        self.strides: Any = None
        """The strides of the tensors, as they come with them."""
        self.works: list[Any] = []

    def describe(self) -> str:
        return ", ".join(item.describe() for item in self.items)

    @property
    def metas(self) -> list[Meta]:
        """Returns the metadata of its items."""
        return [item.meta for item in self.items]

    @property
    def values(self) -> list[Value]:
        """Returns its items but for gradients."""
        return [item for item in self.items if isinstance(item, Value)]


class Reduction(NamedTuple):
    """A gradient of a parameter that is added to what its owner has: beside the tasks, when it arrives.

    Among the tasks of a rank, which has an order, it would wait for another rank, and what comes behind it with it.
    """

    part: BackwardSegment
    """The part of the backward that the gradient comes from; without a segment."""
    message: Message | None
    """The message that brings it; None where it is made on this rank."""


@dataclass(slots=True)
class Action:
    """A task of this rank, with its messages."""

    work: Segment | BackwardSegment
    kind: Kind
    micro_batch: int
    """Number of its micro-batch, from 0; -1 for what belongs to none."""
    leaves_weights: bool = False
    """True if this backward defers weight gradients to a later action."""
    receives: list[Message] = field(default_factory=list)
    """Must have arrived before the task runs."""
    posts: list[Message] = field(default_factory=list)
    """Receives to post before the task runs: its own, those of the next `lookahead` tasks, and all before them."""
    sends: list[Message] = field(default_factory=list)
    queue: int = 0
    """The worker that runs it: its order in the schedule."""
    after: list[Action] = field(default_factory=list)
    """Actions that this rank's other workers must have run before."""


@dataclass(slots=True)
class Program:
    """The part of one rank in a step."""

    actions: list[Action]
    """The actions of each worker in its order; the workers one after the other."""
    prologue_sends: list[Message]
    prologue_receives: list[Message]
    reductions: list[Reduction]
    """Reductions of this rank's parameters; those of each parameter are in the order in which they are added up."""
    reduction_messages: list[Message]
    """The messages that bring gradients; those of each channel in the order of sending."""
    late_reductions: frozenset[str]
    """The parameters of which they wait for the end of the step: it reads gradients as they were before, or tasks add
    to them too.
    """
    is_summed: bool
    """True if gradients are added up on the workers that make them."""
    carried: dict[Edge, Edge]
    """The chain on which gradients of a parameter, made on one worker, are added up there: from each to the next
    one."""
    replicas: frozenset[tuple[str, Worker]]
    """The parameters that members of wide stages get in this step, on all ranks."""
    reaches: dict[int, int]
    """For each graph that ends with a backward, the first graph that this goes through; by their indices."""
    released: list[Call]
    """Calls, of all ranks, through which no later backward can go."""
    parts: list[BackwardSegment]
    """The backward work of this rank, and what it knows of that of others."""
    gpu_channels: frozenset[Channel]
    """What goes from one GPU to another, on all ranks."""
    num_micro_batches: int
    schedule: Schedule
    """The schedule of all ranks."""
    likeness: object
    """The same object in the programs of steps that look alike."""

    @property
    def has_several_workers(self) -> bool:
        """Returns whether this rank has work for more than one of its devices."""
        return bool(self.actions) and self.actions[0].queue != self.actions[-1].queue
