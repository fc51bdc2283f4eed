"""A step that ends with an exception of the user's own code, on all ranks alike; and what of it remains.

    plain program     F0 B0 F1 B1 F2 !                       the rest never begins
    in a pipeline     F0 F1 F2 ! .. B0 .. F3 .. B1 ..        F2 raises: B0 and B1 still run, F3 must not have run

All calls have a place in the program's order (`order`). The rank whose call raises sends all others the place
(`halts`). From then on every rank runs only what comes before it, and for the rest sends empty messages, so that each
message of the step still finds its receive: nothing is cancelled, and no later step gets an old message. What has run
too early is undone. When all have come to the end of the step they know of all exceptions, take the first one
in the program's order, and raise it (`aborted`)."""

__all__: list[str] = []
