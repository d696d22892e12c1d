"""The rounds of a benchmark: each runs every arm once, in rotating order, warm or fresh."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import product

from raysharding.bench.load import Load, Mode, Operations
from raysharding.bench.rank_set import ArmError, BenchError, RankSet, Setup


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
    """Arms that are loaded in the first warm round only."""

    def measure(self, mode: Mode, results: Results) -> None:
        """Run all rounds into `results`. Arms that cannot load the case are skipped, with the reason in `results`.

        Warm: an additional first round does not count; it touches memory, compares shards, and counts operations.
        Fresh: memory is sampled, and the shards of each load are compared.

        Args:
            mode: How the ranks are run.
            results: Receives the measurements.

        Raises:
            BenchError: A rank failed, or the arms loaded different bytes.
        """
        if mode == "warm":
            with ExitStack() as stack:
                sets = {size: stack.enter_context(self._ranks(size, mode)) for size in self.world_sizes}
                for size, arm in product(self.world_sizes, self.once):
                    self._load(sets[size], mode, 0, arm, results)
                for index, size, arm in self._turns(self.num_rounds + 1):
                    self._load(sets[size], mode, index, arm, results)
        else:
            for index, size, arm in self._turns(self.num_rounds):
                if (size, arm) not in results.skipped:
                    with self._ranks(size, mode) as ranks:
                        self._load(ranks, mode, index, arm, results)

    def _ranks(self, world_size: int, mode: Mode) -> RankSet:
        return RankSet(self.setup, world_size, keep_memory=mode == "warm")

    def _turns(self, num_rounds: int) -> Iterator[tuple[int, int, str]]:
        """Yield (round, world size, arm); the order rotates, so no arm always follows the same arm."""
        turns = list(product(self.world_sizes, self.arms))
        for index in range(num_rounds):
            first = index % len(turns)
            for world_size, arm in (*turns[first:], *turns[:first]):
                yield index, world_size, arm

    def _load(self, ranks: RankSet, mode: Mode, index: int, arm: str, results: Results) -> None:
        key = ranks.world_size, arm
        if key in results.skipped:
            return
        fresh = mode == "fresh"
        try:
            answers = ranks.load(arm, fresh=fresh, digest=fresh or index == 0)
        except ArmError as error:
            results.skipped[key] = error.message
            return
        load = Load.of(mode, index, arm, answers, self.setup.network_descriptor is not None)
        results.loads.append(load)
        self.progress(load)
        if index == 0:
            results.check_digests()
            if key not in {(item.world_size, item.arm) for item in results.operations}:
                results.operations.append(Operations.of(arm, ranks.load(arm, count=True)))
