"""Random numbers inside the model: those of the plain program, or such as follow from where they are drawn."""

__all__: list[str] = []
