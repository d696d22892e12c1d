"""`CopySpec`: one copy, as sent to the ranks of both groups."""

from __future__ import annotations

from dataclasses import dataclass

from raysharding.distributed.comm import StoreAddress


@dataclass(frozen=True, slots=True)
class CopySpec:
    """One copy of weights from one group to another, as sent to a rank."""

    token: str
    """Identifies a pair of groups, whose connections and plan the ranks keep."""
    number: int
    """Number of this copy between the pair."""
    driver: str
    """Identifies the process that asks for the copy."""
    pair: str
    """Identifies source, target, and if adapters are merged: all that the tokens of several drivers have in common."""
    is_source: bool
    """True on the ranks of the group that the weights come from."""
    address: StoreAddress
    """Store of the source, where the ranks of both groups meet the first time."""
    num_sources: int
    """Ranks of the source."""
    num_targets: int
    """Ranks of the target."""
    rendezvous_s: float
    """Longest time of the first meeting, in seconds."""
    limit_s: float
    """Longest time of the whole copy, in seconds: shorter than the driver's deadline, so that a rank whose peers hang
    gives up before the driver gives up the rank."""
    bucket_bytes: int
    """Bytes that a rank sends, or receives, in one round."""
    merge: bool = False
    """True to merge LoRA adapters of the source into the weights."""
    staged: bool = False
    """True if the target receives beside its own weights."""
    kept: tuple[str, ...] = ()
    """Tokens of all pairs that the driver knows; the ranks forget its others, whose other group is gone."""

    @property
    def key(self) -> str:
        """Identity of this copy."""
        return f"{self.token}/{self.number}"
