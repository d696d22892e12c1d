"""`GroupRecord`: what a driver that attaches to a named group needs to know; the group's first actor keeps it."""

from __future__ import annotations

from dataclasses import dataclass

from raysharding.distributed import LoadReport
from raysharding.group.model_files import BegunSave
from raysharding.group.packing import Packed
from raysharding.group.placement import Reservation
from raysharding.group.preflight import PreflightReport
from raysharding.group.ranks import RankInfo
from raysharding.models import InputBounds


@dataclass(frozen=True)
class GroupRecord:
    """A named group."""

    version: float
    """Wall clock when it was written; of two that cross on their way the later one stays."""
    ranks: tuple[RankInfo, ...]
    """By rank."""
    actor_names: tuple[str, ...]
    """Names of the ranks' actors, by rank."""
    stacks_descriptors: tuple[int, ...]
    """What `witness.look` needs, by rank."""
    log_paths: tuple[tuple[str, ...], ...]
    """What a rank prints into, by rank."""
    visible_gpus: tuple[str, ...]
    """See `Started`."""
    reservation: Reservation
    """The group's resources."""
    spec: Packed
    """The `GroupSpec`, pickled: it may hold functions that the next driver cannot import."""
    origin: str
    """The newest files that hold the model."""
    begun: tuple[BegunSave, ...]
    """Saves that the ranks were asked for since; the driver had not heard how they ended."""
    load_report: LoadReport
    """Rank 0's report of the load that made the group."""
    bounds: InputBounds
    """What the model takes."""
    preflight_report: PreflightReport | None
    """What was seen of nodes and links when the group was made."""
