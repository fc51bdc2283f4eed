"""Ranks of a program that has called MPI_Init: tensors, sums and the control plane over its own communicator."""

__all__: list[str] = []
