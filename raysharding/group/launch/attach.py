"""`attach`: a driver joins the drivers of a named group."""

from __future__ import annotations

from dataclasses import replace

from raysharding.config import Timeouts
from raysharding.group.calls import Client
from raysharding.group.cluster import check_name, join_existing
from raysharding.group.launch.launch import Loaded, RunningGroup
from raysharding.group.launch.spec import GroupSpec
from raysharding.group.launch.start_controller import find_controller

_ANSWER_S = 30.0


def attach(name: str, timeouts: Timeouts | None) -> RunningGroup:
    """Join a named group; see `ShardedModelGroup.attach`."""
    if name is None:
        raise ValueError("name=None: give the name of a group")
    check_name(name)
    join_existing()
    chosen = Timeouts() if timeouts is None else timeouts
    client = Client(find_controller(name), f"group {name!r}", chosen, 0)
    try:
        attached = client.connection.attach(within_s=min(_ANSWER_S, chosen.call_s))
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
