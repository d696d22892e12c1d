"""`Load`: the figures of one measured load, over all ranks."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, Self

Mode = Literal["warm", "fresh"]
"""`warm`: one set of processes for all loads, with memory touched before; `fresh`: new processes for each load."""


@dataclass(frozen=True)
class Load:
    """One load, as written to JSON."""

    mode: Mode
    world_size: int
    round: int
    """Index of the round, from 0."""
    counted: bool
    """True if the load counts in the figures; loads of the first warm round do not."""
    arm: str
    seconds: float
    """Time from the first rank's start to the last rank's end."""
    shard_bytes: int
    """Bytes of the largest shard of a rank."""
    read_bytes: int
    """Bytes that read calls returned, over all ranks; excludes bytes read through a memory map."""
    fault_bytes: int
    """Bytes of memory touched for the first time, over all ranks."""
    wire_bytes: int | None
    """Bytes sent over the loopback, headers and acknowledgements included; `None` without a private network."""
    extra_bytes: int | None
    """Largest over the ranks: peak RssAnon + RssShmem above the start, minus the shard. Fresh only."""
    high_water_bytes: int | None
    """Largest over the ranks: VmHWM above the start; includes mapped file pages. Fresh only."""
    digests: tuple[str, ...]
    """A hash of each rank's shards; empty if none was computed."""
    report: Mapping[str, Any] | None = None
    """Rank 0's `LoadReport`, for raysharding's own transports."""

    @classmethod
    def of(cls, mode: Mode, round_index: int, arm: str, answers: Sequence[Mapping[str, Any]], wired: bool) -> Self:
        """Combine the ranks' answers.

        Args:
            mode: How the ranks were run.
            round_index: Index of the round.
            arm: Name of the arm that loaded.
            answers: One answer for each rank.
            wired: True if the ranks had a private loopback.
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
            # Rank 0 reads the counter before the first barrier and after the last: all peers send in between.
            wire_bytes=first["loopback_bytes"] if wired else None,
            extra_bytes=max(extra, default=None),
            high_water_bytes=max((a["high_water_bytes"] for a in answers if "high_water_bytes" in a), default=None),
            digests=tuple(answer["digest"] for answer in answers if "digest" in answer),
            report=first.get("report"),
        )


def load_line(load: Load) -> str:
    """Return a load as a line of JSON."""
    return json.dumps({"kind": "load", **asdict(load)})


@dataclass(frozen=True)
class Operations:
    """Operations of one load in the process group: counted once, under a profiler, untimed."""

    world_size: int
    arm: str
    collectives: int
    """Number of collectives that rank 0 entered."""
    messages: int
    """Number of point-to-point messages that all ranks sent."""

    @classmethod
    def of(cls, arm: str, answers: Sequence[Mapping[str, Any]]) -> Self:
        """Combine the ranks' answers."""
        every = [answer["operations"] for answer in answers]
        point_to_point = ("send", "recv", "recvAnySource")
        collectives = sum(count for name, count in every[0].items() if name not in point_to_point)
        return cls(len(answers), arm, collectives, sum(counts.get("send", 0) for counts in every))
