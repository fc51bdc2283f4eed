"""The data axis: several groups of ranks train one model on batches of their own, and average its gradients."""

__all__: list[str] = []
