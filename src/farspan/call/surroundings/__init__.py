"""Knows what the code of modules reads beside the modules and their arguments, and how that was at other moments."""

__all__: list[str] = []
