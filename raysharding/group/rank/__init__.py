"""The rank's side: the Ray actor, its commands. The controller imports no torch, so names are lazy."""

from __future__ import annotations

from typing import TYPE_CHECKING

from raysharding.imports import lazy_names

if TYPE_CHECKING:
    from raysharding.group.rank.actor import CONCURRENCY_GROUPS, RankActor
    from raysharding.group.rank.assignment import Assignment, Title
    from raysharding.group.rank.dataset_blocks import DatasetBlocks
    from raysharding.group.rank.model_facts import ModelFacts

__all__ = ["CONCURRENCY_GROUPS", "Assignment", "DatasetBlocks", "ModelFacts", "RankActor", "Title"]

__getattr__, __dir__ = lazy_names(__name__, __all__, ("assignment", "actor", "dataset_blocks", "model_facts"))
