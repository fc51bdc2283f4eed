"""Checkpoints of farspan from and to other files, one tensor in memory at a time.

open_source    tensors to read, whatever files they lie in: a checkpoint, safetensors, a torch file, a DCP folder
write_*        all of a source into other files, which are there as a whole or not at all
"""

__all__: list[str] = []
