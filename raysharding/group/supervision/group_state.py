"""`GroupState`: where a group stands; `GroupStatus` keeps account of it."""

from __future__ import annotations

import enum
import threading

from raysharding.errors import GroupBrokenError, GroupError
from raysharding.group.supervision import failures


class GroupState(enum.Enum):
    """States of a group: STARTING → READY ↔ BUSY → BROKEN → CLOSED; a group may be closed from any of them."""

    STARTING = "starting"
    READY = "ready"
    BUSY = "busy"
    BROKEN = "broken"
    CLOSED = "closed"


class GroupStatus:
    """What makes up a group's state. The supervision thread changes it, and `revive`; any thread may ask."""

    def __init__(self, name: str) -> None:
        """The group is STARTING.

        Args:
            name: The group's name in errors.
        """
        self._name = name
        self.is_started = False
        """Whether the model is loaded, and no restart has begun since."""
        self.is_dropped = False
        """Whether the group's object is gone."""
        self.is_closing = False
        """Whether the group is shut down, or about to be."""
        self.cause: GroupError | None = None
        """The error that broke the group."""
        self._reviver: int | None = None
        self._revived_from: GroupError | None = None

    def state(self, *, is_busy: bool) -> GroupState:
        """The state.

        Args:
            is_busy: Whether there are calls that run or wait.
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
        """Whether calls may go out."""
        return self.cause is None and not self.is_closing

    @property
    def is_restarting(self) -> bool:
        """Whether ranks that were kept are to meet again, and have not yet."""
        return self._reviver is not None

    def refuse_if_unusable(self) -> None:
        """Raise what a call of a broken or closed group gets.

        Raises:
            GroupBrokenError: The group is broken (with the cause), or shut down, or another thread restarts it.
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
        # A twin: the traceback of the one that the user is given would keep the user's frames, and so the group.
        self.cause = failures.twin(error)

    def revive(self) -> None:
        """Leave BROKEN for STARTING: until `start`, calls of this thread are taken, and no others."""
        self._reviver = threading.get_ident()
        self._revived_from, self.cause, self.is_started = self.cause, None, False

    def first_cause(self, error: GroupError) -> GroupError:
        """What calls are to hear: of a restart that came to nothing, what broke the group in the first place."""
        return error if self.is_started or self._revived_from is None else self._revived_from
