"""The only module that uses Ray's private names; checked with Ray 2.60.

The public state API (`ray.util.state`) queries the dashboard, which may not be running; these functions query the GCS.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import ray
from ray._private import state
from ray._private.worker import WORKER_MODE, get_dashboard_url
from ray._raylet import AuthenticationMode, get_authentication_mode  # type: ignore[attr-defined]


def free_resources() -> Mapping[str, Mapping[str, float]]:
    """Return the free resources of each node: node id → resource → amount. A node that just joined may be missing."""
    free: Mapping[str, Mapping[str, float]] = state.available_resources_per_node()
    return free


def dead_jobs() -> set[str]:
    """Return the ids of the jobs whose drivers are dead."""
    return {job["JobID"] for job in state.jobs() if job["IsDead"]}


def has_started(actor: Any) -> bool:
    """Return True if an actor's process is running, or Ray does not report its state."""
    return state.actors(actor_id=actor._actor_id.hex()).get("State") in ("ALIVE", None)


def is_worker() -> bool:
    """Return True if this process runs a Ray task or actor, and is not a driver."""
    is_task: bool = ray.get_runtime_context().worker.mode == WORKER_MODE
    return is_task


def has_token_auth() -> bool:
    """Return True if this process authenticates to Ray with a token."""
    is_token: bool = get_authentication_mode() == AuthenticationMode.TOKEN
    return is_token


def dashboard_url() -> str:
    """Return host:port of the cluster's dashboard; empty if none is running."""
    url: str | None = get_dashboard_url()
    return (url or "").rpartition("://")[2].rstrip("/")
