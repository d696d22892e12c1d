"""`RunningGroup`: the parts of a running group, which launch, attach, restart and doctor assemble."""

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
    """Ranks under supervision, and the driver's data about them."""

    spec: GroupSpec
    """The group's spec, with the model that the ranks build."""
    client: Client
    """Client that sends calls to the ranks."""
    visible_gpus: tuple[str, ...]
    """See `Started`."""
    reservation: Reservation
    """The ranks' resources."""
    files: ModelFiles
    """Files that hold the model."""
    has_optimizer: bool = False
    """True if the ranks had an optimizer when these parts were assembled; a call may have set one since."""
    load_report: LoadReport | None = None
    """Rank 0's report of the load that made the group; `None` before the load has ended."""
    bounds: InputBounds = field(default_factory=InputBounds)
    """Bounds of the model's inputs; without limits before the load."""
    preflight_report: PreflightReport | None = None
    """Report of the preflight when the group was made; `None` without a preflight."""

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
        """Put ranks under the supervision of this process; the connections to them are opened later.

        Args:
            name: The group's name in errors.
            spec: The group's spec.
            started: The ranks' actors, under the epoch of this process.
            reservation: Resources of the ranks, which the supervision releases.
            files: Files that hold the model. Default: the checkpoint of `spec`.
            is_loaded: True if the ranks already hold a model, and so do not need the lease of a group that is being
                made.
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
