"""Loads weights that others have saved: safetensors files in the layout of transformers, of which a rank reads its
part."""

__all__: list[str] = []
