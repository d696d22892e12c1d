"""The quick cut of a grid over world sizes."""

from __future__ import annotations

from typing import Any

import pytest


def world_sizes(*quick: int, full: tuple[int, ...]) -> list[Any]:
    """Values for `parametrize` in ascending order: `quick` always, `full` only where the whole grid is asked for."""
    return [pytest.param(size, marks=pytest.mark.full if size in full else ()) for size in sorted({*quick, *full})]
