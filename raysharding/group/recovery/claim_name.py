"""`claim_name`: makes the name of a new group free, or says that it is taken."""

from __future__ import annotations

import time

from raysharding.errors import GroupError
from raysharding.group.cluster import check_free, group_names, started_cluster, warn
from raysharding.group.launch import end_own_groups
from raysharding.group.recovery.attach import attach

_GONE_S = 10.0
_LOOK_S = 0.05


def claim_name(name: str, *, replace: bool) -> None:
    """Check that a new group can have a name; warn if a name is of no use on this cluster.

    Args:
        name: The name.
        replace: True to shut down the group that has the name; see `ShardedModelGroup.from_checkpoint`.

    Raises:
        ValueError: A group has the name, or is still being made under it.
    """
    if started_cluster():
        what = "ray.init() of this process started the cluster, which ends with this process, and so does the group"
        cure = "to keep it, start a cluster by `ray start --head` and join it by ray.init('auto')"
        warn(f"name={name!r}: {what}: {cure}")
    if replace:
        end_own_groups(name)
        _end_others(name)
    check_free(name)


def _end_others(name: str) -> None:
    """Take a named group over from another driver, dead or alive, and shut it down."""
    refused: ValueError | None = None
    if name in group_names():
        try:
            attach(name, None).client.supervisor.shutdown()
        except GroupError:
            pass  # the group is broken: `attach` has stopped it
        except ValueError as error:
            refused = error  # the group is still being made, or its driver is ending it at this moment
    until = time.monotonic() + _GONE_S
    while name in group_names() and time.monotonic() < until:
        time.sleep(_LOOK_S)
    if refused is not None and name in group_names():
        raise refused
