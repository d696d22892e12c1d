"""The arms of `loading.py`: raysharding's own, the floors, and the peers. Made on each rank."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from raysharding.config import Loading, Sharding
from raysharding.distributed import load_checkpoint
from tests.bench.case import Arm, Case, Run
from tests.bench.checkpoints import KINDS, Kind, build
from tests.bench.floors import (
    prepare_pinned_floor,
    prepare_preadv_floor,
    prepare_read_threads_floor,
    prepare_scatter_floor,
)
from tests.bench.peers import PEERS, Peer, load_with_forward

OPTIONS: Mapping[str, Mapping[str, Any]] = {
    "auto": {"transport": "auto"},
    "scatter": {"transport": "scatter"},
    "scatter_wire": {"transport": "scatter", "shared_memory": False},
    "broadcast": {"transport": "broadcast"},
    "local": {"transport": "local"},
    "mmap": {"mmap": True},
}
"""Arm → fields of `Loading`. `scatter` may use shared memory between ranks of one host, `scatter_wire` never does."""


def make_case(options: Mapping[str, Any]) -> tuple[Case, dict[str, Arm]]:
    """The case and all arms.

    Args:
        options: `checkpoint`; `kind`: one of `KINDS`; `loading` (fields of `Loading`, JSON); `device_type`;
            `replicate_size`.
    """
    kind = KINDS[options["kind"]]
    directory = Path(options["checkpoint"])
    loading = dict(options.get("loading", {}))
    if kind.dtype is not None:
        loading["dtype"] = kind.dtype
    case = Case(
        directory,
        lambda: build(kind.name, directory),
        loading,
        Sharding(replicate_size=options.get("replicate_size", 1)),
        options.get("device_type", "cpu"),
    )
    arms = [
        *map(own_arm, OPTIONS),
        Arm("preadv_floor", prepare_preadv_floor, is_floor=True, device_type="cpu"),
        Arm("read_threads_floor", prepare_read_threads_floor, is_floor=True),
        Arm("scatter_floor", prepare_scatter_floor, is_floor=True, device_type="cpu"),
        Arm("pinned_floor", prepare_pinned_floor, is_floor=True),
        *(peer_arm(peer, kind) for peer in PEERS.values()),
        mmap_forward_arm(kind),
    ]
    return case, {arm.name: arm for arm in arms}


def loading_of(case: Case, name: str) -> Loading:
    """The `Loading` of one of `OPTIONS`, with the case's own fields."""
    return Loading(**{**case.loading, **OPTIONS[name]})


def own_arm(name: str) -> Arm:
    """One of `OPTIONS` as an arm."""

    def prepare(case: Case, module: nn.Module) -> Run:
        loading = loading_of(case, name)
        return lambda: load_checkpoint(module, case.checkpoint, loading=loading)

    return Arm(name, prepare, device_type="cpu" if name in ("mmap", "scatter_wire") else None)


def peer_arm(peer: Peer, kind: Kind) -> Arm:
    """A peer as an arm; it refuses what the registry of kinds says that it cannot load."""

    def prepare(case: Case, module: nn.Module) -> Run:
        if peer.name in kind.cannot:
            raise ValueError(kind.cannot[peer.name])
        if case.sharding.replicate_size > 1:
            raise ValueError("peers are measured without replicas")
        peer.imports()
        given = None if peer.builds_module else module
        return lambda: peer.run(given, case.checkpoint, case.loading.get("dtype"))

    return Arm(peer.name, prepare, device_type=peer.device)


def mmap_forward_arm(kind: Kind) -> Arm:
    """Ours to the end of the first forward, from building the module on: beside the peer `transformers_forward`."""

    def prepare(case: Case, module: nn.Module) -> Run:
        if "transformers_forward" in kind.cannot:
            raise ValueError(kind.cannot["transformers_forward"])
        loading = loading_of(case, "mmap")
        return lambda: load_with_forward(case.checkpoint, loading)

    return Arm("mmap_forward", prepare, device_type="cpu")
