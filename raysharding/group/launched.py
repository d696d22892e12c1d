"""`Launched`: the running parts of a group, from which its object is made."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from raysharding.distributed import LoadReport
from raysharding.group.channel import Channel
from raysharding.group.placement import Reservation
from raysharding.group.preflight import PreflightReport
from raysharding.group.start import Started
from raysharding.models import InputBounds


@dataclass(frozen=True)
class Launched:
    """A group's running parts."""

    model: Any
    """What the ranks built: see `Opened`."""
    channel: Channel
    """Sends calls to the ranks."""
    started: Started
    """The ranks' actors."""
    reservation: Reservation
    """Their resources."""
    load_report: LoadReport
    """Rank 0's report."""
    bounds: InputBounds
    """What the model takes."""
    preflight_report: PreflightReport | None
    """What was seen of nodes and links; `None` where nobody looked."""
