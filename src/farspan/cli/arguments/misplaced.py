"""Says that an option of farspan's stands behind the script, which is given it."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from farspan.outputs import write_line

__all__ = ["hint_at_misplaced"]

_MOST_READ = 1 << 20
"""Characters of a script that are searched for an option's name."""


def hint_at_misplaced(command: str, script: Sequence[str], options: Collection[str]) -> None:
    """Says that one of `options` stands behind the script, if the script has none of this name.

    Args:
        command: Of farspan, which has these options: "run".
        script: It and its words.
        options: Those that scripts hardly have themselves.
    """
    given = [word.partition("=")[0] for word in script[1:]]
    misplaced = next((word for word in given if word in options), None)
    if misplaced is None or script[0] == "-m" or not script[0].endswith(".py"):
        return
    try:
        with open(script[0], errors="replace") as file:
            text = file.read(_MOST_READ)
    except OSError:
        return  # whoever starts it says so
    # `micro_batches=` of farspan.distribute is no option of the script.
    text = text.replace("micro_batches=", "")
    name = misplaced.removeprefix("--")
    if name not in text and name.replace("-", "_") not in text:
        write_line(
            f"farspan: {misplaced} after the script is given to the script; farspan's options come before it: "
            f"farspan {command} {misplaced} ... {script[0]}"
        )
