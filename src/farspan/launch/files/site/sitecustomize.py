"""Loaded by every Python that `farspan run` starts, and by those that they start: it keeps the files of ranks apart,
and gives all ranks the same entropy.

Then runs the `sitecustomize` that this one hides, if there is one.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import sys
from types import TracebackType

__all__: list[str] = []


def _share_entropy() -> None:
    number = os.environ.pop("FARSPAN_ENTROPY", "")  # of this process alone: its workers draw as they do without farspan
    if not number:
        return
    try:
        from farspan.launch.rank.entropy import share
    except ModuleNotFoundError:  # a Python without farspan: a tool, which is no rank
        return
    share(int(number, 16))


def _install() -> None:
    folder, rank = os.environ.get("FARSPAN_RUN_FOLDER", ""), os.environ.get("FARSPAN_RANK", "")
    if not folder or not rank or not os.path.isdir(folder):
        return
    try:
        from farspan.launch.files import install, keeps_apart
        from farspan.launch.rank.notes import note_training
    except ModuleNotFoundError:  # a Python without farspan: a tool, whose files are not the script's
        return
    if keeps_apart():
        install(folder, int(rank))
        _show_short_tracebacks()
    note_training(folder)


def _show_short_tracebacks() -> None:
    """Also before `farspan.distribute`: what the system says of a file has our frames."""
    previous = sys.excepthook

    def show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        from farspan.launch.raised.tracebacks import cut_frames

        cut_frames(error)
        previous(kind, error, error.__traceback__)

    sys.excepthook = show


def _wait_for_turn() -> None:
    if "FARSPAN_GATE" in os.environ:
        from farspan.launch.rank.gate import wait_at_gate

        wait_at_gate()


def _run_hidden() -> None:
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [path for path in sys.path if os.path.abspath(path or ".") != here]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize")
    if spec is None or spec.loader is None:
        return
    module = importlib.util.module_from_spec(spec)
    sys.modules["sitecustomize"] = module
    spec.loader.exec_module(module)


_share_entropy()
_install()
_wait_for_turn()
_run_hidden()
