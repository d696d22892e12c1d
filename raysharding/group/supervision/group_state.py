"""`GroupState`, the state of a group, and `GroupStatus`, which tracks it."""

from __future__ import annotations

import enum
import threading

from raysharding.errors import GroupBrokenError, GroupError
from raysharding.group.supervision import failures


class GroupState(enum.Enum):
    """States of a group: STARTING → READY ↔ BUSY → BROKEN → CLOSED; every state can change to CLOSED."""

    STARTING = "starting"
    READY = "ready"
    BUSY = "busy"
    BROKEN = "broken"
    CLOSED = "closed"


class GroupStatus:
    """Tracks the state of a group. The supervision thread and `revive` change it; any thread may read it."""

    def __init__(self, name: str) -> None:
        """Start as STARTING.

        Args:
            name: Name of the group in errors.
        """
        self._name = name
        self.is_started = False
        """True if the model is loaded and no restart has begun since."""
        self.is_dropped = False
        """True if the last reference to the group is gone."""
        self.is_closing = False
        """True if the group is shut down or shutting down."""
        self.cause: GroupError | None = None
        """The error that broke the group."""
        self._reviver: int | None = None
        self._revived_from: GroupError | None = None

    def state(self, *, is_busy: bool) -> GroupState:
        """Return the state.

        Args:
            is_busy: True if a call runs or is queued.
        """
        if self.is_closing:
            return GroupState.CLOSED
        if self.cause is not None:
            return GroupState.BROKEN
        if not self.is_started:
            return GroupState.STARTING
        return GroupState.BUSY if is_busy else GroupState.READY

    @property
    def is_usable(self) -> bool:
        """True if calls can be sent."""
        return self.cause is None and not self.is_closing

    @property
    def is_restarting(self) -> bool:
        """True while kept ranks form the group again."""
        return self._reviver is not None

    def refuse_if_unusable(self) -> None:
        """Raise the error of a call on a broken or closed group.

        Raises:
            GroupBrokenError: The group is broken (with the cause), shut down, or being restarted by another thread.
        """
        if self.is_closing:
            raise GroupBrokenError(f"{self._name} is shut down; make a new group")
        if self.cause is not None:
            raise failures.broken(self._name, self.cause)
        if self._reviver not in (None, threading.get_ident()):
            raise GroupBrokenError(f"{self._name} is being restarted: its ranks have not met again yet")

    def start(self) -> None:
        """Leave STARTING."""
        self.is_started, self._reviver, self._revived_from = True, None, None

    def fail(self, error: GroupError) -> None:
        """Enter BROKEN."""
        # A copy: the traceback of the error that the user gets would keep the user's frames, and so the group.
        self.cause = failures.twin(error)

    def revive(self) -> None:
        """Change from BROKEN to STARTING: until `start`, only this thread can submit calls."""
        self._reviver = threading.get_ident()
        self._revived_from, self.cause, self.is_started = self.cause, None, False

    def first_cause(self, error: GroupError) -> GroupError:
        """Return the error for later calls: after a failed restart, the error that broke the group before."""
        return error if self.is_started or self._revived_from is None else self._revived_from
