"""Named groups: detached actors and placement groups in a Ray namespace of ours, which outlive their driver.

Note [Names]: the group `llama` has the actors `llama/0`, `llama/1`, ... by bundle, since ranks are numbered later, and
a placement group `raysharding/llama/<job>`. Actor 0 keeps the record of the group, from when it is loaded. Until then
its reaper (see `reaper.py`) removes the placement group when the driver dies, and Ray stops the actors in it. Where the
reaper dies with the driver, because their host does, actors end by a lease (`supervision/lease_renewal.py`) and remove
the placement group. One that has no actors yet is removed by the next driver that makes a named group, or attaches.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group_table, remove_placement_group

from raysharding.group.cluster.ray_internals import dead_jobs, is_worker

NAMESPACE = "raysharding"
STARTING_LEASE_S = 8.0
"""Lease of a named group while it is made, once its supervision has begun."""


@dataclass(frozen=True, slots=True)
class Lifetime:
    """What a group's actors and placement group hang on: the driver alone, a lease, a name."""

    name: str | None = None
    """Name of a group that outlives its driver; `None`: it does not."""
    lease_s: float | None = None
    """What `Timeouts.lease_s` says."""
    start_s: float = 180.0
    """Until the supervision has begun, which renews leases."""

    def actor_name(self, bundle: int) -> str | None:
        """Return the name of the actor in a bundle."""
        return None if self.name is None else actor_name(self.name, bundle)

    def actor_options(self, bundle: int) -> dict[str, Any]:
        """Return Ray's options of the actor in a bundle."""
        if self.name is None:
            return {}
        return {"name": self.actor_name(bundle), "namespace": NAMESPACE, "lifetime": "detached"}

    def placement_group_options(self) -> dict[str, Any]:
        """Return Ray's options of the placement group."""
        if self.name is None:
            return {}
        job = ray.get_runtime_context().get_job_id()
        return {"name": f"{NAMESPACE}/{self.name}/{job}", "lifetime": "detached"}

    def ends_with_job(self) -> bool:
        """Return True if what this process creates for the group is Ray's to remove, with the job of this process."""
        return self.name is None and not is_worker()

    @property
    def first_lease_s(self) -> float | None:
        """Lease of an actor that starts."""
        return None if self.name is None and self.lease_s is None else self.start_s

    @property
    def starting_lease_s(self) -> float | None:
        """Lease while the group is made."""
        return STARTING_LEASE_S if self.name is not None and self.lease_s is None else self.lease_s


def actor_name(group: str, bundle: int) -> str:
    """Return the name of a group's actor."""
    return f"{group}/{bundle}"


def bundle_of(name: str) -> int:
    """Return the bundle of an actor that `actor_name` has named."""
    return int(name.rpartition("/")[2])


def check_name(name: str | None) -> None:
    """Check a group's name without asking Ray.

    Raises:
        ValueError: Not a name.
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
    """Return the names of the cluster's named groups, those that are still being made included."""
    named = ray.util.list_named_actors(all_namespaces=True)
    return sorted({one["name"].rpartition("/")[0] for one in named if one["namespace"] == NAMESPACE})


def check_free(name: str) -> None:
    """Check that no group has a name, and remove what a driver that was killed has left of it.

    Raises:
        ValueError: It is taken.
    """
    if name in group_names():
        raise name_taken(name)
    remove_orphans()


def name_taken(name: str) -> ValueError:
    """Build the error of a name that is taken."""
    return ValueError(
        f"name={name!r}: a group of that name is on the cluster; ShardedModelGroup.attach({name!r}) gives it to this "
        "driver (and its shutdown() ends it), or choose another name"
    )


def placement_groups(group: str) -> list[PlacementGroup]:
    """Return the placement groups that a named group has."""
    return [found for found, name, _ in _placement_groups() if name == group]


def remove_orphans() -> None:
    """Remove placement groups that dead drivers left behind before they had started the actors."""
    dead = dead_jobs()
    orphans = [(found, name) for found, name, job in _placement_groups() if job in dead]
    # Not before the others: a driver that is dead now starts no actors.
    names = set(group_names()) if orphans else set()
    for found, name in orphans:
        if name not in names:
            remove_placement_group(found)


def _placement_groups() -> list[tuple[PlacementGroup, str, str]]:
    """Placement groups of all named groups, with the name and the job that made it."""
    found = []
    for placement_group_id, entry in placement_group_table().items():
        parts = entry["name"].split("/")
        if len(parts) == 3 and parts[0] == NAMESPACE and entry["state"] != "REMOVED":
            made = PlacementGroup(ray.PlacementGroupID(bytes.fromhex(placement_group_id)))
            found.append((made, parts[1], parts[2]))
    return found
