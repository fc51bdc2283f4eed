"""Python's functions on files, replaced: before rank 0 changes what was there, it is kept; and how replacing is done.

A function is replaced in `os`, `io` and `builtins`, and wherever a module has taken it by name.
What opens a file opens it through `os.open`, so a file object has the script's own name for it; an error does too.
"""

from __future__ import annotations

import _io
import os
import posix
import sys
from collections.abc import Callable
from typing import Any

from farspan.launch.files.exempt import exempt_roots
from farspan.launch.files.journal import Journal
from farspan.launch.files.layers import Layer
from farspan.launch.files.opening import Replacements, opening, text_of, writes
from farspan.launch.files.outside import adapt_libraries

__all__ = ["install_journal", "put_by_name", "put_functions", "replacements_for_journal"]


def install_journal(folder: str) -> Callable[[int], None]:
    """Let this process, rank 0, keep what it changes in `folder`; returns what to call after a barrier of all ranks."""
    journal = Journal(Layer(f"{folder}/before0"), exempt_roots(folder))

    def keep(path: Any, writes: bool, keeps: bool) -> Any:
        text = text_of(path)
        if writes and text:
            journal.keep(text, follow=True, content=keeps)
        return path

    put_functions(replacements_for_journal(journal))
    put_by_name(adapt_libraries(keep))
    return lambda number: journal.catch_up(Layer(f"{folder}/before{number}"))


def replacements_for_journal(journal: Journal) -> Replacements:
    """Returns the replaced functions of rank 0, which keep what is there before it changes."""

    def open_(path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        if writes(flags):
            is_new = flags & os.O_EXCL and flags & os.O_CREAT
            keep(path, dir_fd, follow=not is_new and not flags & os.O_NOFOLLOW, content=not flags & os.O_TRUNC)
        return posix.open(path, flags, mode, dir_fd=dir_fd)

    def keep(path: Any, dir_fd: int | None = None, **how: bool) -> None:
        text = text_of(path, dir_fd)
        if text:
            journal.keep(text, **how)

    def before(original: Any, **how: bool) -> Callable[..., Any]:
        def function(path: Any, *args: Any, **kwargs: Any) -> Any:
            keep(path, kwargs.get("dir_fd"), **how)
            return original(path, *args, **kwargs)

        return function

    def before_move(original: Any) -> Callable[..., Any]:
        def function(src: Any, dst: Any, *, src_dir_fd: int | None = None, dst_dir_fd: int | None = None) -> Any:
            keep(dst, dst_dir_fd, follow=False, content=False, stays=False)
            keep(src, src_dir_fd, follow=False)
            return original(src, dst, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd)

        return function

    def before_link(original: Any) -> Callable[..., Any]:
        def function(src: Any, dst: Any, *args: Any, **kwargs: Any) -> Any:
            keep(dst, kwargs.get("dst_dir_fd", kwargs.get("dir_fd")), follow=False)
            return original(src, dst, *args, **kwargs)

        return function

    found: Replacements = {(os, "open"): open_}
    for name in ("unlink", "remove", "rmdir"):
        found[os, name] = before(getattr(posix, name), follow=False, content=False, stays=False)
    for name in ("mkdir", "mkfifo", "mknod"):
        found[os, name] = before(getattr(posix, name), follow=False)
    for name in ("rename", "replace"):
        found[os, name] = before_move(getattr(posix, name))
    for name in ("link", "symlink"):
        found[os, name] = before_link(getattr(posix, name))
    found[os, "truncate"] = before(posix.truncate, follow=True)
    return found | opening()


def put_functions(replacements: Replacements) -> None:
    """Put the replacements in their places, and wherever a module that is loaded has the originals by name."""
    by_original: dict[int, Any] = {}
    for (module, name), function in replacements.items():
        original = getattr(module, name)
        by_original[id(original)] = function
        if original in os.supports_follow_symlinks:
            os.supports_follow_symlinks.add(function)
    put_by_name(by_original)
    shutil = sys.modules.get("shutil")
    if shutil is not None:
        shutil._use_fd_functions = False  # type: ignore[attr-defined]  # it removes trees by open folders, which have one place


def put_by_name(by_original: dict[int, Any]) -> None:
    """Put functions in the place of others, given by identity, in every module that has taken these by name."""
    for module in list(sys.modules.values()):
        if module in (posix, _io) or getattr(module, "__name__", "").startswith("farspan.launch.files"):
            continue  # what Python itself imports with, and we
        for name, value in list(getattr(module, "__dict__", {}).items()):
            function = by_original.get(id(value))
            if function is not None:
                setattr(module, name, function)
