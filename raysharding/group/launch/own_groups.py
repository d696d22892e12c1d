"""The groups of this process: whoever makes another one may want their resources, or a name of theirs.

In a notebook a cell that makes a group is run again while its earlier group still exists.
"""

from __future__ import annotations

import weakref
from typing import NamedTuple

from raysharding.group.calls import Client
from raysharding.group.cluster import Resources, show_resources
from raysharding.group.launch.spec import GroupSpec
from raysharding.group.messages import GroupState


class _Own(NamedTuple):
    spec: GroupSpec
    need: Resources


_own: weakref.WeakKeyDictionary[Client, _Own] = weakref.WeakKeyDictionary()


def note_own_group(client: Client, spec: GroupSpec, need: Resources) -> None:
    """Note a group of this process.

    Args:
        client: The group's client.
        spec: The group's spec.
        need: Resources of one rank.
    """
    _own[client] = _Own(spec, need)


def own_groups() -> tuple[str, ...]:
    """Return a line for each group of this process that holds resources; the last line says how to end them."""
    held = [
        f"this program's own {client.name} holds {len(client.ranks)} x {show_resources(own.need)} "
        f"({own.spec.checkpoint}, {client.state.value})"
        for client, own in list(_own.items())
        if client.state in (GroupState.READY, GroupState.BUSY)
    ]
    cure = "end it by its shutdown(), or make the new one with name= and replace=True, which ends that of the same name"
    return (*held, cure) if held else ()


def end_own_groups(name: str) -> None:
    """Shut down this process's groups of a name, as `ShardedModelGroup.shutdown` does.

    Raises:
        Exception: The failure of a background save. The group is shut down nevertheless.
    """
    for client, own in list(_own.items()):
        if own.spec.name != name or client.state is GroupState.CLOSED:
            continue
        try:
            if client.state in (GroupState.READY, GroupState.BUSY):
                client.pending.wait(own.spec.timeouts.load_stall_s)
        finally:
            client.shutdown()
