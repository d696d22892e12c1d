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


def run_checks(module: str, names: Sequence[str], root: Path) -> dict[str, str]:
    """On every rank: call the named functions of `module` with `root`; check → traceback, empty where all is well."""
    functions = import_module(module)
    return {name: outcome_of(partial(getattr(functions, name), root)) for name in names}
