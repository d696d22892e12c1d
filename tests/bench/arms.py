"""The arms of `loading.py`: the package's own, and its peers, on any kind of checkpoint. Made on each rank."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from raysharding.bench.arms import loading_of, own_arms
from raysharding.bench.case import Arm, Case, Run
from raysharding.config import Sharding
from tests.bench.checkpoints import KINDS, Kind, build
from tests.bench.peers import PEERS, Peer, load_with_forward


def make_case(options: Mapping[str, Any]) -> tuple[Case, dict[str, Arm]]:
    """The case and all arms.

    Args:
        options: As the package's own `make_case`, and `kind`: one of `KINDS`.
    """
    kind = KINDS[options["kind"]]
    directory = Path(options["checkpoint"])
    loading = dict(options.get("loading", {}))
    if kind.dtype is not None:
        loading["dtype"] = kind.dtype
    case = Case(
        str(directory),
        lambda: build(kind.name, directory),
        loading,
        Sharding(replicate_size=options.get("replicate_size", 1)),
        options.get("device_type", "cpu"),
    )
    peers = [peer_arm(peer, kind) for peer in PEERS.values()]
    return case, {**own_arms(), **{arm.name: arm for arm in (*peers, mmap_forward_arm(kind))}}


def peer_arm(peer: Peer, kind: Kind) -> Arm:
    """A peer as an arm; it refuses what the registry of kinds says that it cannot load."""

    def prepare(case: Case, module: nn.Module) -> Run:
        if peer.name in kind.cannot:
            raise ValueError(kind.cannot[peer.name])
        if case.sharding.replicate_size > 1:
            raise ValueError("peers are measured without replicas")
        peer.imports()
        given = None if peer.builds_module else module
        return lambda: peer.run(given, Path(case.checkpoint), case.loading.get("dtype"))

    return Arm(peer.name, prepare, device_type=peer.device)


def mmap_forward_arm(kind: Kind) -> Arm:
    """Ours to the end of the first forward, from building the module on: beside the peer `transformers_forward`."""

    def prepare(case: Case, module: nn.Module) -> Run:
        if "transformers_forward" in kind.cannot:
            raise ValueError(kind.cannot["transformers_forward"])
        loading = loading_of(case, "mmap")
        return lambda: load_with_forward(Path(case.checkpoint), loading)

    return Arm("mmap_forward", prepare, device_type="cpu")
