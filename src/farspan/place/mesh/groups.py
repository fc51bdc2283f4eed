"""The number of groups that `data_parallel="auto"` stands for, by what rank 0 knows of the machines."""

from __future__ import annotations

from torch import nn

from farspan.cluster import within_host
from farspan.devices import current_device, is_accelerator, memory_bytes, name_of_device
from farspan.launch.environment import read_environment
from farspan.planner.mesh import GroupsForecast, Machine, best_groups, nominal_speeds
from farspan.profile import units_of
from farspan.units import format_bytes

__all__ = ["GroupsChoice", "nominal_machine", "nominal_micro_batches"]

_BETWEEN_HOSTS_BYTES_PER_S = 1.25e9
"""Ten gigabits: what is usual, for nothing has been measured yet."""
_MICRO_BATCHES_FOR_EACH_STAGE = 2


class GroupsChoice:
    """Chooses the number of groups; called on rank 0, whose choice is everybody's.

    Args:
        model: The user's model.
        micro_batches: As the caller of `distribute` has given it.
    """

    def __init__(self, model: nn.Module, micro_batches: int | str | None) -> None:
        self._model = model
        self._micro_batches = micro_batches
        self.found: GroupsForecast | None = None

    def __call__(self, num_ranks: int) -> int:
        """The number of groups for so many ranks.

        Raises:
            PlanError: The model fits into no number of groups.
        """
        self.found = best_groups(
            units_of(self._model, num_ranks),
            num_ranks,
            nominal_machine(num_ranks),
            num_micro_batches=nominal_micro_batches(self._micro_batches, num_ranks),
        )
        return self.found.num_groups

    def said(self) -> str:
        """One line on what has been chosen."""
        assert self.found is not None
        return (
            f"data_parallel={self.found.num_groups} trains most batches a second by the simulated step; it holds at "
            f"most {format_bytes(self.found.held_bytes)} of parameters, gradients and optimizer state on a rank; "
            "farspan.data_rank() and farspan.data_world() are for samplers"
        )


def nominal_machine(num_ranks: int) -> Machine:
    """Returns what this rank is taken to have, as one of so many."""
    device = current_device()
    num_near = read_environment(needs_rendezvous=False).local_world_size
    memory = memory_bytes(device) / (1 if is_accelerator(device) else max(num_near, 1))
    is_near = num_near >= num_ranks
    return Machine(
        memory_bytes=memory,
        flops_per_s=nominal_speeds(device.type).flops_per_s,
        bytes_per_s=within_host(name_of_device(device))[0] if is_near else _BETWEEN_HOSTS_BYTES_PER_S,
    )


def nominal_micro_batches(given: int | str | None, num_ranks: int) -> int:
    """Returns how many micro-batches a batch is taken to have, where the caller of `distribute` has given that."""
    return given if isinstance(given, int) else _MICRO_BATCHES_FOR_EACH_STAGE * num_ranks
