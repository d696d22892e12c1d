"""Runs several checks in one process group and tells of each how it went: a group costs more than its checks."""

from __future__ import annotations

import inspect
import tempfile
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from tests.accelerator.build import load_extension
from tests.grid import device_grid
from tests.spawn import RanksFailedError, device_type, part_of_ranks, run_ranks, see_group


def outcome_of(check: Callable[[], object]) -> str:
    """The traceback of what `check` raised, or an empty string."""
    try:
        check()
    except Exception:
        return traceback.format_exc()
    return ""


def save_alone(model: Any, path: Path) -> None:
    """transformers saves on rank 0 of all ranks only, which may not be one of the test's."""
    with mock.patch("torch.distributed.is_initialized", return_value=False):
        model.save_pretrained(path)


_OF_ALL = (
    # `AsyncSaver`, which only the ranks of a `ShardedModelGroup` make: all ranks of the process group.
    *("check_a_save_in_the_background", "check_no_memory_for_a_copy", "check_full_disk"),
    # accelerate's own functions go by all ranks, and an accelerator without a mesh has all
    *("check_real_accelerator", "check_beside_accelerate", "check_patched_accelerate_on_other_modules", "check_hsdp"),
    *("check_accelerate_on_other_models", "check_same_sharding", "check_checkpointed", "check_mixed_precision"),
    "check_settings",
)
"""Checks that a part of the ranks cannot run."""


def checks_of(module: str) -> Callable[[str], list[str]]:
    """Return a function from words to the names of a module's checks."""
    return lambda words: [f"{module}.check_{word}" for word in words.split()]


def run_checks(names: Sequence[str], root: Path) -> dict[str, str]:
    """On every rank: call functions named `room.module.check`; check → traceback, empty where all is well.

    On the simulated device each asynchronous copy and each collective takes a millisecond longer: what does not wait
    for them meets old bytes.
    """
    if device_type() != "cpu":
        load_extension().set_copy_delay_us(1000)
        load_extension().set_collective_delay_us(1000)
    outcomes = {}
    for name in names:
        module, _, function = name.rpartition(".")
        if part_of_ranks() is not None and function in _OF_ALL:
            outcomes[name] = ""
            continue
        check = getattr(import_module(f"{__package__}.{module}"), function)
        see_group()
        outcomes[name] = outcome_of(partial(getattr(check, "of_rank", check), root))
        _wait_for_others(name, outcomes[name])
    return outcomes


def _wait_for_others(name: str, outcome: str) -> None:
    """End the group with the traceback of a rank whose peers wait for it in the check that it left."""
    store, ranks = dist.distributed_c10d._get_default_store(), range(dist.get_world_size())
    store.set(f"{name}/{dist.get_rank()}", "")
    try:
        if outcome:
            store.wait([f"{name}/{rank}" for rank in ranks], timedelta(seconds=_PEERS_S))
    except RuntimeError:
        raise AssertionError(f"{name}: others did not end it in {_PEERS_S:g} s after this rank:\n{outcome}") from None


_GROUP_S, _PEERS_S = 300.0, 20.0
_found: dict[tuple[Path, str, int], list[dict[str, str]] | RanksFailedError] = {}
"""(room, device, number of ranks) → outcomes of its checks, by rank."""


def on_ranks(*quick: int, full: tuple[int, ...] = (), sim: tuple[int, ...] = ()) -> Callable[[Any], Any]:
    """Make a test of a check, which runs on every rank.

    The first test of a folder on as many ranks starts one group for all of them that pytest has selected; each test
    reports its own check. A check may take `root`, a directory that all of them share, and `replicate_size`, which is 2
    on four ranks, else 1.

    Args:
        quick: Numbers of ranks on CPUs.
        full: Numbers of ranks on CPUs, where the whole grid is asked for.
        sim: Numbers of ranks on the simulated device.
    """

    def decorate(check: Any) -> Any:
        name = f"{check.__module__.removeprefix('tests.distributed.')}.{check.__name__}"
        wanted = inspect.signature(check).parameters

        def of_rank(root: Path) -> None:
            given = {"root": root, "replicate_size": 2 if dist.get_world_size() == 4 else 1}
            check(**{key: given[key] for key in wanted})

        @pytest.mark.timeout(_GROUP_S + 10)
        @pytest.mark.parametrize(("device", "world_size"), device_grid(*quick, full=full, sim=sim))
        def test(device: str, world_size: int, request: pytest.FixtureRequest) -> None:
            found = _outcomes(request, device, world_size)
            failed = {rank: outcome[name] for rank, outcome in enumerate(found) if outcome[name]}
            assert not failed, "\n".join(f"rank {rank} of {world_size}:\n{text}" for rank, text in failed.items())

        test.__name__, test.__doc__, test.__module__ = check.__name__, check.__doc__, check.__module__
        test.of_rank, test.check = of_rank, name  # type: ignore[attr-defined]
        return test

    return decorate


def _outcomes(request: pytest.FixtureRequest, device: str, world_size: int) -> list[dict[str, str]]:
    key = (request.path.parent, device, world_size)
    if key not in _found:
        names = [
            item.obj.check
            for item in request.session.items
            if isinstance(item, pytest.Function) and hasattr(item.obj, "check") and item.path.parent == key[0]
            if (item.callspec.params["device"], item.callspec.params["world_size"]) == key[1:]
        ]
        with tempfile.TemporaryDirectory() as root:
            try:
                _found[key] = run_ranks(world_size, run_checks, names, Path(root), timeout_s=_GROUP_S, device=device)
            except RanksFailedError as error:
                _found[key] = error
    found = _found[key]
    if isinstance(found, RanksFailedError):
        raise found
    return found
