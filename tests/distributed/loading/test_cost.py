"""What a load costs in bytes read, bytes sent and memory: exact counters, each load in processes of its own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn
from torch.distributed.tensor import DTensor

from raysharding.checkpoint import open_checkpoint
from raysharding.config import Loading
from raysharding.distributed import LoadReport, init_mesh, load_checkpoint, shard_module
from raysharding.distributed.comm.json_collectives import all_gather_json
from raysharding.distributed.loading.load import load_from
from raysharding.distributed.loading.plan import silent
from raysharding.distributed.loading.state_dict_source import Rank0StateDict
from raysharding.distributed.transfer.buffers import RING_SIZE
from raysharding.models import build_module
from raysharding.units import MIB
from tests.bench.memory import MemorySampler
from tests.spawn import device_type, run_ranks

WORLD_SIZE = 4
NUM_BYTES = 192 * MIB
BUCKET_BYTES = 16 * MIB


class Whole(nn.Module):
    """A buffer of 150 MiB that every rank holds whole, beside a small matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(256, 256)
        self.register_buffer("table", torch.zeros(150, 1 << 18))


class Wide(nn.Module):
    """192 MiB: matrices of 12 MiB, each with a bias, and one matrix of 36 MiB, larger than two buckets."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(2048, 1536) for _ in range(13))
        self.last = nn.Linear(2048, 4608)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("wide") / "model.safetensors"
    with torch.device("meta"):
        shapes = {name: value.shape for name, value in Wide().state_dict().items()}
    save_file({name: torch.full(shape, float(index)) for index, (name, shape) in enumerate(shapes.items())}, path)
    assert path.stat().st_size == pytest.approx(NUM_BYTES, rel=0.01)
    return path


def measure(path: Path, loading: Loading) -> list[dict[str, Any]]:
    """On every rank: one load, and what it cost each rank."""
    opened = open_checkpoint(path)
    module = shard_module(build_module(Wide, opened, None), init_mesh(device_type()))
    # The first messages connect the pairs, which is not the load's memory.
    dist.all_reduce(torch.ones(1))
    with MemorySampler() as memory:
        report = load_checkpoint(module, opened, loading=loading)
    reported = {"reported": report.peak_extra_bytes[dist.get_rank()], "read": report.read_bytes}
    return all_gather_json(figures_of(memory, report) | reported)


def figures_of(memory: MemorySampler, report: LoadReport) -> dict[str, Any]:
    """What a load cost this rank, its shard left out."""
    extra = memory.extra_bytes - report.shard_bytes[dist.get_rank()]
    sent = {"wire": report.wire_bytes, "shared": report.shared_bytes}
    return {"extra": extra, **sent, "ring": report.ring_bytes}


@pytest.mark.timeout(90)
@pytest.mark.parametrize(
    ("loading", "wire", "shared"),
    [
        (Loading("scatter", BUCKET_BYTES), 0, (WORLD_SIZE - 1) / WORLD_SIZE),
        (Loading("scatter", BUCKET_BYTES, shared_memory=False), (WORLD_SIZE - 1) / WORLD_SIZE, 0),
        (Loading("broadcast", BUCKET_BYTES), WORLD_SIZE - 1, 0),
        (Loading("local", BUCKET_BYTES), 0, 0),
        (Loading("scatter", BUCKET_BYTES, shared_memory=False, num_readers=2), 0.5, 0),
    ],
    ids=["shared memory", "scatter", "broadcast", "local", "two readers"],
)
def test_bytes_and_memory(loading: Loading, wire: float, shared: float, checkpoint: Path) -> None:
    for figures in run_ranks(WORLD_SIZE, measure, checkpoint, loading, timeout_s=80)[0]:
        assert figures["read"] <= 1.02 * NUM_BYTES
        assert wire * NUM_BYTES * 0.99 <= figures["wire"] <= 1.02 * wire * NUM_BYTES + 4096
        assert shared * NUM_BYTES * 0.99 <= figures["shared"] <= 1.02 * shared * NUM_BYTES
        assert figures["ring"] <= RING_SIZE * BUCKET_BYTES
        assert figures["extra"] <= figures["ring"] + 16 * MIB
        assert figures["reported"] <= figures["extra"] + 8 * MIB


class Generated(Mapping[str, torch.Tensor]):
    """The state dict of `Wide`, each item made when it is asked for: none is in memory twice, few at once."""

    def __init__(self) -> None:
        with torch.device("meta"):
            self._shapes = {name: value.shape for name, value in Wide().state_dict().items()}

    def __getitem__(self, name: str) -> torch.Tensor:
        return torch.full(self._shapes[name], float(list(self._shapes).index(name)))

    def __iter__(self) -> Iterator[str]:
        return iter(self._shapes)

    def __len__(self) -> int:
        return len(self._shapes)


def measure_state_dict() -> list[dict[str, Any]]:
    """On every rank: what it costs to distribute a state dict that rank 0 does not hold."""
    with torch.device("meta"):
        module = shard_module(Wide(), init_mesh(device_type()))
    dist.all_reduce(torch.ones(1))
    with MemorySampler() as memory:
        state_dict = Rank0StateDict(Generated() if dist.get_rank() == 0 else {})
        report = load_from(module, state_dict, Loading("scatter"), silent, 60.0)
    figures, parameter = figures_of(memory, report), module.get_parameter("last.weight")
    assert isinstance(parameter, DTensor)
    last = parameter.full_tensor()
    assert last[0, 0] == last[-1, -1] == list(Generated()).index("last.weight")
    return all_gather_json(figures)


@pytest.mark.full
@pytest.mark.timeout(90)
def test_a_state_dict_larger_than_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 holds its ring and one item (36 MiB are the largest), the others their ring; 192 MiB travel."""
    # What is freed goes back to the kernel at once; glibc would keep up to 64 MiB for each thread that freed any.
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", str(MIB))
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", str(MIB))
    everywhere = run_ranks(WORLD_SIZE, measure_state_dict, timeout_s=80, fresh=True)[0]
    for rank, figures in enumerate(everywhere):
        assert figures["wire"] <= 4096
        assert figures["shared"] <= 1.02 * NUM_BYTES * (WORLD_SIZE - 1) / WORLD_SIZE
        assert figures["extra"] <= figures["ring"] + (36 * MIB if rank == 0 else 0) + 16 * MIB


def ring_of(path: Path, loading: Loading) -> int:
    """On every rank: bytes of the ring of a load of `Whole`."""
    module = shard_module(build_module(Whole, open_checkpoint(path), None), init_mesh(device_type()))
    return load_checkpoint(module, path, loading=loading).ring_bytes


@pytest.mark.timeout(90)
@pytest.mark.parametrize("loading", [Loading(), Loading("scatter")], ids=["auto", "scatter"])
def test_what_every_rank_holds_whole_passes_through_a_small_ring(loading: Loading, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file(Whole().state_dict(), path)
    assert max(run_ranks(WORLD_SIZE, ring_of, path, loading, timeout_s=80)) <= 64 * MIB
