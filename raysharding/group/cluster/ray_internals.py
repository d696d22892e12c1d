"""What this package needs of Ray that Ray keeps private: all of it is here. Seen in Ray 2.60.

The public state API (`ray.util.state`) asks the dashboard, which need not run; these ask the GCS.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import ray
from ray._private import state
from ray._private.worker import WORKER_MODE, get_dashboard_url
from ray._raylet import AuthenticationMode, get_authentication_mode  # type: ignore[attr-defined]


def free_resources() -> Mapping[str, Mapping[str, float]]:
    """Return what is free on each node: node id → resource → amount. A node that has just joined may be missing."""
    free: Mapping[str, Mapping[str, float]] = state.available_resources_per_node()
    return free


def dead_jobs() -> set[str]:
    """Return the ids of jobs whose drivers are gone."""
    return {job["JobID"] for job in state.jobs() if job["IsDead"]}


def has_started(actor: Any) -> bool:
    """Return True if an actor's process is up, as far as Ray says."""
    return state.actors(actor_id=actor._actor_id.hex()).get("State") in ("ALIVE", None)


def is_worker() -> bool:
    """Return True if this process is a task or an actor of Ray's, not a driver."""
    is_task: bool = ray.get_runtime_context().worker.mode == WORKER_MODE
    return is_task


def has_token_auth() -> bool:
    """Return True if this process talks to Ray with a token."""
    is_token: bool = get_authentication_mode() == AuthenticationMode.TOKEN
    return is_token


def dashboard_url() -> str:
    """Return host:port of the cluster's dashboard, empty where none runs."""
    url: str | None = get_dashboard_url()
    return (url or "").rpartition("://")[2].rstrip("/")
