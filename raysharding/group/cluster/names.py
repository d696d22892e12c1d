"""Named groups: detached actors and placement groups in the Ray namespace `raysharding`, which outlive their driver.

Note [Names]: the group `llama` has the actors `llama/0`, `llama/1`, ... by bundle, since ranks are numbered later, and
a placement group `raysharding/llama/<job>`. Actor 0 keeps the record of the group once the group is loaded. Until then
the reaper (see `reaper.py`) removes the placement group when the driver dies, and Ray stops the actors in it. If the
reaper dies with the driver, because their host does, the actors end when their lease expires
(`supervision/teardown.py`) and remove the placement group. A placement group that has no actors yet is removed by
the next driver that makes or attaches to a named group.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group_table, remove_placement_group

from raysharding.group.cluster.ray_internals import dead_jobs, is_worker

NAMESPACE = "raysharding"
STARTING_LEASE_S = 8.0
"""Lease, in seconds, of a named group that is being made, once its supervision has begun."""


@dataclass(frozen=True, slots=True)
class Lifetime:
    """What ends a group's actors and placement group: the driver's end, or a lease if the group has a name."""

    name: str | None = None
    """Name of a group that outlives its driver; `None` for a group that does not."""
    lease_s: float | None = None
    """`Timeouts.lease_s`."""
    start_s: float = 180.0
    """Lease, in seconds, until the supervision has begun, which renews leases."""

    def actor_name(self, bundle: int) -> str | None:
        """Return the name of the actor in a bundle."""
        return None if self.name is None else actor_name(self.name, bundle)

    def actor_options(self, bundle: int) -> dict[str, Any]:
        """Return the Ray options of the actor in a bundle."""
        if self.name is None:
            return {}
        return {"name": self.actor_name(bundle), "namespace": NAMESPACE, "lifetime": "detached"}

    def placement_group_options(self) -> dict[str, Any]:
        """Return the Ray options of the placement group."""
        if self.name is None:
            return {}
        job = ray.get_runtime_context().get_job_id()
        return {"name": f"{NAMESPACE}/{self.name}/{job}", "lifetime": "detached"}

    def ends_with_job(self) -> bool:
        """Return True if Ray removes what this process creates for the group when the job of this process ends."""
        return self.name is None and not is_worker()

    @property
    def first_lease_s(self) -> float | None:
        """Lease of an actor that starts, in seconds; `None` for no lease."""
        return None if self.name is None and self.lease_s is None else self.start_s

    @property
    def starting_lease_s(self) -> float | None:
        """Lease while the group is made, in seconds; `None` for no lease."""
        return STARTING_LEASE_S if self.name is not None and self.lease_s is None else self.lease_s


def actor_name(group: str, bundle: int) -> str:
    """Return the name of a group's actor."""
    return f"{group}/{bundle}"


def bundle_of(name: str) -> int:
    """Return the bundle of the actor that `actor_name` named."""
    return int(name.rpartition("/")[2])


def check_name(name: str | None) -> None:
    """Check a group's name without calling Ray.

    Raises:
        ValueError: The name is neither `None` nor a printable str without '/'.
    """
    is_name = name is None or (type(name) is str and bool(name) and "/" not in name and name.isprintable())
    if not is_name:
        raise ValueError(f"name={name!r}: give None, or a printable str without '/', such as 'llama'")


def actor_names(group: str) -> list[str]:
    """Return the names of a group's living actors."""
    named = ray.util.list_named_actors(all_namespaces=True)
    return sorted(
        one["name"] for one in named if one["namespace"] == NAMESPACE and one["name"].rpartition("/")[0] == group
    )


def group_names() -> list[str]:
    """Return the names of the cluster's named groups, including groups that are still being made."""
    named = ray.util.list_named_actors(all_namespaces=True)
    return sorted({one["name"].rpartition("/")[0] for one in named if one["namespace"] == NAMESPACE})


def check_free(name: str) -> None:
    """Check that no group has the name, and remove placement groups that killed drivers left behind.

    Raises:
        ValueError: The name is taken.
    """
    if name in group_names():
        raise name_taken(name)
    remove_orphans()


def name_taken(name: str) -> ValueError:
    """Return the error for a name that is taken."""
    return ValueError(
        f"name={name!r}: a group of that name is on the cluster; ShardedModelGroup.attach({name!r}) gives it to this "
        "driver (and its shutdown() ends it), or choose another name"
    )


def placement_groups(group: str) -> list[PlacementGroup]:
    """Return the placement groups of a named group."""
    return [found for found, name, _ in _placement_groups() if name == group]


def remove_orphans() -> None:
    """Remove placement groups of drivers that died before they had started the actors."""
    dead = dead_jobs()
    orphans = [(found, name) for found, name, job in _placement_groups() if job in dead]
    # List names after jobs and placement groups: a driver that is already dead starts no more actors.
    names = set(group_names()) if orphans else set()
    for found, name in orphans:
        if name not in names:
            remove_placement_group(found)


def _placement_groups() -> list[tuple[PlacementGroup, str, str]]:
    """Return (placement group, group name, id of the job that made it) for all named groups."""
    found = []
    for placement_group_id, entry in placement_group_table().items():
        parts = entry["name"].split("/")
        if len(parts) == 3 and parts[0] == NAMESPACE and entry["state"] != "REMOVED":
            made = PlacementGroup(ray.PlacementGroupID(bytes.fromhex(placement_group_id)))
            found.append((made, parts[1], parts[2]))
    return found
