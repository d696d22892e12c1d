"""The quick cut of a grid over world sizes, and the axis of devices."""

from __future__ import annotations

import os
from typing import Any

import pytest

from tests.accelerator.build import why_unavailable
from tests.spawn import OUTSIDERS

needs_sim = pytest.mark.skipif(why_unavailable() is not None, reason=str(why_unavailable()))
"""Mark of tests on the simulated device."""
IS_PART = OUTSIDERS in os.environ
"""True where the ranks are a part of a larger world: there each test has one world size, on CPUs."""
DEVICES = ["cpu", *([] if IS_PART else [pytest.param("sim", marks=needs_sim)])]
"""Values for `parametrize`."""


def world_sizes(*quick: int, full: tuple[int, ...]) -> list[Any]:
    """Values for `parametrize` in ascending order: `quick` always, `full` only where the whole grid is asked for."""
    quick, full = (quick[-1:], ()) if IS_PART else (quick, full)
    return [pytest.param(size, marks=pytest.mark.full if size in full else ()) for size in sorted({*quick, *full})]


def device_grid(*quick: int, full: tuple[int, ...], sim: tuple[int, ...] = (2,)) -> list[Any]:
    """Values for `parametrize` of (device, world size): `cpu` as by `world_sizes`, and the sizes in `sim` on that."""
    on_sim = [pytest.param("sim", size, marks=needs_sim) for size in sim if not IS_PART]
    return [*(pytest.param("cpu", *size.values, marks=size.marks) for size in world_sizes(*quick, full=full)), *on_sim]
