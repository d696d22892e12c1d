"""`RunningGroup`: the parts that a group works with, as launch, attach, restart and doctor put them together."""

from __future__ import annotations

from dataclasses import dataclass, field

from raysharding.checkpoint.storage import normal_path
from raysharding.distributed import LoadReport
from raysharding.group.calls import ModelFiles
from raysharding.group.cluster import Reservation
from raysharding.group.launch.preflight import PreflightReport
from raysharding.group.launch.spec import GroupSpec
from raysharding.group.launch.start_actors import Started
from raysharding.group.supervision import Client, Replicas, Supervisor
from raysharding.models import InputBounds


@dataclass(frozen=True)
class RunningGroup:
    """Ranks under supervision, and what is known of them."""

    spec: GroupSpec
    """What the group was asked to be, with the model that the ranks build."""
    client: Client
    """Sends calls to the ranks."""
    visible_gpus: tuple[str, ...]
    """See `Started`."""
    reservation: Reservation
    """The ranks' resources."""
    files: ModelFiles
    """Which files hold the model."""
    has_optimizer: bool = False
    """Whether the ranks had an optimizer when these parts were put together; a call may have set one since."""
    load_report: LoadReport | None = None
    """Rank 0's report of the load that made the group; `None` before its end."""
    bounds: InputBounds = field(default_factory=InputBounds)
    """What the model takes; anything, as far as is known before the load."""
    preflight_report: PreflightReport | None = None
    """What was seen of nodes and links when the group was made; `None` where nobody looked."""

    @classmethod
    def assemble(
        cls,
        name: str,
        spec: GroupSpec,
        started: Started,
        reservation: Reservation,
        *,
        files: ModelFiles | None = None,
        is_loaded: bool = False,
    ) -> RunningGroup:
        """Put ranks under the supervision of this process; they have not connected to it yet.

        Args:
            name: What errors call the group.
            spec: What the group was asked to be.
            started: The ranks' actors, under the epoch of this process.
            reservation: Their resources, which the supervision gives back.
            files: Which files hold the model. Default: the checkpoint of `spec`.
            is_loaded: Whether the ranks hold a model already, so need no lease of a group that is being made.
        """
        replicas = Replicas.of(spec.sharding, len(started.members))
        supervisor = Supervisor(
            name,
            started.members,
            spec.timeouts,
            reservation.release,
            spec.lifetime,
            replicas=replicas,
            is_loaded=is_loaded,
        )
        client = Client(started.members, supervisor, spec.timeouts, spec.max_output_bytes)
        files = ModelFiles(normal_path(spec.checkpoint)) if files is None else files
        return cls(spec, client, started.visible_gpus, reservation, files, spec.optimizer is not None)
