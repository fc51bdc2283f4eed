"""What one rank does in one step: its tasks in order, and for every channel the order of its messages."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from farspan.graph import Call, Edge, Part, Segment, Value
from farspan.schedule import Kind, Schedule

__all__ = ["PROLOGUE", "Action", "Message", "Program"]

PROLOGUE = -1
"""In the place of a task: what is sent before the first one."""


class Message:
    """The tensors that one task sends to one rank: one message (or a few, if they are large)."""

    __slots__ = (
        "dst",
        "is_between_gpus",
        "is_gradient",
        "items",
        "src",
        "stage",
        "strides",
        "task",
        "tensors",
        "works",
    )

    def __init__(self, task: int, src: int, dst: int, *, is_gradient: bool) -> None:
        self.task = task
        """The sending task's index; -1 for what is sent before the first task."""
        self.src = src
        self.dst = dst
        self.stage = -1
        """The stage that receives, and so the device."""
        self.is_gradient = is_gradient
        self.is_between_gpus = False
        self.items: dict[Value | Edge, None] = {}
        self.tensors: list[Any] = []
        self.strides: Any = None
        """Of the tensors, as they come with them."""
        self.works: list[Any] = []

    def describe(self) -> str:
        return ", ".join(item.describe() for item in self.items)


@dataclass(slots=True)
class Action:
    """One task of this rank, with its messages."""

    work: Segment | Part
    kind: Kind
    micro_batch: int
    """Its number, from 0; -1 for what belongs to none."""
    leaves_weights: bool = False
    """Whether this backward leaves weight gradients for a later step."""
    receives: list[Message] = field(default_factory=list)
    """Must have arrived before the task runs."""
    posts: list[Message] = field(default_factory=list)
    """Receives to post before the task runs: its own, those of the next `lookahead` tasks, and all before them."""
    sends: list[Message] = field(default_factory=list)


@dataclass(slots=True)
class Program:
    """One rank's part of a step."""

    actions: list[Action]
    prologue_sends: list[Message]
    prologue_receives: list[Message]
    reaches: dict[int, int]
    """For each graph that ends with a backward, the first graph that this goes through; by their indices."""
    released: list[Call]
    """Calls, of all ranks, through which no later backward can go."""
    parts: list[Part]
    """The backward work of this rank, and what it knows of that of others."""
    gpu_channels: set[tuple[int, int, int]]
    """(source, destination, channel) of everything that goes from one GPU to another, on all ranks."""
    num_micro_batches: int
    schedule: Schedule
    """Of all ranks."""
