"""`connect`: starts or joins Ray as `ray.init()` does, but does not wait for a cluster that is gone.

Note [Forks]: a forked child has its parent's objects but none of its threads, neither those of a group nor Ray's own.
Anything that waits for those threads waits forever: a group's calls, and also every call of Ray, including
`ray.shutdown()` (Ray 2.60). If the parent was connected to Ray, the child can therefore not use a group, nor make one.
"""

from __future__ import annotations

import os
import socket
from pathlib import Path

import ray

from raysharding.errors import GroupError, PlacementError
from raysharding.group.cluster.ray_internals import client_session

ANSWER_S = 5.0
"""Longest wait for the cluster's port. Ray itself retries for minutes without a message."""


_forked_from: int | None = None
"""In a child that was forked while Ray was connected: the parent's process id. Elsewhere `None`."""


def _note_fork() -> None:
    global _forked_from
    if ray.is_initialized():
        _forked_from = os.getppid()


os.register_at_fork(after_in_child=_note_fork)


def refuse_in_fork(what: str) -> None:
    """Raise in a forked child, where the operation would never end (Note [Forks]).

    Args:
        what: The operation, for the error.

    Raises:
        GroupError: This process was forked from one that was connected to Ray.
    """
    if _forked_from is not None:
        raise GroupError(
            f"{what}: this process ({os.getpid()}) was forked from process {_forked_from}, where Ray was connected: "
            "neither Ray nor groups work in a forked child. Start the child with "
            "multiprocessing.get_context('spawn') and call ShardedModelGroup.attach(name) or make a group there"
        )


def connect(address: str | None = None) -> None:
    """Call `ray.init()` unless Ray is already initialized.

    Args:
        address: The cluster to join. Default: the one that `ray.init()` chooses.

    Raises:
        PlacementError: Nothing listens at the address that `ray.init()` would join.
        GroupError: This process was forked from one that was connected to Ray.
    """
    refuse_in_fork("connecting to Ray")
    if ray.is_initialized():
        return
    announced = _announced() if address is None else (address, "--address")
    if announced is not None:
        _check_that_it_answers(*announced)
    ray.init(address)


def join_announced() -> bool:
    """Join the cluster that the environment names, if any, and return True if Ray is connected; never start a cluster.

    Raises:
        PlacementError: As `connect`.
        GroupError: As `connect`.
    """
    refuse_in_fork("connecting to Ray")
    if not ray.is_initialized() and (os.environ.get("RAY_ADDRESS", "local") != "local" or _announced() is not None):
        connect()
    return bool(ray.is_initialized())


def join_existing() -> None:
    """Join the cluster that this process uses or that the environment names; never start a cluster.

    Raises:
        PlacementError: There is none, or it does not answer; the error says where it was looked for.
        GroupError: As `connect`.
    """
    try:
        if join_announced():
            return
        why = ""
    except ConnectionError as error:  # RAY_ADDRESS=auto, and Ray has found nothing
        why = f" ({str(error).partition('. ')[0]})"
    named = os.environ.get("RAY_ADDRESS")
    raise PlacementError(
        "no Ray cluster to look in: this process has not called ray.init(), RAY_ADDRESS is "
        f"{'not set' if named is None else repr(named)}{why}, and {_cluster_file()} names none: call "
        "ray.init(address=...) with the address of the group's cluster, or start one by `ray start --head`"
    )


def own_node_id() -> str:
    """Return Ray's id of the node that this process runs on; empty behind `ray://`, where that may be none."""
    return "" if client_session() is not None else str(ray.get_runtime_context().get_node_id())


def _announced() -> tuple[str, str] | None:
    """Return (address, source of the address) of the cluster that `ray.init()` would join.

    `None` if `ray.init()` starts a cluster or searches for one itself.
    """
    address = os.environ.get("RAY_ADDRESS", "")
    if address:
        # `local` starts a cluster, `auto` searches for one first; a URI such as ray://host:port has its own client.
        other = address in ("auto", "local") or "://" in address
        return None if other else (address, "RAY_ADDRESS")
    left = _cluster_file()
    try:
        written = left.read_text().strip()
    except OSError:
        return None
    return (written, str(left)) if written else None


def _cluster_file() -> Path:
    """Return the file in which Ray itself looks for the address of this machine's cluster."""
    scratch = os.environ.get("RAY_TMPDIR", os.environ.get("TMPDIR", "/tmp"))
    return Path(scratch, "ray", "ray_current_cluster")


def _check_that_it_answers(address: str, source: str) -> None:
    host, _, port = address.rpartition(":")
    if not port.isdecimal():
        return  # Ray reports what is wrong with the address
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=ANSWER_S).close()
    except OSError as error:
        cures = {"RAY_ADDRESS": "unset it", "--address": "leave it out"}
        cure = cures.get(source, "remove that file (`ray stop` does)")
        raise PlacementError(
            f"no Ray cluster answers at {address}, which {source} names ({error}): start the cluster, or {cure} to use "
            "a local one"
        ) from error
