"""`launch`: from a checkpoint's path to running, loaded ranks; the failure of a step undoes all steps before it.

`RunningGroup`: the parts of a running group, which launch, attach, restart and doctor assemble. `GroupRecord`: the data
that a driver needs to attach to a named group; the group's first actor keeps the record.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

import ray

from raysharding.checkpoint import Checkpoint
from raysharding.checkpoint.storage import normal_path
from raysharding.distributed import LoadReport
from raysharding.distributed.comm import StoreAddress
from raysharding.errors import GroupError
from raysharding.group.actors import Assignment, ModelFacts
from raysharding.group.calls import BegunSave, ModelFiles, ProgressOption, follow
from raysharding.group.cluster import (
    Reservation,
    actor_name,
    check_free,
    choose_num_threads,
    choose_ranks,
    cluster_cpus,
    cluster_gpus,
    connect,
    reserve,
    wait_placed,
    warn,
)
from raysharding.group.launch.own_groups import note_own_group, own_groups
from raysharding.group.launch.preflight import Preflight, PreflightReport
from raysharding.group.launch.spec import GroupSpec, Opened, check_fit, open_spec
from raysharding.group.launch.start_actors import Started, start_actors
from raysharding.group.rpc import Packed, pack
from raysharding.group.supervision import Client, Supervisor
from raysharding.models import Adapted, InputBounds

# Ranks time out a little later than the driver, so that the driver's error, which covers all ranks, is raised first.
_GRACE_S = 5.0
_COLLECTIVE_GRACE_S = 60.0
_KEEP_S = 30.0
_AT_ONCE_S = 1  # Ray 2.60 cuts fractions of a second off


@dataclass(frozen=True)
class Loaded:
    """What the making of a group has found, for this driver and those that attach later."""

    load_report: LoadReport | None = None
    """Rank 0's report of the load that made the group; `None` before the load has ended."""
    bounds: InputBounds = field(default_factory=InputBounds)
    """Bounds of the model's inputs; without limits before the load."""
    facts: ModelFacts = field(default_factory=ModelFacts)
    """Facts of the model; without values before the load."""
    preflight_report: PreflightReport | None = None
    """Report of the preflight when the group was made; `None` without a preflight."""


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
    loaded: Loaded = field(default_factory=Loaded)
    """What the load has found."""

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
        options = (spec.timeouts, reservation.release, spec.lifetime)
        supervisor = Supervisor(name, started.members, *options, is_loaded=is_loaded)
        client = Client(started.members, supervisor, spec.timeouts, spec.max_output_bytes)
        note_own_group(client, spec, reservation.need)
        files = ModelFiles(normal_path(spec.checkpoint)) if files is None else files
        return cls(spec, client, started.visible_gpus, reservation, files, spec.optimizer is not None)


@dataclass(frozen=True)
class GroupRecord:
    """Record of a named group."""

    version: float
    """Wall-clock time of writing; of two records that arrive out of order, the one with the later time is kept."""
    started: Started
    """The ranks, without their actor handles, which are valid in one process only."""
    reservation: Reservation
    """The ranks' resources."""
    spec: Packed
    """The `GroupSpec`, pickled, since it may hold functions that the next driver cannot import."""
    origin: str
    """The newest files that hold the model."""
    begun: tuple[BegunSave, ...]
    """Saves that were requested from the ranks since, and whose outcome the driver did not know."""
    base: str | None
    """See `ModelFiles`."""
    loaded: Loaded
    """See `RunningGroup`."""


def keep_record(running: RunningGroup) -> None:
    """Store the record of a group that has been made.

    Raises:
        GroupError: The actor that keeps the record is gone, or does not answer.
    """
    try:
        ray.get(update_record(running, running.spec), timeout=_KEEP_S)
    except ray.exceptions.RayError as error:
        what = f"group {running.spec.name!r}: the rank that is to keep the group's record failed to store it: {error}"
        raise GroupError(what) from error


def update_record(running: RunningGroup, spec: GroupSpec) -> ray.ObjectRef:
    """Store a newer record without waiting: if the actor that keeps it is gone, the group is broken anyway.

    Args:
        running: The group.
        spec: The group's spec, with its current optimizer.

    Returns:
        The reference to wait for.
    """
    members = running.client.members
    record = GroupRecord(
        version=time.time(),
        started=Started(tuple(replace(member, actor=None) for member in members), running.visible_gpus),
        reservation=replace(running.reservation, reaper=None),  # the reaper belongs to this driver
        # A progress callback belongs to the driver, and most callbacks do not pickle.
        spec=pack(replace(spec, progress=None), "the arguments of from_checkpoint").snapshot(),
        origin=running.files.origin,
        begun=running.files.begun,
        base=running.files.base,
        loaded=running.loaded,
    )
    keeper = next(one for one in members if one.name == actor_name(str(spec.name), 0))
    kept: ray.ObjectRef = keeper.actor.keep.remote(keeper.epoch, record)
    return kept


def launch(spec: GroupSpec, claim: Callable[[str], None] = check_free) -> RunningGroup:
    """Make a group; see `ShardedModelGroup.from_checkpoint`.

    Args:
        spec: The group's spec.
        claim: Called with the group's name, if it has one, before anything is placed; raises if the name is taken.
    """
    spec, opened, is_joined = open_spec(spec)
    # The start of a cluster costs more than this check, and the claim of a name may end the group that has it.
    is_checked = not is_joined or spec.name is not None
    if is_checked:
        check_fit(opened, spec.sharding, spec.loading)
    connect()
    if spec.name is not None:
        claim(spec.name)
    device_type, world_size = choose_ranks(
        spec.device, spec.world_size, spec.placement, cluster_gpus(spec.device or "cuda"), cluster_cpus()
    )
    spec = replace(spec, model=opened.model)
    running, opened = _place(spec, opened, world_size, device_type, is_checked)
    supervisor = running.client.supervisor
    try:
        supervisor.connect_ranks(spec.placement.port_range)
        preflight = Preflight(running.client) if spec.preflight else None
        if preflight is not None:
            preflight.nodes()
        rendezvous(running)
        loaded = _fill(running, opened, preflight)
        seen = None if preflight is None else preflight.finish()
        running = replace(running, loaded=replace(loaded, preflight_report=seen))
        if spec.name is not None:
            keep_record(running)
            running.reservation.outlive_owner()
    except BaseException:
        supervisor.shutdown()
        raise
    supervisor.started()
    return running


def _fill(running: RunningGroup, opened: Opened, preflight: Preflight | None) -> Loaded:
    """Build the module on every rank, load it, and set its optimizer."""
    spec, client = running.spec, running.client
    if preflight is not None:
        preflight.link()
    built = (spec.model, opened.base.to_json(), spec.sharding, spec.loading)
    bounds, facts = client.submit_same("build", *built, deadline_s=spec.timeouts.start_s).result()
    if preflight is not None:
        preflight.memory(spec.optimizer)
    report = _load(client, opened.base, None, spec.progress)
    if opened.adapters is not None:
        _load(client, opened.adapters, normal_path(spec.checkpoint), spec.progress)
    if spec.optimizer is not None:
        stall_s = spec.timeouts.load_stall_s
        # The optimizer state of a base is of all its parameters: new adapters begin with none.
        restores = opened.adapters is not None or not isinstance(opened.model, Adapted)
        made = client.submit_same("set_optimizer", spec.optimizer, {}, restores, deadline_s=stall_s, watch=True)
        if (warning := made.result()) is not None:
            warn(warning)
    return Loaded(report, bounds, facts)


def _load(client: Client, opened: Checkpoint, path: str | None, progress: ProgressOption) -> LoadReport:
    """Stream a checkpoint into the ranks, with a progress bar, and return rank 0's report."""
    load = client.submit_same("load", path, deadline_s=client.timeouts.load_stall_s, watch=True)
    follow(load, f"loading {opened.path}", opened.num_bytes, progress)
    return warned(load.result())


def warned(report: LoadReport) -> LoadReport:
    """Issue the warnings of a load in the user's program; return the report."""
    for warning in report.warnings:
        warn(warning)
    return report


def _place(
    spec: GroupSpec, opened: Opened, world_size: int, device_type: str, is_checked: bool
) -> tuple[RunningGroup, Opened]:
    """Reserve resources, start the actors and check the model; return the checkpoint where rank 0 sees it."""
    tells, place_s = spec.progress is not False, spec.timeouts.place_s
    check = None if is_checked else partial(check_fit, opened, spec.sharding, spec.loading)
    begun = time.monotonic()
    reservation = reserve(world_size, device_type, spec.placement, spec.lifetime, place_s)
    try:
        # The check and the start of an actor are seconds of imports each: they run at the same time, unless the ranks
        # have to wait for room. Actors start only when there is room: Ray 2.60 keeps a detached actor that is pending
        # in a placement group when the placement group is removed.
        if not reservation.placement_group.wait(_AT_ONCE_S):
            if check is not None:
                check()
                check = None
            wait_placed(reservation, world_size, spec.placement, place_s, begun=begun, held=own_groups, tells=tells)
        base = opened.base
        paths = [file.path for file in base.files]
        started, seen = start_actors(reservation, spec, world_size, device_type, paths, check)
        if seen is not None and seen != base.directory:
            spec, opened = spec.seen_at(base.path, seen), replace(opened, base=base.moved(seen))
        return RunningGroup.assemble(spec.title, spec, started, reservation), opened
    except BaseException:
        reservation.release()
        raise


def rendezvous(running: RunningGroup) -> StoreAddress:
    """Make every rank join a new process group through rank 0's store, and return its address; modules stay.

    Args:
        running: The ranks, connected to this process.
    """
    client = running.client
    timeouts, ranks = client.timeouts, client.ranks
    deadline_s = timeouts.rendezvous_s + _GRACE_S
    here = (ranks[0].node_ip, timeouts.rendezvous_s, running.spec.placement.port_range)
    hosts = [here, *[(None, 0.0, None)] * (len(ranks) - 1)]
    address: StoreAddress = client.submit_each("serve_store", hosts, deadline_s=deadline_s).result()
    places = [
        Assignment(
            info=info,
            world_size=len(ranks),
            visible_gpus=visible,
            shares_device=running.spec.placement.gpus_per_rank < 1,
            num_threads=choose_num_threads(running.spec.placement),
            rendezvous_s=timeouts.rendezvous_s,
            collective_s=max(timeouts.call_s, timeouts.load_stall_s) + _COLLECTIVE_GRACE_S,
            stall_s=timeouts.load_stall_s + _GRACE_S,
        )
        for info, visible in zip(ranks, running.visible_gpus, strict=True)
    ]
    client.submit_each("join", [(place, address) for place in places], deadline_s=deadline_s).result()
    return address
