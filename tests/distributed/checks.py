"""Runs several checks in one process group and tells of each how it went: a group costs more than its checks."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path


def outcome_of(check: Callable[[], object]) -> str:
    """The traceback of what `check` raised, or an empty string."""
    try:
        check()
    except Exception:
        return traceback.format_exc()
    return ""


def run_checks(names: Sequence[str], root: Path) -> dict[str, str]:
    """On every rank: call functions named `room.module.check`; check → traceback, empty where all is well."""
    outcomes = {}
    for name in names:
        module, _, function = name.rpartition(".")
        check = getattr(import_module(f"{__package__}.{module}"), function)
        outcomes[name] = outcome_of(partial(check, root))
    return outcomes
