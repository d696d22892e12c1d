"""`Restarts`: restarts of a group that breaks during a run over data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from raysharding.errors import CallCancelledError, GroupError, RendezvousError
from raysharding.group.calls import Client
from raysharding.group.cluster import tell
from raysharding.group.launch import RestartReport
from raysharding.group.messages import GroupState


@dataclass
class Restarts:
    """Runs steps, and restarts the group at most `limit` times."""

    what: str
    """Name of the run, for people."""
    client: Client
    """The group."""
    limit: int
    """Largest number of restarts."""
    restart: Callable[[], RestartReport]
    """Restarts the group."""
    may_restart: Callable[[], bool] = lambda: True
    """Returns False if the run is to end instead."""
    number: int = 0
    """Number of restarts so far, including those that failed because another rank was lost."""

    def run(self, steps: Callable[[], None], resume: Callable[[RestartReport], None]) -> None:
        """Run all steps.

        Args:
            steps: Runs the steps that are left.
            resume: Makes the ranks continue the run after a restart.

        Raises:
            GroupError: The group broke more often than it may be restarted.
        """
        lost: GroupError | RendezvousError | None = None
        while True:
            try:
                if lost is not None:
                    self._restart(lost, resume)
                steps()
                return
            except CallCancelledError:
                raise  # an interrupted run is not to be restarted
            except (GroupError, RendezvousError) as error:
                is_broken = self.client.state is GroupState.BROKEN
                if not is_broken or self.number >= self.limit or not self.may_restart():
                    raise
                lost = error

    def _restart(self, lost: Exception, resume: Callable[[RestartReport], None]) -> None:
        """Restart the group; an error that the restart raises gets a note with the reason for the restart."""
        cause = str(lost).partition("\n")[0]
        self.number += 1
        tell(f"{self.what}: {cause}; restart {self.number} of {self.limit}")
        try:
            resume(self.restart())
        except Exception as error:
            error.add_note(f"raysharding: {self.what} was restarting after: {cause}")
            raise
