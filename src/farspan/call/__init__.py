"""What a recorded call is, what is known of it before it runs, and how it runs."""

__all__: list[str] = []
