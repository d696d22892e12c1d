"""A load takes what the preflight counts at most, for every transport, dtype and offload; a save, the plan."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn

from raysharding.checkpoint import open_checkpoint
from raysharding.config import Loading, Sharding, Transport
from raysharding.distributed import LoadReport, init_mesh, load_checkpoint, save_checkpoint, shard_module
from raysharding.distributed.footprint import MemoryNeed, load_buffers, memory_need, save_buffers
from raysharding.models import build_module
from tests.accelerator.build import load_extension
from tests.accelerator.device import sim
from tests.spawn import run_ranks

TRANSPORTS: tuple[Transport, ...] = ("local", "scatter", "broadcast")
CASES = list(product(TRANSPORTS, (torch.float32, torch.bfloat16), (False, True)))
SAVES = ((False, False), (True, False), (False, True))
"""(offload, trained) of the saves."""


class Model(nn.Module):
    """Layers whose rows two ranks divide, and a buffer."""

    def __init__(self, num_layers: int = 24) -> None:
        """Make 1 MB of parameters in fp32 for each layer."""
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(512, 512) for _ in range(num_layers)))
        self.register_buffer("table", torch.zeros(256, 256))


def taken_by(work: Callable[[], object]) -> tuple[int, int]:
    """Pinned and device bytes of this rank at the peak of `work`, above those before it."""
    extension = load_extension()
    extension.reset_peak_pinned()
    sim().reset_peak_memory_stats()
    pinned, device = extension.pinned_allocated(), sim().memory_allocated()
    work()
    return extension.max_pinned_allocated() - pinned, sim().max_memory_allocated() - device


def small_model() -> nn.Module:
    """A model of which a save takes less than a bucket, without its optimizer's state."""
    return Model(num_layers=8)


def sharded(path: Path, dtype: torch.dtype, sharding: Sharding, make: Callable[[], nn.Module] = Model) -> nn.Module:
    """The module on meta, sharded."""
    return shard_module(build_module(make, open_checkpoint(path), dtype), init_mesh("sim", sharding), sharding)


def loads(path: Path, replicate_size: int, bucket_bytes: int | None) -> list[tuple[str, tuple[int, int], MemoryNeed]]:
    """(case, pinned and device bytes of a load, what the preflight counts)."""
    found = []
    device = torch.device("sim", dist.get_rank())
    for transport, dtype, offload in CASES:
        # What is ignored is not sharded, and stays on the device.
        options = Sharding(replicate_size=replicate_size, cpu_offload=offload, ignored_modules=r"layers\.0")
        module = sharded(path, dtype, options)
        loading = Loading(transport, dtype=dtype, bucket_bytes=bucket_bytes)
        need = memory_need(module, device, loading, None)
        taken = taken_by(partial(load_checkpoint, module, path, loading=loading))
        found.append((f"{transport} {dtype} offload={offload}", taken, need))
    return found


SIZES = [(2, 1, None), *(pytest.param(*case, 1 << 20, marks=pytest.mark.full) for case in ((3, 1), (4, 2)))]


@pytest.mark.parametrize(("world_size", "replicate_size", "bucket_bytes"), SIZES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_load_takes_what_the_preflight_counts(
    tmp_path: Path, world_size: int, replicate_size: int, bucket_bytes: int | None, dtype: torch.dtype
) -> None:
    path = tmp_path / "model.safetensors"
    save_file(Model().to(dtype).state_dict(), path)
    host_buffers, device_buffers = load_buffers(path.stat().st_size * 4 // dtype.itemsize, bucket_bytes, "sim")
    for rank, cases in enumerate(run_ranks(world_size, loads, path, replicate_size, bucket_bytes, device="sim")):
        for case, (pinned, device), need in cases:
            assert need.device is not None
            # Less only by buffers that this rank does not need under this transport.
            assert -host_buffers <= pinned - need.host.load <= 0.02 * pinned, f"rank {rank}: {case}: host"
            assert -device_buffers <= device - need.device.load <= 0.02 * device, f"rank {rank}: {case}: device"


def saves(path: Path) -> list[tuple[tuple[int, int], LoadReport, int]]:
    """`save_of` each of `SAVES`."""
    return [save_of(path, *case) for case in SAVES]


def save_of(path: Path, offload: bool, trained: bool) -> tuple[tuple[int, int], LoadReport, int]:
    """Pinned and device bytes of a save, the report of the load before it, and the peak of torch's allocator then."""
    module = sharded(path, torch.float32, Sharding(cpu_offload=offload), small_model)
    torch.empty(64 << 20, device="sim")  # a peak of the user's own
    report = load_checkpoint(module, path)
    peak = sim().max_memory_allocated()
    optimizer = torch.optim.AdamW(module.parameters()) if trained else None
    if optimizer is not None:
        for parameter in module.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
    save = partial(save_checkpoint, module, path.parent / "saved", optimizer=optimizer, overwrite=True)
    return taken_by(save), report, peak


def test_a_save_takes_what_the_plan_counts(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file(small_model().state_dict(), path)
    weights = sum(tensor.nbytes for tensor in small_model().state_dict().values())
    shards = sum(parameter.nbytes for parameter in small_model().parameters()) // 2
    for rank, found in enumerate(run_ranks(2, saves, path, device="sim")):
        for (offload, trained), ((pinned, device), report, peak) in zip(SAVES, found, strict=True):
            planned = save_buffers(4 * shards if trained else weights, "sim", is_one_host=True)
            assert pinned == planned[0], (offload, trained)
            assert planned[1] <= device < 1024, "the first operation's flag alone"
            # The ring on the device is that of the buffer.
            assert report.peak_device_bytes[rank] == pytest.approx(0 if offload else shards, rel=0.02, abs=1 << 20)
            assert peak >= 64 << 20, "the load has reset the user's peak"
