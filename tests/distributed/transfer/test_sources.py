"""What a source of several jobs fills, whichever threads run them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from raysharding.checkpoint import FileReader, open_checkpoint
from raysharding.distributed.transfer import sources
from raysharding.distributed.transfer.sources import CheckpointSource, Extent, Request, as_memory

VALUES = torch.arange(3000)


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[CheckpointSource]:
    """One tensor, which is read in three jobs."""
    save_file({"values": VALUES}, tmp_path / "model.safetensors")
    monkeypatch.setattr(sources, "JOB_BYTES", 8000)
    checkpoint = open_checkpoint(tmp_path)
    offset = checkpoint.tensors["values"].offset
    extents = {"values": (Extent(0, 3000, 0, offset, "values", offset, torch.int64),)}
    with FileReader(checkpoint.files) as reader:
        yield CheckpointSource({}, extents, {}, reader, piece_bytes=8000)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_each_job_tells_what_it_filled(source: CheckpointSource, dtype: torch.dtype) -> None:
    out = torch.zeros(len(VALUES), dtype=dtype)
    told: list[Request] = []

    def filled(parts: Sequence[Request]) -> None:
        for part in parts:
            assert part.memory.tolist() == list(as_memory(VALUES[part.start : part.stop].to(dtype)))
        told.extend(parts)

    jobs = source.jobs([Request("values", 0, 3000, dtype, as_memory(out), "tag")], filled)
    with ThreadPoolExecutor(3) as threads:
        list(threads.map(lambda job: job(), jobs))
    assert len(jobs) == 3
    assert torch.equal(out, VALUES.to(dtype))
    assert sorted((part.start, part.stop, part.tag) for part in told) == [
        (0, 1000, "tag"),
        (1000, 2000, "tag"),
        (2000, 3000, "tag"),
    ]
