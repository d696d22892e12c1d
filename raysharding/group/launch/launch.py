"""`launch`: from a checkpoint's path to running, loaded ranks; the failure of a step undoes all steps before it.

`attach`: a driver joins the drivers of a named group.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from raysharding.checkpoint import Checkpoint
from raysharding.checkpoint.storage import HubPath, normal_path, split_path
from raysharding.config import Timeouts
from raysharding.distributed import LoadReport
from raysharding.distributed.comm import StoreAddress
from raysharding.errors import CheckpointError
from raysharding.group.calls import Client, UndoOnInterrupt, collect_all, follow
from raysharding.group.cluster import (
    check_name,
    choose_num_threads,
    choose_ranks,
    cluster_cpus,
    cluster_gpus,
    connect,
    join_existing,
    own_bundles,
    own_node_id,
    rank_need,
    tell,
    warn,
)
from raysharding.group.launch.preflight import Preflight, PreflightReport
from raysharding.group.launch.spec import GroupSpec, Opened, check_fit, open_spec
from raysharding.group.launch.start_controller import (
    find_controller,
    note_own_group,
    own_groups,
    start_controller,
)
from raysharding.group.launch.start_report import StartClock, StartReport
from raysharding.group.messages import Started, StartPlan, pack
from raysharding.group.rank import CONCURRENCY_GROUPS, Assignment, ModelFacts, RankActor, Title
from raysharding.models import Adapted, InputBounds

# Ranks time out a little later than the driver, so that the driver's error, which covers all ranks, is raised first.
_GRACE_S = 5.0
_COLLECTIVE_GRACE_S = 60.0
_ATTACH_S = 30.0


@dataclass(frozen=True)
class Loaded:
    """Reports and facts of a group that was made, for this driver and those that attach later."""

    load_report: LoadReport
    """Rank 0's report of the load that made the group."""
    bounds: InputBounds
    """Bounds of the model's inputs."""
    facts: ModelFacts
    """Facts of the model."""
    device_type: str
    """Type of the ranks' devices."""
    preflight_report: PreflightReport | None
    """Report of the preflight when the group was made; `None` without a preflight."""
    start_report: StartReport
    """Report of the start or restart that made the ranks."""


@dataclass
class RunningGroup:
    """A group, as one of its drivers sees it; a restart replaces `spec` and `loaded`."""

    spec: GroupSpec
    """The group's spec, with the model that the ranks build."""
    client: Client
    """Client that sends calls to the controller."""
    loaded: Loaded
    """Reports and facts of the group, by its start or its last restart."""

    def stored_spec(self) -> GroupSpec:
        """Return the spec that a restart uses; another driver of the group may have set the optimizer."""
        spec: GroupSpec = self.client.connection.ask("spec").unpack()
        return spec


def launch(options: Mapping[str, Any]) -> RunningGroup:
    """Make a group from the arguments of `ShardedModelGroup.from_checkpoint`."""
    if options["replace"] and options["name"] is None:
        raise ValueError("replace=True without name=: give the name of the group to replace, such as name='llama'")
    spec = GroupSpec.of(options)
    # No loaded state exists yet that waiting for the next call boundary could preserve: one Ctrl-C undoes all.
    with UndoOnInterrupt():
        clock = StartClock()
        spec, opened, is_joined = open_spec(spec)
        # The start of a cluster costs more than this check, and the claim of a name may end the group that has it.
        is_checked = not is_joined or spec.name is not None
        if is_checked:
            check_fit(opened, spec.sharding, spec.loading)
        clock.end("checkpoint" if not is_checked else "checkpoint, model checked")
        connect()
        clock.end("cluster")
        controller = start_controller(spec, replace=options["replace"])
        client = Client(controller, spec.title, spec.timeouts, spec.max_output_bytes)
        try:
            client.connection.attach(within_s=spec.timeouts.start_s, makes=True)
            clock.end("controller")

            def meanwhile() -> None:
                if not is_checked:
                    check_fit(opened, spec.sharding, spec.loading)
                    clock.end("model checked")

            with client.making():
                return make(client, spec, opened, clock, meanwhile)
        except BaseException:
            client.shutdown()
            raise


def attach(name: str, timeouts: Timeouts | None) -> RunningGroup:
    """Join the drivers of a named group."""
    if name is None:
        raise ValueError("name=None: give the name of a group")
    check_name(name)
    join_existing()
    chosen = Timeouts() if timeouts is None else timeouts
    client = Client(find_controller(name), f"group {name!r}", chosen, 0)
    try:
        attached = client.connection.attach(within_s=min(_ATTACH_S, chosen.call_s))
        if attached.spec is None or attached.loaded is None:
            what = "the group's driver is still making it; attach when the group is READY"
            raise ValueError(f"name={name!r}: {what}")
    except BaseException:
        client.detach()
        raise
    spec: GroupSpec = attached.spec.unpack()
    spec = spec if timeouts is None else replace(spec, timeouts=timeouts)
    client.timeouts, client.max_output_bytes = spec.timeouts, spec.max_output_bytes
    loaded: Loaded = attached.loaded.unpack()
    return RunningGroup(spec, client, loaded)


def make(
    client: Client,
    spec: GroupSpec,
    opened: Opened,
    clock: StartClock,
    meanwhile: Callable[[], object],
    *,
    reloaded: str | None = None,
) -> RunningGroup:
    """Start the ranks of a group that is STARTING, load them, and make the group READY.

    Args:
        client: The group's client.
        spec: The spec of the ranks.
        opened: The checkpoint.
        clock: Measures the start.
        meanwhile: Runs while the ranks' processes start, which takes seconds.
        reloaded: Path or URI of the files that a restart loads, if not those that the group was made from.
    """
    spec = replace(spec, model=opened.model)
    device_type, world_size = choose_ranks(
        spec.device, spec.world_size, spec.placement, cluster_gpus(spec.device or "cuda"), cluster_cpus()
    )
    paths = [file.path for file in opened.base.files]
    plan = start_plan(spec, device_type, world_size, paths=paths, imports=_imports(opened))
    started = start_ranks(client, plan, meanwhile)
    clock.end("processes", started.seconds)
    note_own_group(client, spec)
    spec, opened = _where_it_is(replace(spec, world_size=len(started.ranks)), opened, started)
    preflight = Preflight(client) if spec.preflight else None
    if preflight is not None:
        preflight.nodes()
        clock.end("preflight of the nodes")
    rendezvous(client, spec, started, clock)
    loaded = _fill(client, spec, opened, preflight, clock)
    client.connection.ask("ready", packed_spec(spec), pack(loaded, "the group's reports").snapshot(), reloaded)
    client.connection.refresh()
    client.connection.generation = client.connection.snapshot.generation
    if spec.progress is None or spec.progress is True:
        tell(f"{spec.title}: {loaded.start_report.line()}")
    return RunningGroup(spec, client, loaded)


def packed_spec(spec: GroupSpec) -> Any:
    """Pack a spec, which may hold functions that another driver cannot import.

    A progress callback belongs to this driver, and most callbacks do not pickle.
    """
    return pack(replace(spec, progress=None), "the arguments of from_checkpoint").snapshot()


def start_plan(
    spec: GroupSpec,
    device_type: str,
    world_size: int,
    *,
    paths: Sequence[str] = (),
    node_ids: Sequence[str] = (),
    imports: tuple[str | None, bytes] | None = None,
) -> StartPlan:
    """Return what the controller needs to start the ranks of a group.

    Args:
        spec: The group's spec.
        device_type: Type of the ranks' devices.
        world_size: Number of ranks.
        paths: Files of the checkpoint; rank 0 runs on a node that sees them.
        node_ids: Nodes that get one rank without resources each, instead of a placement group.
        imports: Arguments of the ranks' `import_code`; `None` for a model of the user's own code.
    """
    access, need = spec.hub_access(), rank_need(device_type, spec.placement)
    return StartPlan(
        actor_class=RankActor,
        concurrency_groups=CONCURRENCY_GROUPS,
        titles=tuple(Title(spec.short_name, spec.title, bundle) for bundle in range(world_size)),
        world_size=world_size,
        device_type=device_type,
        placement=spec.placement,
        place_s=spec.timeouts.place_s,
        start_s=spec.timeouts.start_s,
        paths=tuple(paths),
        driver_node=own_node_id(),
        hub=None if access is None else pack(access, "the access to the hub").snapshot(),
        held=(*own_groups(), *own_bundles(world_size, need)),
        tells=spec.progress is not False,
        node_ids=tuple(node_ids),
        imports=imports,
    )


def _imports(opened: Opened) -> tuple[str | None, bytes] | None:
    """Return the arguments of the ranks' `import_code`; `None` for a model of the user's own code."""
    model = opened.model.model if isinstance(opened.model, Adapted) else opened.model
    if model is not None and not isinstance(model, str):
        return None
    return model, replace(opened.base, files=(), tensors={}).to_json()


def start_ranks(client: Client, plan: StartPlan, meanwhile: Callable[[], object] | None = None) -> Started:
    """Place the ranks and start their processes; `meanwhile` runs in the driver before it waits for them."""
    starting = client.connection.begin("start_ranks", client.connection.key, plan)
    if meanwhile is not None:
        meanwhile()
    started: Started = client.connection.finish(starting, within_s=None)
    client.connection.refresh()
    return started


def _where_it_is(spec: GroupSpec, opened: Opened, started: Started) -> tuple[GroupSpec, Opened]:
    """Return spec and checkpoint where rank 0 sees the files.

    A model of the hub is in the cache of rank 0's node, or in no cache of the ranks' nodes.

    Raises:
        CheckpointError: No rank's node sees the files, which are not on the hub either.
    """
    base = opened.base
    seen = started.snapshot
    if seen is None and not started.sees_checkpoint:
        path = base.files[0].path
        hub = HubPath.of_pinned(split_path(path)[0])
        if hub is None:
            nodes = ", ".join(sorted({info.node_ip for info in started.ranks}))
            cure = (
                "copy it there, put it on storage that they share, or choose nodes that see it by Placement(labels=...)"
            )
            raise CheckpointError(f"not visible on the nodes of the ranks: {nodes}: {cure}", path=path)
        seen = hub.uri
    if seen is None or seen == base.directory:
        return spec, opened
    return spec.seen_at(base.path, seen), replace(opened, base=base.moved(seen))


def _fill(client: Client, spec: GroupSpec, opened: Opened, preflight: Preflight | None, clock: StartClock) -> Loaded:
    """Build the module on every rank, load it, and set its optimizer."""
    if preflight is not None:
        preflight.link()
        clock.end("first collectives")
    args = (spec.model, opened.base.to_json(), spec.sharding, spec.loading)
    built = client.submit_same("build", *args, deadline_s=spec.timeouts.start_s, collect=collect_all).result()
    clock.end("build", [seconds for *_, seconds in built])
    bounds, facts, _ = built[0]
    if preflight is not None:
        preflight.memory(spec.optimizer)
        clock.end("preflight of the memory")
    report = _load(client, opened.base, None, spec)
    if opened.adapters is not None:
        _load(client, opened.adapters, normal_path(spec.checkpoint), spec)
    parts = {"plan": report.plan_s, "stream": report.stream_s, "initialise": report.initialise_s}
    clock.end("load", [parts])
    if spec.optimizer is not None:
        stall_s = spec.timeouts.load_stall_s
        # The optimizer state of a base is of all its parameters: new adapters begin with none.
        restores = opened.adapters is not None or not isinstance(opened.model, Adapted)
        made = client.submit_same(
            "set_optimizer", spec.optimizer, {}, restores, deadline_s=stall_s, watch_progress=True
        )
        if (warning := made.result()) is not None:
            warn(warning)
        clock.end("optimizer")
    device_type = client.ranks[0].device.partition(":")[0]
    checked = None if preflight is None else preflight.report()
    return Loaded(report, bounds, facts, device_type, checked, clock.report())


def _load(client: Client, opened: Checkpoint, path: str | None, spec: GroupSpec) -> LoadReport:
    """Stream a checkpoint into the ranks, with a progress bar, and return rank 0's report."""
    load = client.submit_same("load", path, deadline_s=spec.timeouts.load_stall_s, watch_progress=True)
    follow(load, f"loading {opened.path}", opened.num_bytes, spec.progress)
    return warned(load.result())


def warned(report: LoadReport) -> LoadReport:
    """Issue the warnings of a load in the user's program; return the report."""
    for warning in report.warnings:
        warn(warning)
    return report


def rendezvous(client: Client, spec: GroupSpec, started: Started, clock: StartClock) -> StoreAddress:
    """Make every rank join a new process group through rank 0's store, and return its address."""
    timeouts, ranks = spec.timeouts, started.ranks
    deadline_s = timeouts.rendezvous_s + _GRACE_S
    here = (ranks[0].node_ip, timeouts.rendezvous_s, spec.placement.port_range)
    hosts = [here, *[(None, 0.0, None)] * (len(ranks) - 1)]
    address: StoreAddress = client.submit_each("serve_store", hosts, deadline_s=deadline_s).result()
    clock.end("store")
    places = [
        Assignment(
            info=info,
            world_size=len(ranks),
            visible_gpus=visible,
            shares_device=spec.placement.gpus_per_rank < 1,
            num_threads=choose_num_threads(spec.placement),
            rendezvous_s=timeouts.rendezvous_s,
            collective_s=max(timeouts.call_s, timeouts.load_stall_s) + _COLLECTIVE_GRACE_S,
            stall_s=timeouts.load_stall_s + _GRACE_S,
            weights_version=client.connection.weights_version,
        )
        for info, visible in zip(ranks, started.visible_gpus, strict=True)
    ]
    joining = [(place, address) for place in places]
    joined = client.submit_each("join", joining, deadline_s=deadline_s, collect=collect_all)
    clock.end("process group", joined.result())
    return address
