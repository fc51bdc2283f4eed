"""Python's functions on files, replaced for the ranks other than 0: each looks where the view says a path lies."""

from __future__ import annotations

import errno
import os
import posix
from collections.abc import Callable
from typing import Any

from farspan.launch.files.exempt import exempt_roots
from farspan.launch.files.journal import Journal
from farspan.launch.files.layers import Layer, is_directory, is_link, mkdirs
from farspan.launch.files.opening import Entries, Replacements, is_unnamed, opening, renamed, text_of, writes
from farspan.launch.files.outside import adapt_libraries
from farspan.launch.files.patches import put_by_name, put_functions
from farspan.launch.files.succession import bring
from farspan.launch.files.view import View

__all__ = ["install_view", "replacements_for_view"]


def install_view(folder: str, rank: int, *, sees_first: bool) -> tuple[Callable[[int], None], Callable[[int], None]]:
    """Lets this process write into a folder of its own below `folder`.

    Returns:
        What to call after each barrier, and what to call if the script's files are to be this rank's; both with the
        number of barriers so far.
    """

    def before(number: int) -> Layer | None:
        return Layer(f"{folder}/before{number}") if sees_first else None

    own = Layer(f"{folder}/rank{rank}")
    mkdirs(own.files)
    view = View(own, before(0), exempt_roots(folder))

    def translate(path: Any, writes: bool, keeps: bool) -> Any:
        text = text_of(path)
        if not text:
            return path
        with renamed(path):
            found = view.canonical(text, follow=True)
            physical = view.locate(found)
            if writes and (physical is None or posix.access(physical, posix.W_OK)):
                physical = view.for_writing(found, keeps_content=keeps)
        if physical is None:
            return path  # for the library's own error
        return os.fsencode(physical) if isinstance(path, bytes) else physical

    put_functions(replacements_for_view(view))
    put_by_name(adapt_libraries(translate))

    def become_first(number: int) -> None:
        bring(own)
        view.become_first(Journal(Layer(f"{folder}/before{number}"), exempt_roots(folder)))

    return lambda number: view.catch_up(before(number)), become_first


def replacements_for_view(view: View) -> Replacements:
    """Returns the replaced functions of other ranks: they read where the view says, and write to the rank's own
    folder."""

    def open_(path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        text = text_of(path, dir_fd)
        if text is None or not writes(flags):
            if text is None or is_unnamed(flags):
                return posix.open(path, flags, mode, dir_fd=dir_fd)
            with renamed(path):
                found = view.canonical(text, follow=not flags & os.O_NOFOLLOW)
                return view.reading(found, lambda physical: posix.open(physical, flags, mode))
        is_new = bool(flags & os.O_EXCL and flags & os.O_CREAT)
        with renamed(path):
            found = view.canonical(text, follow=not is_new and not flags & os.O_NOFOLLOW)
            if not flags & os.O_CREAT and view.locate(found) is None:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
            if view.is_made_for_one_process(found, mode, flags) and view.locate(found) is None:
                opened = posix.open(found, flags, mode)
                view.own.mark_real(found)
                return opened
            physical = view.for_writing(found, keeps_content=not flags & os.O_TRUNC, is_new=is_new)
            return posix.open(physical, flags, mode)

    def reading(original: Any) -> Callable[..., Any]:
        def function(
            path: Any, *args: Any, dir_fd: int | None = None, follow_symlinks: bool = True, **kwargs: Any
        ) -> Any:
            text = text_of(path, dir_fd)
            if text is None:
                return original(path, *args, **kwargs)
            follow = follow_symlinks and original not in (posix.lstat, posix.readlink)
            with renamed(path):
                return view.reading(
                    view.canonical(text, follow=follow), lambda physical: original(physical, *args, **kwargs)
                )

        return function

    def access(path: Any, mode: int, *, dir_fd: int | None = None, effective_ids: bool = False, **kwargs: Any) -> bool:
        text = text_of(path, dir_fd)
        if text is None:
            return posix.access(path, mode)
        try:
            found = view.canonical(text, follow=kwargs.get("follow_symlinks", True))
            return view.reading(found, lambda physical: posix.access(physical, mode, effective_ids=effective_ids))
        except OSError:
            return False

    def changing(original: Any) -> Callable[..., Any]:
        """Modes, times, sizes: of a copy."""

        def function(
            path: Any, *args: Any, dir_fd: int | None = None, follow_symlinks: bool = True, **kwargs: Any
        ) -> Any:
            text = text_of(path, dir_fd)
            if text is None:
                return original(path, *args, **kwargs)
            with renamed(path):
                found = view.canonical(text, follow=follow_symlinks)
                physical = view.locate(found)
                if physical is None:
                    raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
                if is_link(physical) or (is_directory(physical) and physical == found and not view.is_exempt(found)):
                    return None  # of a link or a folder of the disk: it stays as it is
                return original(view.for_writing(found, keeps_content=True), *args, **kwargs)

        return function

    def making(original: Any) -> Callable[..., Any]:
        def function(path: Any, *args: Any, dir_fd: int | None = None, **kwargs: Any) -> Any:
            with renamed(path):
                found = view.canonical(text_of(path, dir_fd) or "", follow=False)
                return original(view.for_writing(found, keeps_content=False, is_new=True), *args, **kwargs)

        return function

    def mkdir(path: Any, mode: int = 0o777, *, dir_fd: int | None = None) -> None:
        with renamed(path):
            view.mkdir(view.canonical(text_of(path, dir_fd) or "", follow=False), mode)

    def rmdir(path: Any, *, dir_fd: int | None = None) -> None:
        with renamed(path):
            view.rmdir(view.canonical(text_of(path, dir_fd) or "", follow=False))

    def unlink(path: Any, *, dir_fd: int | None = None) -> None:
        with renamed(path):
            found = view.canonical(text_of(path, dir_fd) or "", follow=False)
            physical = view.locate(found)
            if physical is None:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
            if is_directory(physical):
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
            view.remove(found)

    def rename(src: Any, dst: Any, *, src_dir_fd: int | None = None, dst_dir_fd: int | None = None) -> None:
        with renamed(src, dst):
            source = view.canonical(text_of(src, src_dir_fd) or "", follow=False)
            target = view.canonical(text_of(dst, dst_dir_fd) or "", follow=False)
            old, new = view.locate(source), view.locate(target)
            if old is None:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), src, None, dst)
            number = 0
            if new is not None and source != target:
                if is_directory(new):
                    number = errno.EISDIR if not is_directory(old) else errno.ENOTEMPTY if view.names(target) else 0
                elif is_directory(old):
                    number = errno.ENOTDIR
            if number:
                raise OSError(number, os.strerror(number), src, None, dst)
            view.move(source, target)

    def symlink(src: Any, dst: Any, target_is_directory: bool = False, *, dir_fd: int | None = None) -> None:
        with renamed(src, dst):
            found = view.canonical(text_of(dst, dir_fd) or "", follow=False)
            posix.symlink(os.fsdecode(src), view.for_writing(found, keeps_content=False, is_new=True))
            view.forget_links()

    def link(
        src: Any, dst: Any, *, src_dir_fd: int | None = None, dst_dir_fd: int | None = None, **kwargs: Any
    ) -> None:
        with renamed(src, dst):
            source = view.canonical(text_of(src, src_dir_fd) or "", follow=kwargs.get("follow_symlinks", True))
            target = view.canonical(text_of(dst, dst_dir_fd) or "", follow=False)
            physical = view.for_writing(source, keeps_content=True)
            posix.link(physical, view.for_writing(target, keeps_content=False, is_new=True))

    original: Any = posix.listdir

    def listdir(path: Any = ".") -> Any:
        text = text_of(path)
        if text is None:
            return original(path)
        with renamed(path):
            found = view.canonical(text, follow=True)
            names: list[str] = view.reading(found, posix.listdir)
            if not view.is_untouched(found):
                names = view.names(found)
        return [os.fsencode(name) for name in names] if isinstance(path, bytes) else names

    def scandir(path: Any = ".") -> Any:
        text = text_of(path)
        if text is None:
            return posix.scandir(path)
        return Entries(path, listdir(path))

    def chdir(path: Any) -> None:
        text = text_of(path)
        with renamed(path):
            if text is None:
                posix.chdir(path)
            else:
                view.reading(view.canonical(text, follow=True), posix.chdir)

    found: Replacements = {(os, "open"): open_, (os, "access"): access, (os, "mkdir"): mkdir, (os, "rmdir"): rmdir}
    found |= {(os, "unlink"): unlink, (os, "remove"): unlink, (os, "rename"): rename, (os, "replace"): rename}
    found |= {(os, "symlink"): symlink, (os, "link"): link, (os, "listdir"): listdir, (os, "scandir"): scandir}
    found |= {(os, "chdir"): chdir, (os, "getcwd"): view.cwd, (os, "getcwdb"): lambda: os.fsencode(view.cwd())}
    for name in ("stat", "lstat", "readlink", "statvfs", "pathconf", "getxattr", "listxattr"):
        if hasattr(posix, name):
            found[os, name] = reading(getattr(posix, name))
    for name in ("chmod", "lchmod", "chown", "lchown", "utime", "truncate", "setxattr", "removexattr", "chflags"):
        if hasattr(posix, name):
            found[os, name] = changing(getattr(posix, name))
    for name in ("mkfifo", "mknod"):
        found[os, name] = making(getattr(posix, name))
    return found | opening()
