"""The quick cut of a grid over world sizes, and the axis of devices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from tests.accelerator.build import why_unavailable

needs_sim = pytest.mark.skipif(why_unavailable() is not None, reason=str(why_unavailable()))
"""Mark of tests on the simulated device."""


def world_sizes(*quick: int, full: tuple[int, ...]) -> list[Any]:
    """Values for `parametrize` in ascending order: `quick` always, `full` only where the whole grid is asked for."""
    return [pytest.param(size, marks=pytest.mark.full if size in full else ()) for size in sorted({*quick, *full})]


def device_grid(*quick: int, full: tuple[int, ...]) -> list[Any]:
    """Values for `parametrize` of (device, world size): `cpu` as by `world_sizes`, `sim` for the quick ones."""
    sim = [pytest.param("sim", size, marks=needs_sim) for size in quick]
    return [*(pytest.param("cpu", *size.values, marks=size.marks) for size in world_sizes(*quick, full=full)), *sim]


def grid_of(checks: Mapping[int, Sequence[str]], *, full: tuple[int, ...]) -> list[Any]:
    """Values for `parametrize` of (world size, check); those of the sizes in `full` only where all is asked for."""
    marks = {size: pytest.mark.full if size in full else () for size in checks}
    return [pytest.param(size, name, marks=marks[size]) for size, names in checks.items() for name in names]
