"""raysharding's own arms: each transport, and the floors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from raysharding.bench.case import Arm, Case, Run
from raysharding.bench.floors import prepare_preadv_floor, prepare_scatter_floor
from raysharding.checkpoint import open_checkpoint
from raysharding.config import Loading
from raysharding.distributed import load_checkpoint
from raysharding.models import build_module

OPTIONS: Mapping[str, Mapping[str, Any]] = {
    "auto": {"transport": "auto"},
    "scatter": {"transport": "scatter"},
    "scatter_wire": {"transport": "scatter", "shared_memory": False},
    "broadcast": {"transport": "broadcast"},
    "local": {"transport": "local"},
    "mmap": {"mmap": True},
}
"""Arm → fields of `Loading`. `scatter` may use shared memory between ranks of one host, `scatter_wire` never does."""


def loading_of(case: Case, name: str) -> Loading:
    """Return the `Loading` of one of `OPTIONS`, with the case's own fields of `Loading`."""
    return Loading(**{**case.loading, **OPTIONS[name]})


def _arm(name: str) -> Arm:
    def prepare(case: Case, module: nn.Module) -> Run:
        loading = loading_of(case, name)
        return lambda: load_checkpoint(module, case.checkpoint, loading=loading)

    return Arm(name, prepare, device_type="cpu" if name in ("mmap", "scatter_wire") else None)


def own_arms() -> dict[str, Arm]:
    """Return name → arm for raysharding's transports and the floors."""
    arms = [_arm(name) for name in OPTIONS]
    arms.append(Arm("preadv_floor", prepare_preadv_floor, is_floor=True, device_type="cpu"))
    arms.append(Arm("scatter_floor", prepare_scatter_floor, is_floor=True, device_type="cpu"))
    return {arm.name: arm for arm in arms}


def make_case(options: Mapping[str, Any]) -> tuple[Case, dict[str, Arm]]:
    """Return the case of a checkpoint whose config.json names its model, and raysharding's own arms.

    Args:
        options: `checkpoint`.
    """
    checkpoint = open_checkpoint(options["checkpoint"])
    return Case(options["checkpoint"], lambda: build_module(None, checkpoint, None)), own_arms()
