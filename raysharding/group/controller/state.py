"""`GroupStatus`: the state of a group, its cause where it is broken, and the transitions between states."""

from __future__ import annotations

import secrets

from raysharding.errors import GroupBrokenError, GroupError
from raysharding.group.messages import GroupState, Outcome, broken, closed, without_frames

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
        self.generation = secrets.token_hex(4)
        """Identifies the ranks from one restart to the next, after which the model is that of files."""
        self.restarted_by = ""
        """Label of the driver that restarted the group last."""
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

    def restart(self, driver: str, label: str, *, was_broken: bool) -> None:
        """Let a driver make a group again that is BROKEN, and was so before the driver restarted it, or not."""
        self.move(GroupState.STARTING)
        self._restarted_from, self.cause = self.cause if was_broken else None, None
        self.maker, self.restarted_by, self.generation = driver, label, secrets.token_hex(4)

    def ready(self) -> None:
        """Leave STARTING: the model is loaded."""
        self.move(GroupState.READY)
        self.was_ready, self.maker, self._restarted_from = True, None, None

    def fail(self, error: GroupError) -> None:
        """Enter BROKEN. After a failed restart the cause stays the error that broke the group before."""
        self.move(GroupState.BROKEN)
        self.cause, self.maker = without_frames(self._restarted_from or error), None

    def refusal(self, maker: str = "") -> GroupBrokenError | None:
        """Return the error of a call that cannot run; `None` if it can.

        Args:
            maker: Key of its driver, if the call is one of those that make the group.
        """
        if self.state is GroupState.CLOSED:
            return closed(self._name)
        if self.cause is not None:
            return broken(self._name, self.cause)
        if self.maker not in (None, maker):
            return GroupBrokenError(f"{self._name} is being restarted: its ranks have not met again yet")
        return None

    def restarted(self) -> Outcome:
        """Return the outcome of a call that would change or save another model than its driver believes."""
        what = f"{self._name} was restarted by {self.restarted_by}, and its model and optimizer were loaded again"
        what += " from the newest files; the call did not begin: call again to go on from there"
        return Outcome(error=GroupError(what), generation=self.generation)
