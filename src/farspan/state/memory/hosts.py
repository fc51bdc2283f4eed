"""Checkpoints in the memory of several hosts: each rank's file is on its own host and on the next one, in a ring.

    host 0   step-30/  manifest.json  rank-00000  rank-00001              rank-00002 (copy)
    host 1   step-30/  manifest.json  rank-00002                          rank-00000, rank-00001 (copies)

    save     each rank writes its file here, puts it there, and votes. Rank 0 puts the manifest on all hosts, renames
             the draft on all, and only then the save before it is removed
    load     a checkpoint counts if a host that is left has its manifest, and hosts that are left have all its files;
             of these the newest. A rank fetches the files that it needs and that its own host has not

So the hosts that are left agree on what there is without asking the one that is lost.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from farspan import settings
from farspan.errors import FarspanError
from farspan.launch.memory.client import KeeperClient, RefusedError
from farspan.state.format import Manifest, disk, has_name_of_one
from farspan.state.format.manifest_text import manifest_from_text
from farspan.state.format.read import MANIFEST

__all__ = ["Hosts", "hosts_of_memory", "own_host"]

_ASKING_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    """A checkpoint that a host has.

    Attributes:
        name: Of its folder.
        manifest: What is in it.
        text: The manifest as it was written.
    """

    name: str
    manifest: Manifest
    text: bytes

    @property
    def draft(self) -> str:
        return f"{self.name}.tmp-{self.manifest.save_id}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Hosts:
    """The hosts of a run that keep memory for its checkpoints.

    Attributes:
        top: The folder of this host's memory.
        own: Which host this one is.
        addresses: Of all keepers.
        secret: Of this start of the run.
    """

    top: str
    own: int
    addresses: tuple[tuple[str, int], ...]
    secret: str

    def newest(self, root: str) -> str | None:
        """Returns the newest checkpoint that is whole; what of it this host has lies in one folder then.

        Args:
            root: The folder of all of them, of this host's memory.
        """
        where = os.path.basename(root)
        found: dict[tuple[str, str], _Found] = {}
        files: set[tuple[str, str]] = set()
        for names, read in self._all_hosts(where):
            for each in names(where):
                if not each.startswith("step-"):
                    continue
                files |= {(each, file) for file in names(f"{where}/{each}")}
                if has_name_of_one(each) and (one := _read(read, where, each)) is not None:
                    found[each, one.manifest.save_id] = one
        whole = [one for one in found.values() if _is_whole(one, files)]
        if not whole:
            return None
        newest = max(whole, key=lambda one: one.manifest.serial)
        _bring_together(root, newest)
        return f"{root}/{newest.name}"

    def bring(self, path: str, save_id: str) -> None:
        """Fetches a file of a checkpoint from the host that has it.

        Args:
            path: Where it is to be.
            save_id: Of the save that made it: it may still lie in the draft.

        Raises:
            OSError: None has it.
        """
        folder, name = os.path.split(os.path.relpath(path, self.top))
        for client in self._others():
            with client:
                for below in (f"{folder}/{name}", f"{folder}.tmp-{save_id}/{name}"):
                    with contextlib.suppress(RefusedError):  # it is not there
                        _fetch(client, below, path)
                        return
        raise FileNotFoundError(2, "no host that is left has it", path)

    def copy_away(self, path: str, on_progress: Callable[[], object]) -> None:
        """Puts a file of a draft on the next host; where that is lost, on the one after it.

        Raises:
            OSError: No other host takes it.
        """
        if len(self.addresses) == 1:  # the others are lost
            return
        for client in self._others():
            with client, disk.opened(path) as file:
                client.put(os.path.relpath(path, self.top), file, disk.size_of(file), on_progress)
                return
        raise ConnectionError(111, "no other host can be reached", path)

    def publish(self, draft: str, target: str, text: bytes) -> None:
        """Lets a draft, all files of which are on their hosts, be a checkpoint on all other hosts.

        Args:
            draft: Its folder.
            target: The folder that it is to be.
            text: The manifest.

        Raises:
            OSError: A host cannot do it.
        """
        before, after = (os.path.relpath(path, self.top) for path in (draft, target))
        clients = list(self._others())
        with contextlib.ExitStack() as stack:
            for client in clients:
                stack.enter_context(client)
            for client in clients:
                client.put_bytes(f"{before}/{MANIFEST}", text)
            for client in clients:
                client.remove(after)  # what a start before has left there, and is not whole
                client.rename(before, after)

    def remove_all_but(self, target: str) -> None:
        """Removes older checkpoints, and drafts, on all other hosts."""
        root, _, kept = os.path.relpath(target, self.top).partition("/")
        for client in self._others():
            with client:
                for name in client.names(root):
                    if name != kept:
                        client.remove(f"{root}/{name}")

    def _others(self) -> Iterator[KeeperClient]:
        """Yields a connection with each other host that is there, the next one first."""
        count = len(self.addresses)
        for step in range(1, count):
            address = self.addresses[(self.own + step) % count]
            try:
                client = KeeperClient(address, self.secret, deadline_s=_ASKING_S)
            except OSError:
                continue  # it is lost: what it had is where its copies are
            yield client

    def _all_hosts(self, where: str) -> Iterator[tuple[Callable[[str], Sequence[str]], Callable[[str], bytes]]]:
        """Yields, for each host that is there, what lists a folder of it and what reads a small file."""
        yield lambda path: disk.names_in(f"{self.top}/{path}"), lambda path: disk.read_small(f"{self.top}/{path}")
        for client in self._others():
            with client:
                yield client.names, _reads(client)


def hosts_of_memory() -> Hosts | None:
    """Returns the hosts among which the memory of this run is divided; None where it is that of this machine.

    `farspan run` says in FARSPAN_KEEPERS which host this is, and where the keepers of all are: "0 a:4001 b:4002".
    """
    words = settings.text("KEEPERS").split()
    if not words:
        return None
    parts = [word.rpartition(":") for word in words[1:]]
    addresses = tuple([(host.strip("[]"), int(port)) for host, _, port in parts])
    return Hosts(top=settings.text("MEMORY"), own=int(words[0]), addresses=addresses, secret=settings.text("SECRET"))


def own_host() -> int:
    """Returns which of the hosts of the run this one is."""
    hosts = hosts_of_memory()
    return 0 if hosts is None else hosts.own


def _fetch(client: KeeperClient, below: str, path: str) -> None:
    """Gets a file; it has its name once it is whole."""
    part = f"{path}.part-{secrets.token_hex(8)}"
    file = disk.create(part)
    try:
        client.get(below, lambda view: disk.write(file, view))
        disk.rename(part, path)
    except BaseException:
        disk.unlink(part)
        raise
    finally:
        disk.close(file)


def _reads(client: KeeperClient) -> Callable[[str], bytes]:
    def read(path: str) -> bytes:
        data = bytearray()
        client.get(path, data.extend)
        return bytes(data)

    return read


def _read(read: Callable[[str], bytes], where: str, name: str) -> _Found | None:
    """Returns a checkpoint of a host; None where its manifest is missing or damaged."""
    try:
        text = read(f"{where}/{name}/{MANIFEST}")
        return _Found(name=name, manifest=manifest_from_text(text, name), text=text)
    except (FileNotFoundError, NotADirectoryError, RefusedError, FarspanError):
        return None


def _is_whole(one: _Found, files: set[tuple[str, str]]) -> bool:
    return all((one.name, file.name) in files or (one.draft, file.name) in files for file in one.manifest.files)


def _bring_together(root: str, one: _Found) -> None:
    """Lets one folder have what this host has of a checkpoint; other ranks of the host may do the same now."""
    folder, draft = f"{root}/{one.name}", f"{root}/{one.draft}"
    for path in (root, folder):
        with contextlib.suppress(FileExistsError):
            disk.make_folder(path)
    for file in one.manifest.files:
        if not disk.exists(f"{folder}/{file.name}") and disk.exists(f"{draft}/{file.name}"):
            with contextlib.suppress(FileNotFoundError):  # another rank was first
                disk.rename(f"{draft}/{file.name}", f"{folder}/{file.name}")
    if not disk.exists(f"{folder}/{MANIFEST}"):
        part = f"{folder}/{MANIFEST}.part-{secrets.token_hex(8)}"
        disk.write_small(part, one.text)
        disk.rename(part, f"{folder}/{MANIFEST}")
