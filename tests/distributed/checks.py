"""Runs several checks in one process group and tells of each how it went: a group costs more than its checks."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path

from tests.accelerator.build import load_extension
from tests.spawn import device_type


def outcome_of(check: Callable[[], object]) -> str:
    """The traceback of what `check` raised, or an empty string."""
    try:
        check()
    except Exception:
        return traceback.format_exc()
    return ""


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
        check = getattr(import_module(f"{__package__}.{module}"), function)
        outcomes[name] = outcome_of(partial(check, root))
    return outcomes
