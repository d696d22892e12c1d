"""`Load`: the figures of one measured load, over all its ranks."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, Self

Mode = Literal["warm", "fresh"]
"""`warm`: one set of processes for all loads, memory touched before; `fresh`: new processes for each load."""


@dataclass(frozen=True)
class Load:
    """One load, as it is written to JSON."""

    mode: Mode
    world_size: int
    round: int
    """From 0."""
    counted: bool
    """Whether it takes part in the figures: the first warm round does not."""
    arm: str
    seconds: float
    """From the first rank's start to the last rank's end."""
    shard_bytes: int
    """Largest shard of a rank."""
    read_bytes: int
    """Returned by read calls, all ranks; bytes that come through a memory map are not among them."""
    fault_bytes: int
    """Memory touched for the first time, all ranks."""
    wire_bytes: int | None
    """Sent over the loopback, headers and acknowledgements included; `None` without a network of its own."""
    extra_bytes: int | None
    """Largest over the ranks: peak RssAnon + RssShmem above the start, less the shard. Fresh only."""
    high_water_bytes: int | None
    """Largest over the ranks: VmHWM above the start; counts mapped file pages too. Fresh only."""
    digests: tuple[str, ...]
    """A hash of each rank's shards; empty where none was taken."""
    report: Mapping[str, Any] | None = None
    """Rank 0's `LoadReport`, for our own transports."""

    @classmethod
    def of(cls, mode: Mode, round_index: int, arm: str, answers: Sequence[Mapping[str, Any]], wired: bool) -> Self:
        """Put the ranks' answers together.

        Args:
            mode: How the ranks were run.
            round_index: The round.
            arm: What loaded.
            answers: One for each rank.
            wired: Whether the loopback was the ranks' own.
        """
        first = answers[0]
        extra = [answer["extra_bytes"] - answer["shard_bytes"] for answer in answers if "extra_bytes" in answer]
        return cls(
            mode=mode,
            world_size=len(answers),
            round=round_index,
            counted=mode == "fresh" or round_index > 0,
            arm=arm,
            seconds=max(answer["end_s"] for answer in answers) - min(answer["start_s"] for answer in answers),
            shard_bytes=max(answer["shard_bytes"] for answer in answers),
            read_bytes=sum(answer["read_bytes"] for answer in answers),
            fault_bytes=sum(answer["fault_bytes"] for answer in answers),
            # Rank 0 looks before the first barrier and after the last: all that its peers send is in between.
            wire_bytes=first["loopback_bytes"] if wired else None,
            extra_bytes=max(extra, default=None),
            high_water_bytes=max((a["high_water_bytes"] for a in answers if "high_water_bytes" in a), default=None),
            digests=tuple(answer["digest"] for answer in answers if "digest" in answer),
            report=first.get("report"),
        )


def load_line(load: Load) -> str:
    """A load as a line of JSON."""
    return json.dumps({"kind": "load", **asdict(load)})


@dataclass(frozen=True)
class Operations:
    """What one load asked of the process group: counted once, under a profiler, without a clock."""

    world_size: int
    arm: str
    collectives: int
    """Collectives that rank 0 entered."""
    messages: int
    """Point-to-point messages that all ranks sent."""

    @classmethod
    def of(cls, arm: str, answers: Sequence[Mapping[str, Any]]) -> Self:
        """Put the ranks' answers together."""
        every = [answer["operations"] for answer in answers]
        point_to_point = ("send", "recv", "recvAnySource")
        collectives = sum(count for name, count in every[0].items() if name not in point_to_point)
        return cls(len(answers), arm, collectives, sum(counts.get("send", 0) for counts in every))
