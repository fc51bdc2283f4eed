"""The files that a rank other than 0 sees: its own changes, over what rank 0 has changed as it was, over the disk."""

from __future__ import annotations

import errno
import os
import posix
import stat
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, TypeVar

from farspan.launch.files.exempt import temporary_folder
from farspan.launch.files.layers import (
    Layer,
    copy,
    exists,
    is_directory,
    is_link,
    kind_of,
    mkdirs,
    names_in,
    parent_of,
    remove_all,
)

if TYPE_CHECKING:
    from farspan.launch.files.journal import Journal

__all__ = ["View"]

_MOST_LINKS = 40
_MOST_KNOWN = 1 << 12
_Result = TypeVar("_Result")


class View:
    """Maps a path of the script's to where it lies on the disk, for reading and for writing.

    Args:
        own: What this rank has changed.
        before: What rank 0 has changed, as it was; None where that cannot be seen (on another host).
        exempt: Folders that lie on the disk itself for all ranks.
    """

    def __init__(self, own: Layer, before: Layer | None, exempt: tuple[str, ...]) -> None:
        self.own = own
        self.before = before
        self._exempt = tuple(root + "/" for root in exempt)
        self._temporary = temporary_folder()
        self._journal: Journal | None = None
        """What the others need of what this rank changes, once it is the first."""
        self._folders: dict[str, str] = {}  # of the texts of folders, their canonical paths

    # ---- which path is meant

    def cwd(self) -> str:
        """Returns the working folder, as the script knows it."""
        real = posix.getcwd()
        return real[len(self.own.files) :] or "/" if real.startswith(self.own.files) else real

    def canonical(self, text: str, *, follow: bool) -> str:
        """Returns the path without links and dots; with `follow` the last part is no link either."""
        if not text:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), text)
        text = text if text.startswith("/") else f"{self.cwd()}/{text}"
        folder, _, name = text.rstrip("/").rpartition("/")
        if name in ("", ".", ".."):
            return self._walk(text, follow=True)
        known = self._folders.get(folder)
        if known is None:
            known = self._walk(folder or "/", follow=True)
            if len(self._folders) >= _MOST_KNOWN:
                self._folders.clear()
            self._folders[folder] = known
        path = f"{known.rstrip('/')}/{name}"
        if not follow:
            return path
        physical = self._place(path)
        return self._walk(path, follow=True) if physical is not None and is_link(physical) else path

    def forget_links(self) -> None:
        """A link has changed: paths may mean something else."""
        self._folders.clear()

    def _walk(self, text: str, *, follow: bool) -> str:
        found, num_links = "", 0
        parts = [part for part in text.split("/") if part not in ("", ".")]
        while parts:
            part = parts.pop(0)
            if part == "..":
                found = found.rpartition("/")[0]
                continue
            path = f"{found}/{part}"
            physical = self._place(path) if parts or follow else None
            if physical is None or not is_link(physical):
                found = path
                continue
            num_links += 1
            if num_links > _MOST_LINKS:
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), text)
            target = posix.readlink(physical)
            if path.startswith("/proc/") and ":[" in target:  # `net:[1]`, `pipe:[2]`: the kernel follows it to no path
                found = path
                continue
            if target.startswith("/"):
                found = ""
            parts = [piece for piece in target.split("/") if piece not in ("", ".")] + parts
        return found or "/"

    # ---- where it lies

    def is_exempt(self, path: str) -> bool:
        """Returns whether `path` lies on the disk itself."""
        below = path + "/"
        if below.startswith(self._exempt):
            return True
        return below.startswith(self._temporary + "/") and self.own.is_real(path)

    def locate(self, path: str) -> str | None:
        """Returns where what the script sees at `path` lies; None if it sees nothing there. Does not follow a link
        there."""
        physical = self._place(path)
        if physical != path:
            return physical
        is_there = exists(path)
        return (path if is_there else None) if self.is_exempt(path) else self._after_all(path, is_there)

    def _place(self, path: str) -> str | None:
        """Returns what `locate` does, also for a place on the disk where nothing is."""
        if self.is_exempt(path):
            return path
        own = self.own.path(path)
        kind = kind_of(own)
        if kind == 0 and self.own.is_gone(path):
            return None
        if kind == 0:
            return self._place_below(path)
        if stat.S_ISDIR(kind) and not self.own.is_gone(path):
            lower = self._place_below(path)  # a folder of the disk of which a part has changed
            if lower is not None and is_directory(lower):
                return lower
        return own

    def _place_below(self, path: str) -> str | None:
        found = self._before(path)
        return path if found is None else found or None

    def lower(self, path: str) -> str | None:
        """Returns where what was at `path` lies, before this rank changed anything."""
        found = self._place_below(path)
        return self._after_all(path, exists(path)) if found == path else found

    def _after_all(self, path: str, is_there: bool) -> str | None:
        """Returns what was at `path` once it is known whether rank 0 kept it: it keeps what was there before it changes
        it."""
        found = self._before(path)
        if found is None:
            return path if is_there else None
        return found or None

    def _before(self, path: str) -> str | None:
        """Returns where rank 0 has kept what was at `path`; "" if nothing was there; None if it has not changed it."""
        if self.before is None:
            return None
        kept = self.before.path(path)
        kind = kind_of(kept)
        if kind:
            return path if stat.S_ISDIR(kind) and is_directory(path) else kept
        return "" if self.before.is_gone(path) else None

    def reading(self, path: str, operation: Callable[[str], _Result]) -> _Result:
        """Do something with what is at canonical `path`, which rank 0 may be changing on the disk.

        Raises:
            OSError: Of the operation, or that there is nothing.
        """
        while True:
            physical = self._place(path)
            if physical is None:
                raise self._missing(path)
            self._check_kept(path, physical)
            try:
                result = operation(physical)
            except FileNotFoundError:
                if physical != path or self._place(path) == path:
                    raise self._missing(path) from None
                continue
            except OSError:
                if physical != path or self._place(path) == path:
                    raise
                continue
            if physical != path or self._place(path) == path:
                return result
            if type(result) is int:
                posix.close(result)  # a file that was opened

    def _missing(self, path: str) -> OSError:
        folder = self.locate(parent_of(path))
        is_below_file = folder is not None and not is_directory(folder)
        number = errno.ENOTDIR if is_below_file else errno.ENOENT
        return OSError(number, os.strerror(number), path)  # of the class that belongs to the number

    def _check_kept(self, path: str, physical: str) -> None:
        if self.before is not None and physical.startswith(self.before.files) and self.before.is_lost(path):
            raise OSError(
                errno.ESTALE,
                "rank 0 has written over this file, or removed it, before this rank has read it, and it was too large"
                " to be kept; read it before it changes, or start with FARSPAN_FILES=all",
                path,
            )

    # ---- changing

    def for_writing(self, path: str, *, keeps_content: bool, is_new: bool = False) -> str:
        """Returns where to write the file at canonical `path`, with its content if `keeps_content`.

        Raises:
            OSError: As without us: no such folder, no permission, `is_new` and it exists.
        """
        physical = self.locate(path)
        if self.is_exempt(path):
            self._keep(path, content=keeps_content)
            return path
        if physical is None:
            self.make_room(path)
            return self.own.path(path)
        if is_new:
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)
        kind = posix.stat(physical).st_mode
        if physical.startswith(self.own.files) or not stat.S_ISREG(kind):
            return physical
        if not posix.access(physical, posix.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
        mkdirs(parent_of(self.own.path(path)))
        if keeps_content:
            self._check_kept(path, physical)
        copy(physical, self.own.path(path), content=keeps_content)
        return self.own.path(path)

    def make_room(self, path: str) -> None:
        """See that what is new can be put at canonical `path`.

        Raises:
            OSError: There is no folder for it, or no permission.
        """
        folder = parent_of(path)
        physical = self.locate(folder)
        if physical is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        if not is_directory(physical):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path)
        if not posix.access(physical, posix.W_OK | posix.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
        mkdirs(self.own.path(folder))

    def is_made_for_one_process(self, path: str, mode: int, flags: int = 0) -> bool:
        """Returns whether `tempfile` makes files or folders like this one, with a name of their own, in the folder for
        them.

        Such things lie on the disk itself: sockets and compilers, which know nothing of us, use them.
        """
        if parent_of(path) != self._temporary:
            return False
        alone = posix.O_CREAT | posix.O_EXCL | posix.O_NOFOLLOW
        return mode == 0o600 and flags & alone == alone if flags else mode == 0o700

    def remove(self, path: str) -> None:
        """Take away what is at canonical `path`, which may be a whole folder."""
        if self.is_exempt(path):
            self._keep(path, content=False, stays=False)
            remove_all(path)
            return
        remove_all(self.own.path(path))
        if self.lower(path) is not None:
            self.own.mark_gone(path)
        self.forget_links()

    def move(self, source: str, target: str) -> None:
        """Put what is at canonical `source` at `target`, both checked by the caller."""
        if source == target:
            return
        for each in (source, target):
            if not self.is_exempt(each):
                self.make_room(each)
        own = self.own.path(source)
        is_file = self.locate(source) == own and not is_directory(own)
        if is_file and not self.is_exempt(target) and not is_directory(self.own.path(target)):
            posix.rename(own, self.own.path(target))  # at once, as other threads of the script see it
            self.remove(source)
            return
        if self.locate(target) is not None:
            self.remove(target)
        self._bring(source, target)
        self.remove(source)

    def _bring(self, source: str, target: str) -> None:
        physical = self.locate(source)
        assert physical is not None
        if self.is_exempt(target):
            self._keep(source)
            self._keep(target)
        goal = target if self.is_exempt(target) else self.own.path(target)
        if is_directory(physical):
            mkdirs(goal)
            posix.chmod(goal, stat.S_IMODE(posix.stat(physical).st_mode) | 0o700)
            for name in self.names(source):
                self._bring(f"{source}/{name}", f"{target}/{name}")
            return
        if physical.startswith(self.own.files) or self.is_exempt(source):
            try:
                posix.rename(physical, goal)
                return
            except OSError as error:
                if error.errno != errno.EXDEV:
                    raise
        self._check_kept(source, physical)
        copy(physical, goal)

    # ---- folders

    def is_untouched(self, path: str) -> bool:
        """Returns whether the folder at canonical `path` holds just what is on the disk there."""
        layers = [layer for layer in (self.own, self.before) if layer is not None]
        return self.is_exempt(path) or not any(layer.is_touched(path) for layer in layers)

    def names(self, path: str) -> list[str]:
        """Returns the names in the folder at canonical `path`: first what the disk has, in its order."""
        on_disk = [] if self.own.is_gone(path) else list(self._lower_names(path))
        shown = [name for name in on_disk if not self.own.is_gone(_join(path, name))]
        return list(dict.fromkeys([*shown, *sorted(names_in(self.own.path(path)))]))

    def _lower_names(self, path: str) -> Iterable[str]:
        if self.before is None:
            return names_in(path)
        if self.before.is_gone(path):
            return []
        names = list(names_in(path))
        kept = sorted(names_in(self.before.path(path)))
        return dict.fromkeys([*[name for name in names if self._before(_join(path, name)) != ""], *kept])

    def mkdir(self, path: str, mode: int) -> None:
        if self.locate(path) is not None:
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)
        if self.is_exempt(path):
            self._keep(path)
            posix.mkdir(path, mode)
        elif self.is_made_for_one_process(path, mode):
            posix.mkdir(path, mode)
            self.own.mark_real(path)
        else:
            self.make_room(path)
            posix.mkdir(self.own.path(path), mode)

    def rmdir(self, path: str) -> None:
        physical = self.locate(path)
        if physical is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        if not is_directory(physical):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path)
        if self.is_exempt(path):
            self._keep(path)
            posix.rmdir(path)
        elif self.names(path):
            raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), path)
        else:
            self.remove(path)

    def become_first(self, journal: Journal) -> None:
        """Lets the disk be what the script sees and writes; its own changes lie there by now.

        Args:
            journal: Keeps what the others need.
        """
        self._exempt, self.before, self._journal = ("/",), None, journal
        self.forget_links()

    def _keep(self, path: str, *, content: bool = True, stays: bool = True) -> None:
        if self._journal is not None:
            self._journal.keep(path, follow=False, content=content, stays=stays)

    def catch_up(self, before: Layer | None) -> None:
        """Makes what rank 0 has written until now readable here. Called after a barrier of all ranks."""
        if self._journal is not None and before is not None:
            self._journal.catch_up(before)
            return
        self.before = before
        self.own.forget_gone()
        self.forget_links()


def _join(folder: str, name: str) -> str:
    return f"{folder.rstrip('/')}/{name}"
