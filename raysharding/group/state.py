"""`GroupState`: where a group stands."""

from __future__ import annotations

import enum


class GroupState(enum.Enum):
    """States of a group: STARTING → READY ↔ BUSY → BROKEN → CLOSED; a group may be closed from any of them."""

    STARTING = "starting"
    READY = "ready"
    BUSY = "busy"
    BROKEN = "broken"
    CLOSED = "closed"
