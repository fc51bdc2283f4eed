"""What happens on one rank while the program runs: steps, messages, values, the side channel."""

__all__: list[str] = []
