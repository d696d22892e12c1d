"""The rounds of a benchmark: each runs every arm once, in rotating order; `Load`: one measured load."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from itertools import product
from typing import Any, Self

from tests.bench.rank_set import ArmError, BenchError, RankSet, Setup


@dataclass(frozen=True)
class Load:
    """One load, as written to JSON."""

    world_size: int
    round: int
    """Index of the round, from 0."""
    counted: bool
    """True if the load counts in the figures; loads of the first round do not."""
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
    digests: tuple[str, ...]
    """A hash of each rank's shards; empty if none was computed."""
    report: Mapping[str, Any] | None = None
    """Rank 0's `LoadReport`, for raysharding's own transports."""
    mode: str = "warm"
    """`warm`: one set of processes for all loads, with memory touched before. `fresh`: new processes for each load."""
    extra_bytes: int | None = None
    """Peak of host memory above the start and the shard, of the largest rank; measured in `fresh` loads."""

    @classmethod
    def of(cls, mode: str, round_index: int, arm: str, answers: Sequence[Mapping[str, Any]], wired: bool) -> Self:
        """Combine the ranks' answers.

        Args:
            mode: `warm` or `fresh`.
            round_index: Index of the round.
            arm: Name of the arm that loaded.
            answers: One answer for each rank.
            wired: True if the ranks had a private loopback.
        """
        first = answers[0]
        return cls(
            world_size=len(answers),
            round=round_index,
            counted=round_index > 0,
            arm=arm,
            seconds=max(answer["end_s"] for answer in answers) - min(answer["start_s"] for answer in answers),
            shard_bytes=max(answer["shard_bytes"] for answer in answers),
            read_bytes=sum(answer["read_bytes"] for answer in answers),
            fault_bytes=sum(answer["fault_bytes"] for answer in answers),
            # Rank 0 reads the counter before the first barrier and after the last: all peers send in between.
            wire_bytes=first["loopback_bytes"] if wired else None,
            digests=tuple(answer["digest"] for answer in answers if "digest" in answer),
            report=first.get("report"),
            mode=mode,
            extra_bytes=max((answer["extra_bytes"] for answer in answers if "extra_bytes" in answer), default=None),
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


@dataclass
class Results:
    """Results of a benchmark so far."""

    loads: list[Load] = field(default_factory=list)
    operations: list[Operations] = field(default_factory=list)
    skipped: dict[tuple[int, str], str] = field(default_factory=dict)
    """(world size, arm) → reason why the arm cannot load the case."""

    def check_digests(self) -> None:
        """Compare the shards that the arms loaded.

        Raises:
            BenchError: Two arms loaded different bytes.
        """
        found: dict[tuple[int, tuple[str, ...]], set[str]] = {}
        for load in self.loads:
            if load.digests:
                found.setdefault((load.world_size, load.digests), set()).add(load.arm)
        if len(found) > len({world_size for world_size, _ in found}):
            parts = [f"W={world_size}: {', '.join(sorted(arms))}" for (world_size, _), arms in found.items()]
            raise BenchError(f"the arms loaded different bytes; arms with equal bytes: {' | '.join(parts)}")


@dataclass(frozen=True)
class Rounds:
    """Measurements to take."""

    setup: Setup
    """Configuration of the rank processes."""
    arms: Sequence[str]
    """Names of the arms, in the order of the first round."""
    world_sizes: Sequence[int]
    """Numbers of ranks. Each round measures all of them, so growth is a ratio within a round."""
    num_rounds: int
    """Number of measured rounds."""
    progress: Callable[[Load], None]
    """Called after each load."""
    once: Sequence[str] = ()
    """Arms that `measure` loads in the first round only."""

    def measure(self, results: Results) -> None:
        """Run all rounds into `results`, warm. Arms that cannot load the case are skipped, with the reason there.

        An additional first round does not count; it touches memory, compares shards, and counts operations.

        Args:
            results: Receives the measurements.

        Raises:
            BenchError: A rank failed, or the arms loaded different bytes.
        """
        with ExitStack() as stack:
            sets = {size: stack.enter_context(RankSet(self.setup, size, keep_memory=True)) for size in self.world_sizes}
            for size, arm in product(self.world_sizes, self.once):
                self._load(sets[size], 0, arm, results)
            for index, size, arm in self.turns(self.num_rounds + 1):
                self._load(sets[size], index, arm, results)

    def measure_fresh(self, results: Results) -> None:
        """Run all rounds into `results`, with new processes for each load, whose memory is sampled."""
        for index, size, arm in self.turns(self.num_rounds):
            if (size, arm) not in results.skipped:
                with RankSet(self.setup, size, keep_memory=False) as ranks:
                    self._load(ranks, index + 1, arm, results, "fresh")

    def turns(self, num_rounds: int) -> Iterator[tuple[int, int, str]]:
        """Yield (round, world size, arm); the order rotates, so no arm always follows the same arm."""
        turns = list(product(self.world_sizes, self.arms))
        for index in range(num_rounds):
            first = index % len(turns)
            for world_size, arm in (*turns[first:], *turns[:first]):
                yield index, world_size, arm

    def _load(self, ranks: RankSet, index: int, arm: str, results: Results, mode: str = "warm") -> None:
        key = ranks.world_size, arm
        if key in results.skipped:
            return
        try:
            answers = ranks.load(arm, digest=index == 0 or mode == "fresh", sample=mode == "fresh")
        except ArmError as error:
            results.skipped[key] = error.message
            return
        load = Load.of(mode, index, arm, answers, self.setup.network_descriptor is not None)
        results.loads.append(load)
        self.progress(load)
        results.check_digests()
        if index == 0:
            results.operations.append(Operations.of(arm, ranks.load(arm, count=True)))
