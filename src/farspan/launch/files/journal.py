"""The journal that rank 0 keeps for the others: everything that it changes, as it was when the script started."""

from __future__ import annotations

import errno
import os
import posix
import stat

from farspan.launch.files.layers import Layer, copy, exists, is_directory, mkdirs, parent_of

__all__ = ["Journal"]

_FULL = (errno.ENOSPC, errno.EDQUOT)
_LARGE_BYTES = 1 << 26
"""From this size on a file that is removed or rewritten is kept only if that costs nothing. A rank that reads it later
than rank 0 has removed it gets an error that says so."""


class Journal:
    """Keeps what was there before each first change; call it before the change.

    Args:
        before: The folder that the other ranks read.
        exempt: Folders of which nothing is kept.
    """

    def __init__(self, before: Layer, exempt: tuple[str, ...]) -> None:
        self._before = before
        self._exempt = tuple(root + "/" for root in exempt)
        self._kept: set[str] = set()

    def keep(self, text: str, *, follow: bool, content: bool = True, stays: bool = True) -> None:
        """Keep what is at `text`.

        Args:
            text: Of the script, relative to its working folder.
            follow: Whether the change is to what a link there points to.
            content: Whether the change leaves some of the content, so that other ranks need it for the same change.
            stays: Whether what is there goes on to exist under this or another name.
        """
        path = os.path.realpath(text) if follow else _without_links_before(text)
        if path in self._kept or (path + "/").startswith(self._exempt):
            return
        self._keep(path, content=content, stays=stays)
        self._kept.add(path)

    def _keep(self, path: str, *, content: bool, stays: bool) -> None:
        if self._before.is_gone(path):
            return
        kept = self._before.path(path)
        if exists(kept) and not is_directory(path):
            return
        try:
            found = posix.lstat(path)
        except (FileNotFoundError, NotADirectoryError):
            if not exists(kept):
                self._before.mark_gone(path)
            return
        if stat.S_ISDIR(found.st_mode):
            mkdirs(kept)
            for name in posix.listdir(path):
                self._keep(f"{path}/{name}", content=content, stays=stays)
            return
        if not (stat.S_ISREG(found.st_mode) or stat.S_ISLNK(found.st_mode)):
            return
        if not stays and found.st_nlink == 1 and _is_linked(path, kept):
            return
        if content or found.st_size < _LARGE_BYTES:
            try:
                copy(path, kept)
                return
            except OSError as error:
                if error.errno not in _FULL:
                    raise
        self._before.mark_lost(path)
        copy(path, kept, content=False)

    def catch_up(self, before: Layer) -> None:
        """Forgets the past: all ranks are at a barrier, and see from now on what is there now."""
        self._before = before
        self._kept.clear()


def _without_links_before(text: str) -> str:
    folder, _, name = text.rstrip("/").rpartition("/")
    if name in ("", ".", ".."):
        return os.path.realpath(text)
    return os.path.join(os.path.realpath(folder or ("/" if text.startswith("/") else ".")), name)


def _is_linked(path: str, kept: str) -> bool:
    """Keep a file that is about to be removed by giving it a second name, where that is on the same disk."""
    mkdirs(parent_of(kept))
    try:
        posix.link(path, kept, follow_symlinks=False)
    except OSError:
        return False
    return True
