"""`submit_save`, `submit_load`: saves and loads of a running group, which its `ModelFiles` note for a restart."""

from __future__ import annotations

from collections.abc import Callable

from raysharding.checkpoint import locate
from raysharding.checkpoint.storage import access_to, normal_path
from raysharding.distributed.saving import Destination
from raysharding.group.calls import Call, Collect, collect_rank0
from raysharding.group.launch.launch import RunningGroup, warned
from raysharding.group.supervision import Check
from raysharding.models import Adapted


def submit_save(
    running: RunningGroup,
    to: Destination,
    optimizer: bool,
    async_save: bool,
    is_origin: bool,
    noted: Callable[[], None],
) -> Call:
    """Submit a save; see `ShardedModelGroup.save`.

    Args:
        running: The group.
        to: Where to save.
        optimizer: True to save the optimizer's state, too.
        async_save: True to write in the background.
        is_origin: True if a restart may load the save.
        noted: Called when the group's files have changed, for another driver that attaches later.
    """
    client, files = running.client, running.files
    save = files.begin_save(to.path, is_origin=is_origin)
    options = {"optimizer": optimizer, "keep_last": to.keep_last, "dtype": to.dtype, "token": save.token}
    what = (to.path, to.overwrite, async_save, options)
    collect = Collect(lambda _: None) if async_save else collect_rank0
    stall_s = client.timeouts.load_stall_s
    call = client.submit_same("save", *what, deadline_s=stall_s, watch=True, collect=collect)

    def saved() -> None:
        files.committed(save)
        noted()

    if async_save:
        noted()  # another driver may have to determine how the save ended
        client.follow(save, call, saved)
    else:
        call.when_done(lambda ended: saved() if ended.succeeded() else None)
    return call


def submit_load(
    running: RunningGroup, path: str, revision: str | None, check: Check | None, noted: Callable[[], None]
) -> Call:
    """Submit a load; see `ShardedModelGroup.load`.

    Args:
        running: The group.
        path: Path, URI or hub id.
        revision: Revision of a hub id.
        check: Raises if the call must not be queued.
        noted: As for `submit_save`.
    """
    if check is not None:
        check()  # before the hub is asked; again when the call is queued
    client, files, target = running.client, running.files, normal_path(locate(path, revision))
    stall_s = client.timeouts.load_stall_s
    collect = Collect(lambda call: warned(collect_rank0.join(call)))
    call = client.submit_same(
        "load", target, access_to(target), deadline_s=stall_s, watch=True, check=check, collect=collect
    )
    number = files.begin_load()

    def loaded(ended: Call) -> None:
        if ended.succeeded():
            if isinstance(running.spec.model, Adapted) and ended.value(0).kept:
                files.base = target
            else:
                files.loaded(target, number)
            noted()

    call.when_done(loaded)
    return call
