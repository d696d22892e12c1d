"""`connect`: starts or joins Ray as `ray.init()` does, but does not wait for a cluster that is gone.

Note [Forks]: a forked child has the objects of its parent and none of its threads, neither a group's supervision nor
Ray's own. What waits for them waits for ever: a call of a group, but any call of Ray as well, `ray.shutdown()` included
(Ray 2.60). So where the parent was connected to Ray the child can do nothing with a group, not even make its own.
"""

from __future__ import annotations

import os
import socket
from pathlib import Path

import ray

from raysharding.errors import GroupError, PlacementError

ANSWER_S = 5.0
"""Longest wait for the cluster's port. Ray itself tries for minutes, in silence."""


_forked_from: int | None = None
"""The parent's process id, in a child that was forked while Ray was connected."""


def _note_fork() -> None:
    global _forked_from
    if ray.is_initialized():
        _forked_from = os.getppid()


os.register_at_fork(after_in_child=_note_fork)


def refuse_in_fork(what: str) -> None:
    """Raise in a forked child what would never end there; see Note [Forks].

    Args:
        what: What was asked for.

    Raises:
        GroupError: This process was forked from one that was connected to Ray.
    """
    if _forked_from is not None:
        raise GroupError(
            f"{what}: this process ({os.getpid()}) was forked from process {_forked_from}, where Ray was connected: "
            "neither Ray nor its groups work in a forked child. Start it with multiprocessing.get_context('spawn') and "
            "use ShardedModelGroup.attach(name) there, or make a group there"
        )


def connect(address: str | None = None) -> None:
    """Call `ray.init()` where the program has not.

    Args:
        address: The cluster to join. Default: as `ray.init()` chooses.

    Raises:
        PlacementError: Nothing listens at the address that `ray.init()` would join.
        GroupError: This is a forked child; see `refuse_in_fork`.
    """
    refuse_in_fork("connecting to Ray")
    if ray.is_initialized():
        return
    announced = _announced() if address is None else (address, "--address")
    if announced is not None:
        _check_that_it_answers(*announced)
    ray.init(address)


def join_announced() -> bool:
    """Join the cluster that the environment names, if it names one; start none. Whether Ray is connected then.

    Raises:
        PlacementError: As `connect`.
        GroupError: As `connect`.
    """
    refuse_in_fork("connecting to Ray")
    if not ray.is_initialized() and (os.environ.get("RAY_ADDRESS", "local") != "local" or _announced() is not None):
        connect()
    return bool(ray.is_initialized())


def _announced() -> tuple[str, str] | None:
    """(address, what names it) of the cluster that `ray.init()` would join; `None` if it starts one or looks itself."""
    address = os.environ.get("RAY_ADDRESS", "")
    if address:
        # `local` starts one, `auto` looks for processes first; a URI such as ray://host:port has a client of its own.
        other = address in ("auto", "local") or "://" in address
        return None if other else (address, "RAY_ADDRESS")
    # Where Ray itself looks for it.
    scratch = os.environ.get("RAY_TMPDIR", os.environ.get("TMPDIR", "/tmp"))
    left = Path(scratch, "ray", "ray_current_cluster")
    try:
        written = left.read_text().strip()
    except OSError:
        return None
    return (written, str(left)) if written else None


def _check_that_it_answers(address: str, source: str) -> None:
    host, _, port = address.rpartition(":")
    if not port.isdecimal():
        return  # Ray says what is wrong with it
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=ANSWER_S).close()
    except OSError as error:
        cures = {"RAY_ADDRESS": "unset it", "--address": "leave it out"}
        cure = cures.get(source, "remove that file (`ray stop` does)")
        raise PlacementError(
            f"no Ray cluster answers at {address}, which {source} names ({error}): start the cluster, or {cure} to use "
            "one of this machine alone"
        ) from error
