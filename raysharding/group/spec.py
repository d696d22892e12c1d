"""`GroupSpec`: all that a group was asked to be, so that it can be made again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from raysharding.config import Loading, Placement, Sharding, Timeouts
from raysharding.group import checks
from raysharding.group.naming import Lifetime, check_name
from raysharding.group.placement import check_world_size
from raysharding.group.progress import ProgressOption


@dataclass(frozen=True)
class GroupSpec:
    """The arguments of `ShardedModelGroup.from_checkpoint`, their defaults filled in."""

    checkpoint: str
    """Path or URI, as the user named it."""
    model: Any = None
    """`None`, the name of a transformers auto class, or a callable."""
    world_size: int | None = None
    """Number of ranks; `None`: one per GPU of the cluster."""
    device: str | None = None
    """`cuda`, `cpu`, or `None` for what the cluster has."""
    sharding: Sharding = field(default_factory=Sharding)
    """How the module is cut."""
    loading: Loading = field(default_factory=Loading)
    """How the bytes travel."""
    placement: Placement = field(default_factory=Placement)
    """Where the ranks run."""
    timeouts: Timeouts = field(default_factory=Timeouts)
    """Deadlines."""
    optimizer: Callable[..., Any] | None = None
    """Factory of the optimizer."""
    max_output_bytes: int = 2 << 30
    """Cap on what one rank sends back for one call."""
    progress: ProgressOption = None
    """See `from_checkpoint`."""
    name: str | None = None
    """Name under which the group outlives its driver; `None`: it does not."""
    preflight: bool = True
    """Whether nodes and links are looked at before bytes move."""
    max_restarts: int = 0
    """How often `fit` restarts a group that broke."""

    @property
    def lifetime(self) -> Lifetime:
        """What the group's actors and placement group hang on."""
        return Lifetime(self.name, self.timeouts.lease_s, self.timeouts.start_s)

    def check(self) -> None:
        """Refuse what is wrong whatever the checkpoint and the cluster are.

        Raises:
            ValueError: A field of the wrong type or value; names what to give.
            TypeError: The model or the optimizer's factory cannot be pickled.
        """
        checks.check_configs(self.sharding, self.loading, self.placement, self.timeouts, self.max_output_bytes)
        check_world_size(self.world_size)
        checks.check_factories(self.model, self.optimizer)
        check_name(self.name)
        if type(self.max_restarts) is not int or self.max_restarts < 0:
            raise ValueError(f"max_restarts={self.max_restarts!r}: give a whole number, 0 or more")
        if self.name is not None and self.placement.placement_group is not None:
            raise ValueError(
                f"name={self.name!r} with a placement group of yours: it may go before the group does; leave one out"
            )
