"""The harness of the benchmarks: real rank processes, real failures, nothing left behind."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import save_file

from tests.bench import rank_set
from tests.bench.rank_set import ArmError, BenchError, RankSet, Setup
from tests.bench.rounds import Load, Results, Rounds


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("checkpoint")
    save_file({"weight": torch.ones(6, 4), "bias": torch.ones(6)}, directory / "model.safetensors")
    return directory


def setup(checkpoint: Path, timeout_s: float = 30.0, **options: str) -> Setup:
    return Setup("tests.bench.faulty:make_case", {"checkpoint": str(checkpoint), **options}, timeout_s)


@contextmanager
def no_process_left() -> Iterator[None]:
    before = set(psutil.Process().children(recursive=True))
    yield
    left = set(psutil.Process().children(recursive=True)) - before
    assert not left, f"still there: {left}"


@pytest.mark.full
def test_ranks_go_on_after_an_arm_that_refuses(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_set, "DRAIN_S", 1.0)
    with no_process_left(), RankSet(setup(checkpoint), 2, keep_memory=True) as ranks:
        with pytest.raises(ArmError, match="not this one") as refused:
            ranks.load("refuses")
        assert refused.value.arm == "refuses"
        first, second = ranks.load("prints", digest=True)
        # 6 rows of 4 and 6 of 1, bf16, halved.
        assert first["shard_bytes"] == second["shard_bytes"] == 30
        assert first["end_s"] > first["start_s"]
        assert first["digest"] == second["digest"]
        assert ranks.load("different", digest=True)[0]["digest"] != first["digest"]
        assert ranks.load("fine", count=True)[0]["operations"] == {"barrier": 1}
        with pytest.raises(BenchError, match="there is no arm 'fin' here: choose from fine, "):
            ranks.load("fin")
        with pytest.raises(BenchError, match="alone: failed on some ranks only: rank 1: ValueError: only rank 1"):
            ranks.load("alone")


@pytest.mark.full
def test_rank_that_dies_shows_its_log(checkpoint: Path) -> None:
    with (
        no_process_left(),
        pytest.raises(BenchError, match="dies: rank 1 failed: KeyError: 'rank 1 died of this'\n  Traceback"),
        RankSet(setup(checkpoint), 2, keep_memory=False) as ranks,
    ):
        ranks.load("dies")


@pytest.mark.full
def test_rank_that_hangs_is_ended(checkpoint: Path) -> None:
    with (
        no_process_left(),
        pytest.raises(BenchError, match="hangs: rank 0 did not answer in 2 s, rank 1 did not answer in 2 s"),
        RankSet(setup(checkpoint, timeout_s=2.0), 2, keep_memory=False) as ranks,
    ):
        ranks.load("hangs")


@pytest.mark.full
def test_setup_that_refuses_is_one_error(checkpoint: Path) -> None:
    with (
        no_process_left(),
        pytest.raises(ArmError, match="ValueError: no such kind"),
        RankSet(setup(checkpoint, refuse="no such kind"), 1, keep_memory=False),
    ):
        raise AssertionError("the ranks started")


@pytest.mark.full
def test_ranks_end_when_their_driver_is_killed(checkpoint: Path) -> None:
    with RankSet(setup(checkpoint), 1, keep_memory=False) as ranks:
        (process,) = ranks._processes
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(20) == 0


@pytest.mark.full
def test_rounds(checkpoint: Path) -> None:
    seen: list[Load] = []
    results = Results()
    rounds = Rounds(setup(checkpoint), ("fine", "refuses", "prints"), (1, 2), 2, seen.append)
    with no_process_left():
        rounds.measure(results)
    assert seen == results.loads
    assert set(results.skipped) == {(1, "refuses"), (2, "refuses")}
    order = [[(load.world_size, load.arm) for load in seen if load.round == index] for index in range(3)]
    assert order[0] == [(1, "fine"), (1, "prints"), (2, "fine"), (2, "prints")]
    assert order[1] == [(1, "prints"), (2, "fine"), (2, "prints"), (1, "fine")]  # one place on, of six
    assert [load.counted for load in seen] == [False] * 4 + [True] * 8
    assert {(item.world_size, item.arm): item.collectives for item in results.operations}[2, "fine"] == 1


def test_arms_that_differ_are_found() -> None:
    results = Results([made("a", "x", "y"), made("b", "x", "y"), made("c")])
    results.check_digests()
    results.loads.append(made("d", "x", "z"))
    with pytest.raises(BenchError, match=r"different bytes; arms with equal bytes: W=2: a, b \| W=2: d"):
        results.check_digests()


def made(arm: str, *digests: str) -> Load:
    """A load of which only the digests matter."""
    names = ("start_s", "end_s", "shard_bytes", "read_bytes", "fault_bytes", "loopback_bytes")
    figures: dict[str, Any] = dict.fromkeys(names, 1)
    answers = [{**figures, "digest": digest} for digest in digests] or [figures, figures]
    return Load.of("warm", 1, arm, answers, wired=False)
