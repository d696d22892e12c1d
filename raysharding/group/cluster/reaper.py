"""`create_reaped`: a placement group that is removed when the process that requested it dies.

Note [Owners]: Ray removes a placement group when its creator is dead *and* the job of its creator is over (Ray 2.60);
Ray never removes a detached one. A driver's placement group is therefore removed with the driver. The placement group
of an actor (a Serve replica, a Tune trial) or of a task stays until the job ends, though Ray stops the ranks at once;
that of a named group stays forever.

In these cases a small actor, the reaper, creates the placement group. The reaper is detached, and Ray considers the job
of a detached creator over: when the reaper is dead, whatever the cause, Ray removes what the reaper created, unless it
is detached as well. The reaper ends when its owner does: it waits for an object that the owner owns and never creates,
until Ray reports that the owner has died. It runs on the owner's node, so the loss of another node cannot end it.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

_OWNER_S = 8.0
"""Seconds that a reaper waits for its owner's first call; the owner may have died while the reaper started."""


def create_reaped(
    bundles: Sequence[Mapping[str, float]], options: Mapping[str, Any], within_s: float
) -> tuple[PlacementGroup, Any]:
    """Create a placement group that does not outlive this process.

    Args:
        bundles: `bundles` of `ray.util.placement_group`.
        options: Its keyword arguments.
        within_s: Deadline for the reaper to start.

    Returns:
        The placement group, which need not be ready, and the reaper, to be killed when the placement group is removed.

    Raises:
        ray.exceptions.RayError: The reaper did not start.
        ValueError: Ray rejects an option.
    """
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    remote = ray.remote(num_cpus=0, max_restarts=0, concurrency_groups={"owner": 2})(_reaper_class())
    reaper = remote.options(lifetime="detached", scheduling_strategy=here).remote()
    try:
        reaper.end_with.remote([reaper.never.remote()])
        return ray.get(reaper.create.remote(bundles, dict(options)), timeout=within_s), reaper
    except BaseException as error:
        ray.kill(reaper)
        if isinstance(error, ray.exceptions.RayTaskError):
            raise error.cause from error  # the error that a direct call of Ray would raise
        raise


def _reaper_class() -> type:
    """Return the actor's class. A local class pickles by value, so its process need not import torch."""

    class Reaper:
        def __init__(self) -> None:
            self._lock = threading.Lock()
            self._made: PlacementGroup | None = None
            self._has_owner = threading.Event()
            threading.Thread(target=self._end_without_owner, daemon=True).start()

        def create(self, bundles: Sequence[Mapping[str, float]], options: Mapping[str, Any]) -> PlacementGroup:
            with self._lock:
                self._made = placement_group(bundles, **options)
            return self._made

        @ray.method(concurrency_group="owner")
        def never(self) -> None:
            """Block until this process ends."""
            threading.Event().wait()

        @ray.method(concurrency_group="owner")
        def end_with(self, owned: Sequence[ray.ObjectRef]) -> None:
            """Wait until the owner of `owned` is dead, then remove the placement group and end this process."""
            self._has_owner.set()
            try:
                ray.get(owned)
            except ray.exceptions.OwnerDiedError:  # a different error is raised when the reaper itself is killed
                self._lock.acquire()  # never released: nothing is created from now on
                if self._made is not None:
                    remove_placement_group(self._made)
                ray.kill(ray.get_runtime_context().current_actor)

        def _end_without_owner(self) -> None:
            if not self._has_owner.wait(_OWNER_S):
                os._exit(1)

    return Reaper
