"""`submit_save`, `submit_load`: saves and loads of a running group, which its controller notes for a restart."""

from __future__ import annotations

from collections.abc import Mapping

from raysharding.checkpoint import locate
from raysharding.checkpoint.format import new_token
from raysharding.checkpoint.storage import access_to, normal_path
from raysharding.distributed.saving import Destination
from raysharding.group.calls import Call, Collect, collect_rank0
from raysharding.group.launch.launch import RunningGroup, warned
from raysharding.group.messages import BegunSave


def submit_save(running: RunningGroup, to: Destination, optimizer: bool, async_save: bool, is_origin: bool) -> Call:
    """Submit a save of the group, under a new token.

    Args:
        running: The group.
        to: Where to save.
        optimizer: True to save the optimizer's state, too.
        async_save: True to write in the background.
        is_origin: True if a restart may load the save.
    """
    client = running.client
    save = BegunSave(to.path, is_origin, new_token())
    options = {"optimizer": optimizer, "keep_last": to.keep_last, "dtype": to.dtype, "token": save.token}
    call = client.submit_same(
        "save",
        *(to.path, to.overwrite, async_save, options),
        deadline_s=client.timeouts.load_stall_s,
        collect=Collect(lambda _: None) if async_save else collect_rank0,
        watch_progress=True,
        save=save,
        is_async_save=async_save,
    )
    if async_save:
        client.pending.begin(save, call)
    return call


def submit_load(running: RunningGroup, path: str, revision: str | None, refused_beside: Mapping[str, str]) -> Call:
    """Submit a load into the group.

    Args:
        running: The group.
        path: Path, URI or hub id.
        revision: Revision of a hub id.
        refused_beside: Kind of a lock → why the load is refused while another driver holds one of that kind.
    """
    client, target = running.client, normal_path(locate(path, revision))
    return client.submit_same(
        "load",
        *(target, access_to(target)),
        deadline_s=client.timeouts.load_stall_s,
        collect=Collect(lambda call: warned(collect_rank0.join(call))),
        watch_progress=True,
        loads=target,
        refused_beside=refused_beside,
    )
