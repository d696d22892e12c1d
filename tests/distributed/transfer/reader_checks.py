"""What is checked on the ranks of `test_loading.py`: who reads, who is sent what, and streams that break."""

from __future__ import annotations

import ctypes
import os
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.tensor import DTensor

from raysharding.checkpoint import open_checkpoint
from raysharding.config import Loading, Sharding, Transport
from raysharding.distributed import load_checkpoint
from raysharding.distributed.fully_shard.layout import local_tensor, module_tensors
from raysharding.distributed.transfer import shared_memory as shared_ring
from tests.distributed.loading.load_checks import (
    ODD,
    SOCKETS,
    raised_everywhere,
    require_filled,
    sharded,
)

TRANSPORTS: tuple[Transport, ...] = ("scatter", "broadcast", "local")
APART = "apart"
"""A directory that not every rank sees."""
REPLICATED_LOADS = (
    SOCKETS,
    Loading("scatter", 64 << 10),
    Loading("scatter", 64 << 10, shared_memory=False, num_readers=3),
    Loading("broadcast", 64 << 10, num_readers=2),
    Loading("local", 64 << 10, shared_memory=False),
    Loading("local", 64 << 10),
    Loading("auto", num_readers=2),
    Loading(),
)


def check_replicas(root: Path) -> None:
    """HSDP 2 × 2: both replicas hold the same shards, by every transport, at the least wire."""
    path = root / ODD
    sharding = Sharding(replicate_size=2)
    for loading in REPLICATED_LOADS:
        module = sharded(path, sharding)
        report = load_checkpoint(module, path, loading=loading)
        require_filled(module)
        for name, tensor in module_tensors(module).items():
            mine = local_tensor(tensor).contiguous()
            parts = [torch.empty_like(mine) for _ in range(2)]
            mesh = module.embed.weight.device_mesh
            dist.all_gather(parts, mine, group=mesh.get_group("replicate"))
            assert torch.equal(parts[0], parts[1]), (name, loading)
        assert report.read_bytes <= 1.02 * report.checkpoint_bytes, loading
        if loading.transport != "broadcast":
            # Each of the ranks that do not read a part themselves is sent it, once.
            assert report.wire_bytes + report.shared_bytes <= 1.02 * least_wire(module, report.readers), loading


def least_wire(module: nn.Module, readers: Sequence[int]) -> float:
    """Bytes that must travel: each shard to each of its two holders but one that reads it; the rest to all but one."""
    cut = sum(local_tensor(item).nbytes for item in module.parameters() if isinstance(item, DTensor))
    whole = sum(item.nbytes for item in module_tensors(module).values() if not isinstance(item, DTensor))
    unread = sum(2 - any(rank in readers for rank in (shard, shard + 2)) for shard in range(2))
    return unread * cut + 3 * whole + 2_000


def check_readers(root: Path) -> None:
    """Three ranks of which some see the files, as on nodes that do not share a disk."""
    rank = dist.get_rank()
    apart = root / APART
    if rank == 2:
        hide(apart)
    for loading, transport, readers in (
        (Loading(), "scatter", (0, 1)),
        (Loading(shared_memory=False, bucket_bytes=64 << 10), "scatter", (0, 1)),
        (Loading(num_readers=1), "scatter", (0,)),
        (Loading(num_readers=3), "scatter", (0, 1)),
        (Loading("scatter"), "scatter", (0,)),
        (Loading("broadcast", 64 << 10, num_readers=2), "broadcast", (0, 1)),
    ):
        module = sharded(root / ODD)
        report = load_checkpoint(module, apart / ODD, loading=loading)
        assert (report.transport, report.readers) == (transport, readers), report.transport_reason
        assert report.read_bytes <= 1.02 * report.checkpoint_bytes
        require_filled(module)
    errors = raised_everywhere(load_checkpoint, sharded(root / ODD), apart / ODD, loading=Loading("local"))
    assert all(error.startswith("CheckpointError") and "rank 2" in error for error in errors), errors
    if rank == 2:  # the same header, other values, as a later step of one training run has
        state = load_file(root / ODD)
        later = {name: value + 1 if value.is_floating_point() else value for name, value in state.items()}
        save_file(later, apart / ODD)
    errors = raised_everywhere(load_checkpoint, sharded(root / ODD), apart / ODD)
    assert all("rank 2 (" in error and "other content" in error for error in errors), errors
    if rank == 2:
        shutil.copy(root / ODD, apart / ODD)
    module = sharded(root / ODD)
    report = load_checkpoint(module, apart / ODD)  # a copy is as good as the file
    assert (report.transport, report.readers) == ("local", (0, 1, 2))
    require_filled(module)
    opened = open_checkpoint(root / ODD)
    elsewhere = replace(opened, files=tuple(replace(file, mtime_ns=1) for file in opened.files))
    load_checkpoint(sharded(root / ODD), elsewhere)
    other = replace(opened, files=tuple(replace(file, header_sha256="0" * 64) for file in opened.files))
    errors = raised_everywhere(load_checkpoint, sharded(root / ODD), other)
    assert all("is another file" in error for error in errors), errors
    module = sharded(root / ODD)
    load_checkpoint(module, apart / ODD, loading=Loading("scatter"))
    require_filled(module)


def hide(directory: Path) -> None:
    """Lay an empty file system over a directory, for this thread and those that it starts."""
    new_mounts, private, recursive = 0x20000, 1 << 18, 1 << 14
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.unshare(new_mounts) == 0, os.strerror(ctypes.get_errno())
    assert libc.mount(b"none", b"/", None, private | recursive, None) == 0, os.strerror(ctypes.get_errno())
    assert libc.mount(b"tmpfs", os.fsencode(directory), b"tmpfs", 0, None) == 0, os.strerror(ctypes.get_errno())


def refuse(name: str, flags: int = 0) -> int:
    """A system call that a sandbox forbids."""
    raise PermissionError(1, "Operation not permitted")


def check_a_rank_that_cannot_map(root: Path) -> None:
    """A rank on another host, by its host name, is sent its part; the others read theirs in shared memory."""
    told = shared_ring.host_identity
    if dist.get_rank() == 1:
        shared_ring.host_identity = lambda: ["elsewhere", *told()[1:]]
    try:
        module = sharded(root / ODD)
        report = load_checkpoint(module, root / ODD, loading=Loading("scatter", 64 << 10))
        absent = load_checkpoint(sharded(root / ODD), root / ODD, loading=SOCKETS)
    finally:
        shared_ring.host_identity = told
    create = os.memfd_create
    if dist.get_rank() == 0:
        os.memfd_create = refuse
    try:
        refused = load_checkpoint(sharded(root / ODD), root / ODD, loading=Loading("scatter"))
    finally:
        os.memfd_create = create
    assert refused.shared_bytes == 0
    require_filled(module)
    size = dist.get_world_size()
    if size > 1:
        assert 0 < report.wire_bytes < absent.wire_bytes or size == 2
        assert (report.shared_bytes > 0) == (size > 2)


def shrinking(loading: Loading) -> str:
    """Name of the file that shrinks under `loading`."""
    return f"shrinks-{loading.transport}-{loading.shared_memory}.safetensors"


SHRINKING = [Loading("scatter", 8 << 10, shared_memory=False)]
SHRINKING += [Loading(transport, 8 << 10) for transport in TRANSPORTS]


def check_broken_stream(root: Path) -> None:
    """A file that shrinks during the load is everybody's error, and the group goes on."""
    for loading in SHRINKING:
        path = root / shrinking(loading)
        checkpoint = open_checkpoint(path)
        module = sharded(path)
        seen: list[str] = []

        def shrink(phase: str, *_: object, path: Path = path, seen: list[str] = seen) -> None:
            if phase == "stream" and phase not in seen and dist.get_rank() == 0:
                os.truncate(path, path.stat().st_size // 2)
            seen.append(phase)

        errors = raised_everywhere(load_checkpoint, module, checkpoint, loading=loading, stall_s=20, progress=shrink)
        assert all(error.startswith("CheckpointError") for error in errors), errors
        assert "stream" in seen
        assert all(parameter.is_meta for parameter in module.parameters())
        # The group is as good as before: nothing of the broken load is left in flight.
        load_checkpoint(module, root / ODD, loading=loading)
        require_filled(module)
