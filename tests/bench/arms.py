"""The arms of `loading.py`: the package's own, and its peers, on any kind of checkpoint. Made on each rank."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from raysharding.bench.arms import loading_of, own_arms
from raysharding.bench.case import Arm, Case, Run
from raysharding.config import Sharding
from raysharding.distributed import materialize
from raysharding.distributed.comm import current_device, device_module, is_accelerator, is_available
from raysharding.distributed.fully_shard import local_tensor, module_tensors
from tests.bench.checkpoints import KINDS, Kind, build
from tests.bench.fresh import sampled
from tests.bench.peers import PEERS, Peer, load_with_forward

PINNED_BYTES = 64 << 20
"""Bytes of the page-locked buffer."""


def make_case(options: Mapping[str, Any]) -> tuple[Case, dict[str, Arm]]:
    """The case and all arms.

    Args:
        options: `checkpoint`; `kind`: one of `KINDS`; `loading` (fields of `Loading`, JSON); `device_type`;
            `replicate_size`; `memory`: directory to which each rank writes its memory, see `sampled`.
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
    pinned = Arm("pinned_floor", prepare_pinned_floor, is_floor=True, device_type="cuda")
    arms = [*own_arms().values(), pinned, *peers, mmap_forward_arm(kind)]
    if (memory := options.get("memory")) is not None:
        arms = [sampled(arm, memory) for arm in arms]
    return case, {arm.name: arm for arm in arms}


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


def prepare_pinned_floor(case: Case, module: nn.Module) -> Run:
    """Prepare copies of as many bytes as this rank's shards hold, from one page-locked buffer to the rank's GPU."""
    if not is_accelerator(torch.device(case.device_type)) or not is_available(case.device_type):
        raise ValueError("pinned_floor: torch sees no GPU here: leave it out")
    device = current_device(case.device_type)
    materialize(module, device)
    targets = [local_tensor(tensor) for tensor in module_tensors(module).values()]
    parts = [part for item in targets for part in item.reshape(-1).view(torch.uint8).split(PINNED_BYTES)]
    source = torch.ones(PINNED_BYTES, dtype=torch.uint8, pin_memory=True)

    def run() -> None:
        for part in parts:
            part.copy_(source[: part.numel()], non_blocking=True)
        device_module(device).synchronize(device)

    return run
