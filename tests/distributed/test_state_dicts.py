"""`state_dict_type` on real gloo groups, beside FSDP1; saved by one world size and loaded by others."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.distributed.checks import run_checks
from tests.spawn import run_ranks

CHECKS = {
    1: ("full", "full_load", "sharded", "local"),
    2: ("full", "full_load"),
    3: ("full", "full_load", "full_mismatches", "sharded", "local", "settings"),
    4: ("full", "full_load", "sharded", "local"),
}

Outcomes = dict[tuple[int, str], list[str]]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    """(ranks, check) → every rank's traceback. 4 ranks save first, and last load what fewer saved."""
    root = tmp_path_factory.mktemp("states")
    found: Outcomes = {}
    for size, names in ((4, (*_checks(4), "save")), *((size, ("load", *_checks(size), "save")) for size in (1, 2, 3))):
        _run(size, names, root, found)
    _run(4, ("load",), root, found)
    return found


def _checks(size: int) -> list[str]:
    return [f"check_{name}" for name in CHECKS[size]]


def _run(size: int, names: tuple[str, ...], root: Path, found: Outcomes) -> None:
    by_rank = run_ranks(size, run_checks, [f"state_dict_checks.{name}" for name in names], root, timeout_s=100)
    for name in names:
        found[size, name] = [outcome[f"state_dict_checks.{name}"] for outcome in by_rank]


def _cases() -> Iterator[tuple[int, str]]:
    for size in CHECKS:
        yield from ((size, name) for name in (*_checks(size), "save", "load"))


@pytest.mark.timeout(200)
@pytest.mark.parametrize(("world_size", "name"), list(_cases()))
def test_on_ranks(world_size: int, name: str, outcomes: Outcomes) -> None:
    for rank, outcome in enumerate(outcomes[world_size, name]):
        assert not outcome, f"rank {rank} of {world_size}:\n{outcome}"
