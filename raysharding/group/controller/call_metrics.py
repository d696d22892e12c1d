"""`CallMetrics`: the calls and the state of a group as metrics that Ray exports, with `ray_` before their names."""

from __future__ import annotations

from ray.util.metrics import Counter, Gauge

from raysharding.group.messages import GroupState

EXPORT_S = 5.0
"""Seconds between two exports of the state."""


class CallMetrics:
    """Counts the calls of a group. Ray must be initialized."""

    def __init__(self, group: str) -> None:
        """Create the metrics; nothing is exported yet.

        Args:
            group: Name of the group, the tag `group`.
        """
        self._tags = {"group": group}
        keys = ("group", "method")
        self._calls = Counter("raysharding_calls", "Calls that have ended, with or without an error", tag_keys=keys)
        self._seconds = Counter("raysharding_call_seconds", "Seconds that these calls took", tag_keys=keys)
        described = "1 for the state that the group is in, 0 for the others"
        self._state = Gauge("raysharding_state", described, tag_keys=("group", "state"))

    def call_ended(self, method: str, seconds: float) -> None:
        """Count a call."""
        tags = {**self._tags, "method": method}
        self._calls.inc(tags=tags)
        self._seconds.inc(max(seconds, 1e-9), tags=tags)  # Ray refuses to add 0

    def export(self, state: GroupState) -> None:
        """Give Ray the state."""
        for one in GroupState:
            self._state.set(float(one is state), tags={**self._tags, "state": one.value})
