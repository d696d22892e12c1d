"""`GroupStatus`: the state of a group, its cause where it is broken, and the transitions between states."""

from __future__ import annotations

from raysharding.errors import GroupBrokenError, GroupError
from raysharding.group.messages import GroupState, broken, closed, twin

_TRANSITIONS = {
    GroupState.STARTING: {GroupState.READY, GroupState.BROKEN, GroupState.CLOSED},
    GroupState.READY: {GroupState.BUSY, GroupState.BROKEN, GroupState.CLOSED},
    GroupState.BUSY: {GroupState.READY, GroupState.BROKEN, GroupState.CLOSED},
    GroupState.BROKEN: {GroupState.STARTING, GroupState.CLOSED},
    GroupState.CLOSED: set[GroupState](),
}
"""STARTING: ranks are placed and loaded, for the first time or by a restart. READY: idle. BUSY: a call runs or waits.
BROKEN: the ranks are gone, or going; calls are refused with the cause until a restart. CLOSED: shut down for good."""


class GroupStatus:
    """The state of a group. A group is made, and made again, by one driver, whose calls alone run meanwhile."""

    def __init__(self, name: str) -> None:
        """Begin as STARTING.

        Args:
            name: Name of the group in errors.
        """
        self.state = GroupState.STARTING
        self.cause: GroupError | None = None
        """The error that broke the group; `None` unless it is BROKEN."""
        self.maker: str | None = None
        """The driver that makes the group or restarts it; `None` if nobody does."""
        self.was_ready = False
        """True if the group has been READY at some time."""
        self._name = name
        self._restarted_from: GroupError | None = None

    @property
    def is_usable(self) -> bool:
        """True if there are ranks that can run calls."""
        return self.state not in (GroupState.BROKEN, GroupState.CLOSED)

    def move(self, state: GroupState) -> None:
        """Change the state."""
        assert state in _TRANSITIONS[self.state], f"{self._name}: {self.state} → {state}"
        self.state = state

    def begin(self, driver: str) -> None:
        """Let a driver make a new group, or restart a BROKEN one."""
        if self.state is GroupState.BROKEN:
            self.move(GroupState.STARTING)
            self._restarted_from, self.cause = self.cause, None
        self.maker = driver

    def ready(self) -> None:
        """Leave STARTING: the model is loaded."""
        self.move(GroupState.READY)
        self.was_ready, self.maker, self._restarted_from = True, None, None

    def fail(self, error: GroupError) -> None:
        """Enter BROKEN. After a failed restart the cause stays the error that broke the group before."""
        self.move(GroupState.BROKEN)
        self.cause, self.maker = twin(self._restarted_from or error), None

    def refusal(self, driver: str) -> GroupBrokenError | None:
        """Return the error of a call of a driver that cannot run; `None` if it can."""
        if self.state is GroupState.CLOSED:
            return closed(self._name)
        if self.cause is not None:
            return broken(self._name, self.cause)
        if self.maker not in (None, driver):
            return GroupBrokenError(f"{self._name} is being restarted: its ranks have not met again yet")
        return None
