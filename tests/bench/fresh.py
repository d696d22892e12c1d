"""Loads in new processes each, so that the first touch of memory counts, and each rank's memory is sampled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

import torch.distributed as dist
from torch import nn

from raysharding.bench.case import Arm, Case, Run
from raysharding.bench.rank_set import ArmError, RankSet
from raysharding.bench.rounds import Load, Results, Rounds
from raysharding.distributed import LoadReport
from raysharding.units import MIB
from tests.bench.memory import MemorySampler, back_free_pages


def sampled(arm: Arm, directory: str) -> Arm:
    """The arm, of which each rank writes the peak of its memory above the start to the directory, by its number."""

    def prepare(case: Case, module: nn.Module) -> Run:
        run = arm.prepare(case, module)
        back_free_pages(sum(file.stat().st_size for file in case.files))

        def run_sampled() -> LoadReport | nn.Module | None:
            with MemorySampler() as memory:
                result = run()
            Path(directory, str(dist.get_rank())).write_text(str(memory.extra_bytes))
            return result

        return run_sampled

    return replace(arm, prepare=prepare)


@dataclass(frozen=True)
class Memory:
    """Memory of the fresh loads of one arm."""

    world_size: int
    arm: str
    extra_bytes: int
    """Peak of RssAnon + RssShmem above the start and the shard, largest rank; median over the rounds."""

    def __str__(self) -> str:
        return f"fresh W={self.world_size}  {self.arm}: {self.extra_bytes / MIB:,.0f} MiB of memory above the shard"


def measure_fresh(rounds: Rounds, directory: Path, results: Results) -> list[Memory]:
    """Run all rounds into `results`; shards of each load are compared. The arms are `sampled` into the directory."""
    extra_bytes: dict[tuple[int, str], list[int]] = {}
    for index, size, arm in rounds.turns(rounds.num_rounds):
        if (size, arm) in results.skipped:
            continue
        try:
            with RankSet(rounds.setup, size, keep_memory=False) as ranks:
                answers = ranks.load(arm, digest=True)
        except ArmError as error:
            results.skipped[size, arm] = error.message
            continue
        shards: Sequence[int] = [answer["shard_bytes"] for answer in answers]
        peaks = [int((directory / str(rank)).read_text()) for rank in range(size)]
        extra_bytes.setdefault((size, arm), []).append(
            max(peak - shard for peak, shard in zip(peaks, shards, strict=True))
        )
        load = Load.of(index + 1, arm, answers, rounds.setup.network_descriptor is not None)
        results.loads.append(replace(load, mode="fresh"))
        results.check_digests()
        rounds.progress(results.loads[-1])
    return [Memory(size, arm, int(median(values))) for (size, arm), values in extra_bytes.items()]
