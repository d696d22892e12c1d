"""`connect`: starts or joins Ray as `ray.init()` does, but does not wait for a cluster that is gone."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import ray

from raysharding.errors import PlacementError

ANSWER_S = 5.0
"""Longest wait for the cluster's port. Ray itself tries for minutes, in silence."""


def connect(address: str | None = None) -> None:
    """Call `ray.init()` where the program has not.

    Args:
        address: The cluster to join. Default: as `ray.init()` chooses.

    Raises:
        PlacementError: Nothing listens at the address that `ray.init()` would join.
    """
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
    """
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
