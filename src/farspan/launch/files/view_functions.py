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

__all__ = ["ViewFunctions", "install_view"]


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

    put_functions(ViewFunctions(view).replacements())
    put_by_name(adapt_libraries(translate))

    def become_first(number: int) -> None:
        bring(own)
        view.become_first(Journal(Layer(f"{folder}/before{number}"), exempt_roots(folder)))

    return lambda number: view.catch_up(before(number)), become_first


class ViewFunctions:
    """The replaced functions of a rank other than 0: they read where the view says, and write to the rank's own folder.

    Args:
        view: Of that rank.
    """

    def __init__(self, view: View) -> None:
        self._view = view

    def replacements(self) -> Replacements:
        """Returns them all, each by the module and the name under which programs find it."""
        found: Replacements = {
            (os, "open"): self.open_,
            (os, "access"): self.access,
            (os, "mkdir"): self.mkdir,
            (os, "rmdir"): self.rmdir,
            (os, "unlink"): self.unlink,
            (os, "remove"): self.unlink,
            (os, "rename"): self.rename,
            (os, "replace"): self.rename,
            (os, "symlink"): self.symlink,
            (os, "link"): self.link,
            (os, "listdir"): self.listdir,
            (os, "scandir"): self.scandir,
            (os, "chdir"): self.chdir,
            (os, "getcwd"): self._view.cwd,
            (os, "getcwdb"): lambda: os.fsencode(self._view.cwd()),
        }
        for name in ("stat", "lstat", "readlink", "statvfs", "pathconf", "getxattr", "listxattr"):
            if hasattr(posix, name):
                found[os, name] = self.reading(getattr(posix, name))
        for name in ("chmod", "lchmod", "chown", "lchown", "utime", "truncate", "setxattr", "removexattr", "chflags"):
            if hasattr(posix, name):
                found[os, name] = self.changing(getattr(posix, name))
        for name in ("mkfifo", "mknod"):
            found[os, name] = self.making(getattr(posix, name))
        return found | opening()

    def open_(self, path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        text = text_of(path, dir_fd)
        if text is None or not writes(flags):
            if text is None or is_unnamed(flags):
                return posix.open(path, flags, mode, dir_fd=dir_fd)
            with renamed(path):
                found = self._view.canonical(text, follow=not flags & os.O_NOFOLLOW)
                return self._view.reading(found, lambda physical: posix.open(physical, flags, mode))
        is_new = bool(flags & os.O_EXCL and flags & os.O_CREAT)
        with renamed(path):
            found = self._view.canonical(text, follow=not is_new and not flags & os.O_NOFOLLOW)
            if not flags & os.O_CREAT and self._view.locate(found) is None:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
            if self._view.is_made_for_one_process(found, mode, flags) and self._view.locate(found) is None:
                opened = posix.open(found, flags, mode)
                self._view.own.mark_real(found)
                return opened
            physical = self._view.for_writing(found, keeps_content=not flags & os.O_TRUNC, is_new=is_new)
            return posix.open(physical, flags, mode)

    def reading(self, original: Any) -> Callable[..., Any]:
        def function(
            path: Any, *args: Any, dir_fd: int | None = None, follow_symlinks: bool = True, **kwargs: Any
        ) -> Any:
            text = text_of(path, dir_fd)
            if text is None:
                return original(path, *args, **kwargs)
            follow = follow_symlinks and original not in (posix.lstat, posix.readlink)
            with renamed(path):
                return self._view.reading(
                    self._view.canonical(text, follow=follow), lambda physical: original(physical, *args, **kwargs)
                )

        return function

    def access(
        self, path: Any, mode: int, *, dir_fd: int | None = None, effective_ids: bool = False, **kwargs: Any
    ) -> bool:
        text = text_of(path, dir_fd)
        if text is None:
            return posix.access(path, mode)
        try:
            found = self._view.canonical(text, follow=kwargs.get("follow_symlinks", True))
            return self._view.reading(found, lambda physical: posix.access(physical, mode, effective_ids=effective_ids))
        except OSError:
            return False

    def changing(self, original: Any) -> Callable[..., Any]:
        """Modes, times, sizes: of a copy."""

        def function(
            path: Any, *args: Any, dir_fd: int | None = None, follow_symlinks: bool = True, **kwargs: Any
        ) -> Any:
            text = text_of(path, dir_fd)
            if text is None:
                return original(path, *args, **kwargs)
            with renamed(path):
                found = self._view.canonical(text, follow=follow_symlinks)
                physical = self._view.locate(found)
                if physical is None:
                    raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
                is_of_the_disk = is_directory(physical) and physical == found and not self._view.is_exempt(found)
                if is_link(physical) or is_of_the_disk:
                    return None  # it stays as it is
                return original(self._view.for_writing(found, keeps_content=True), *args, **kwargs)

        return function

    def making(self, original: Any) -> Callable[..., Any]:
        def function(path: Any, *args: Any, dir_fd: int | None = None, **kwargs: Any) -> Any:
            with renamed(path):
                found = self._view.canonical(text_of(path, dir_fd) or "", follow=False)
                return original(self._view.for_writing(found, keeps_content=False, is_new=True), *args, **kwargs)

        return function

    def mkdir(self, path: Any, mode: int = 0o777, *, dir_fd: int | None = None) -> None:
        with renamed(path):
            self._view.mkdir(self._view.canonical(text_of(path, dir_fd) or "", follow=False), mode)

    def rmdir(self, path: Any, *, dir_fd: int | None = None) -> None:
        with renamed(path):
            self._view.rmdir(self._view.canonical(text_of(path, dir_fd) or "", follow=False))

    def unlink(self, path: Any, *, dir_fd: int | None = None) -> None:
        with renamed(path):
            found = self._view.canonical(text_of(path, dir_fd) or "", follow=False)
            physical = self._view.locate(found)
            if physical is None:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
            if is_directory(physical):
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
            self._view.remove(found)

    def rename(self, src: Any, dst: Any, *, src_dir_fd: int | None = None, dst_dir_fd: int | None = None) -> None:
        with renamed(src, dst):
            source = self._view.canonical(text_of(src, src_dir_fd) or "", follow=False)
            target = self._view.canonical(text_of(dst, dst_dir_fd) or "", follow=False)
            old, new = self._view.locate(source), self._view.locate(target)
            if old is None:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), src, None, dst)
            number = 0
            if new is not None and source != target:
                if is_directory(new):
                    number = (
                        errno.EISDIR if not is_directory(old) else errno.ENOTEMPTY if self._view.names(target) else 0
                    )
                elif is_directory(old):
                    number = errno.ENOTDIR
            if number:
                raise OSError(number, os.strerror(number), src, None, dst)
            self._view.move(source, target)

    def symlink(self, src: Any, dst: Any, target_is_directory: bool = False, *, dir_fd: int | None = None) -> None:
        with renamed(src, dst):
            found = self._view.canonical(text_of(dst, dir_fd) or "", follow=False)
            posix.symlink(os.fsdecode(src), self._view.for_writing(found, keeps_content=False, is_new=True))
            self._view.forget_links()

    def link(
        self, src: Any, dst: Any, *, src_dir_fd: int | None = None, dst_dir_fd: int | None = None, **kwargs: Any
    ) -> None:
        with renamed(src, dst):
            source = self._view.canonical(text_of(src, src_dir_fd) or "", follow=kwargs.get("follow_symlinks", True))
            target = self._view.canonical(text_of(dst, dst_dir_fd) or "", follow=False)
            physical = self._view.for_writing(source, keeps_content=True)
            posix.link(physical, self._view.for_writing(target, keeps_content=False, is_new=True))

    def listdir(self, path: Any = ".") -> Any:
        text = text_of(path)
        if text is None:
            original: Any = posix.listdir
            return original(path)
        with renamed(path):
            found = self._view.canonical(text, follow=True)
            names: list[str] = self._view.reading(found, posix.listdir)
            if not self._view.is_untouched(found):
                names = self._view.names(found)
        return [os.fsencode(name) for name in names] if isinstance(path, bytes) else names

    def scandir(self, path: Any = ".") -> Any:
        text = text_of(path)
        if text is None:
            return posix.scandir(path)
        return Entries(path, self.listdir(path))

    def chdir(self, path: Any) -> None:
        text = text_of(path)
        with renamed(path):
            if text is None:
                posix.chdir(path)
            else:
                self._view.reading(self._view.canonical(text, follow=True), posix.chdir)
