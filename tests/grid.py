"""The quick cut of a grid over world sizes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest


def world_sizes(*quick: int, full: tuple[int, ...]) -> list[Any]:
    """Values for `parametrize` in ascending order: `quick` always, `full` only where the whole grid is asked for."""
    return [pytest.param(size, marks=pytest.mark.full if size in full else ()) for size in sorted({*quick, *full})]


def grid_of(checks: Mapping[int, Sequence[str]], *, full: tuple[int, ...]) -> list[Any]:
    """Values for `parametrize` of (world size, check); those of the sizes in `full` only where all is asked for."""
    marks = {size: pytest.mark.full if size in full else () for size in checks}
    return [pytest.param(size, name, marks=marks[size]) for size, names in checks.items() for name in names]
