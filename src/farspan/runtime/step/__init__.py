"""One step on one rank: its program, its tasks, its messages."""
