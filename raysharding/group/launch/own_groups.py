"""The groups of this process that have ranks: whoever makes another one may want their resources, or a name of theirs.

In a notebook a cell that makes a group is run again while its earlier group still exists.
"""

from __future__ import annotations

import weakref
from typing import NamedTuple

from raysharding.group.calls import PendingSaves
from raysharding.group.cluster import Resources, show_resources
from raysharding.group.launch.spec import GroupSpec
from raysharding.group.supervision import Client, GroupState, Supervisor


class _Own(NamedTuple):
    spec: GroupSpec
    need: Resources
    pending: PendingSaves


_own: weakref.WeakKeyDictionary[Supervisor, _Own] = weakref.WeakKeyDictionary()


def note_own_group(client: Client, spec: GroupSpec, need: Resources) -> None:
    """Note a group of this process.

    Args:
        client: The group's client.
        spec: The group's spec.
        need: Resources of one rank.
    """
    _own[client.supervisor] = _Own(spec, need, client.pending)


def own_groups() -> list[str]:
    """Return a line for each group of this process that holds resources; the last line says how to end them."""
    held = [
        f"this program's own {supervisor.name} holds {len(supervisor.members)} x {show_resources(own.need)} "
        f"({own.spec.checkpoint}, {supervisor.state.value})"
        for supervisor, own in list(_own.items())
        if supervisor.has_ranks
    ]
    cure = "end it by its shutdown(), or make the new one with name= and replace=True, which ends that of the same name"
    return [*held, cure] if held else []


def end_own_groups(name: str) -> None:
    """Shut down this process's groups of a name, as `ShardedModelGroup.shutdown` does.

    Raises:
        Exception: The failure of a background save. The group is shut down nevertheless.
    """
    for supervisor, own in list(_own.items()):
        if own.spec.name != name or not supervisor.has_ranks:
            continue
        try:
            if supervisor.state in (GroupState.READY, GroupState.BUSY):
                own.pending.wait(own.spec.timeouts.load_stall_s)
        finally:
            supervisor.shutdown()
