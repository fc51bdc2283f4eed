"""What the code of modules reads beside them and their arguments: what that is, and how it was at other moments."""

__all__: list[str] = []
