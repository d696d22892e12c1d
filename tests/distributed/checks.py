"""Runs several checks in one process group and tells of each how it went: a group costs more than its checks."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path

from tests.accelerator.build import load_extension
from tests.spawn import device_type, part_of_ranks, see_group


def outcome_of(check: Callable[[], object]) -> str:
    """The traceback of what `check` raised, or an empty string."""
    try:
        check()
    except Exception:
        return traceback.format_exc()
    return ""


_OF_ALL = (
    # `AsyncSaver`, which only the ranks of a `ShardedModelGroup` make: all ranks of the process group.
    *("check_a_save_in_the_background", "check_no_memory_for_a_copy", "check_full_disk"),
    *("check_against_fsdp1", "check_forms"),  # FSDP1's optimizer state goes through the default group
    "check_local",  # torch.distributed.checkpoint.load sends from global rank 0 of any process_group
    # accelerate's own functions go by all ranks, and an accelerator without a mesh has all
    *("check_real_accelerator", "check_beside_accelerate", "check_patched_accelerate_on_other_modules", "check_hsdp"),
    *("check_accelerate_on_other_models", "check_same_sharding", "check_checkpointed", "check_mixed_precision"),
    "check_settings",
)
"""Checks that a part of the ranks cannot run."""


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
        outcomes[name] = outcome_of(partial(check, root))
    return outcomes
