"""`Title`: what a rank is called in Ray's logs and dashboard."""

from __future__ import annotations

from dataclasses import dataclass

from raysharding.group.cluster import name_log_lines


@dataclass(frozen=True, slots=True)
class Title:
    """Title of an actor, before and after it is given a rank."""

    model: str
    """Short name of the model."""
    group: str
    """The group's name in errors, such as `group a1b2c3`."""
    bundle: int
    """Index of the actor's bundle, which need not be its rank. The dashboard shows it: ranks are numbered once all
    actors run, and Ray asks an actor for its title only when the actor has started."""

    def __str__(self) -> str:
        return f"{self.model} bundle {self.bundle} ({self.group})"

    def show_rank(self, rank: int) -> None:
        """Make Ray put the rank in front of the lines that this process prints from now on."""
        name_log_lines(f"{self.model} rank {rank} ({self.group})")
