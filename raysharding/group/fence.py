"""`Fence`: a rank obeys one driver at a time, the one that came last."""

from __future__ import annotations

import threading

from raysharding.errors import GroupTakenOverError


class Fence:
    """The epoch of the driver that a rank obeys. Every driver of a group has its own; later ones are greater."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._epoch = 0
        self._given = 0

    def next(self) -> int:
        """Return the epoch of a driver that comes now; it begins with `admit`."""
        with self._changed:
            self._given = max(self._given, self._epoch) + 1
            return self._given

    def admit(self, epoch: int) -> None:
        """Obey the driver of this epoch from now on, unless a later one is here already."""
        with self._changed:
            self._epoch = max(self._epoch, epoch)
            self._changed.notify_all()

    def is_open(self, epoch: int) -> bool:
        """Whether the driver of this epoch is the one to obey."""
        return epoch >= self._epoch

    def wait_closed(self, epoch: int) -> None:
        """Block until a later driver comes, or the process ends: no deadline, the caller's thread is there for that."""
        with self._changed:
            self._changed.wait_for(lambda: not self.is_open(epoch))


def taken_over(name: str) -> GroupTakenOverError:
    """Build the error of an earlier driver's calls."""
    return GroupTakenOverError(
        f"{name} was taken over by another driver, which attached to it: its ranks live on and obey that one; attach "
        "again to take it back"
    )
