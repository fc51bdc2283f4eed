"""What running a backward takes besides autograd: catching what leaves a segment; splitting it into input gradients
now, for whoever waits for them, and weight gradients when there is time."""

__all__: list[str] = []
