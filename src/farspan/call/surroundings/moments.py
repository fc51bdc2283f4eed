"""Moments of the program, as far as recorded calls can see them: each runs in the one in which it was made."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping, Sequence

from farspan.call.surroundings.around import Snapshot, Surroundings

__all__ = ["Moment", "Moments"]


class Moment:
    """The surroundings, at one moment, of all code that had been called until then."""

    __slots__ = ("_moments", "snapshots")

    def __init__(self, moments: Moments, snapshots: Mapping[Surroundings, Snapshot]) -> None:
        self._moments = moments
        self.snapshots = snapshots

    def go_to(self) -> None:
        """Put back what was around all code then, until another moment is gone to."""
        if self._moments.present is not self:
            self._moments.go_to(self)

    @contextlib.contextmanager
    def being(self) -> Iterator[None]:
        """Run the body as if it were this moment."""
        before = self._moments.present
        self.go_to()
        try:
            yield
        finally:
            before.go_to()


class Moments:
    """The moments of one recorder.

    Attributes:
        latest: The one in which the program was when this last looked.
        present: The one that it is; another than the latest while calls run that were recorded earlier.
    """

    def __init__(self) -> None:
        self.latest = self.present = Moment(self, {})
        self._there: dict[Surroundings, Snapshot] = {}
        """What is there now."""

    def see(self, around: Surroundings) -> None:
        """Capture what is around some code that is called now; around all code, if that has changed: much is shared."""
        if around in self.latest.snapshots and around.snapshot.is_present():
            return
        around.look()
        others = [other for other in self.latest.snapshots if other is not around and other.look()]
        self._come([around, *others])

    def see_all(self) -> Moment:
        """Capture what is around all code so far; returns the latest moment."""
        if changed := [around for around in self.latest.snapshots if around.look()]:
            self._come(changed)
        return self.latest

    def _come(self, changed: Sequence[Surroundings]) -> None:
        new = {around: around.snapshot for around in changed}
        self._there.update(new)
        self.latest = self.present = Moment(self, {**self.latest.snapshots, **new})

    def go_to(self, moment: Moment) -> None:
        """Let all be as it was at `moment`; what had not been called then stays."""
        for around, snapshot in moment.snapshots.items():
            there = self._there.get(around, snapshot)  # nobody calls what has been forgotten
            if there is not snapshot:
                snapshot.put_back(there)
                self._there[around] = snapshot
        self.present = moment

    def forget(self, gone: Collection[Surroundings]) -> None:
        """No leaf has this code any more."""
        for around in gone:
            self._there.pop(around, None)
        left = {around: snapshot for around, snapshot in self.latest.snapshots.items() if around not in gone}
        self.latest = self.present = Moment(self, left)
