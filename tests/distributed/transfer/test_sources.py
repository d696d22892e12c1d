"""Files are read by several threads at once; the first error comes out, and the threads go on."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from raysharding.checkpoint import FileReader, open_checkpoint
from raysharding.distributed.transfer import sources
from raysharding.distributed.transfer.sources import CheckpointSource, Extent, ReadThreads, Request, as_memory

VALUES = torch.arange(3000)


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[CheckpointSource]:
    """One tensor, which is read in three jobs by three threads."""
    save_file({"values": VALUES}, tmp_path / "model.safetensors")
    monkeypatch.setattr(sources, "PIECE_BYTES", 8000)
    monkeypatch.setattr(sources, "JOB_BYTES", 8000)
    checkpoint = open_checkpoint(tmp_path)
    offset = checkpoint.tensors["values"].offset
    extents = {"values": (Extent(0, 3000, 0, offset, "values", offset, torch.int64),)}
    with FileReader(checkpoint.files) as reader, ReadThreads(3) as threads:
        yield CheckpointSource({}, extents, {}, 0, reader, threads=threads)


def read(source: CheckpointSource) -> torch.Tensor:
    out = torch.zeros_like(VALUES)
    source.read([Request("values", 0, 3000, out.dtype, as_memory(out))])
    return out


def test_reads_run_at_once(source: CheckpointSource, monkeypatch: pytest.MonkeyPatch) -> None:
    together = threading.Barrier(3)
    read_ranges = FileReader.read_ranges

    def meet(self: FileReader, file: int, ranges: Any) -> None:
        together.wait(20)
        read_ranges(self, file, ranges)

    monkeypatch.setattr(FileReader, "read_ranges", meet)
    assert torch.equal(read(source), VALUES)


def test_after_an_error_no_read_begins_and_the_threads_go_on(source: CheckpointSource) -> None:
    begun: list[int] = []
    with pytest.MonkeyPatch.context() as changed:

        def fail(self: FileReader, file: int, ranges: Any) -> None:
            begun.append(file)
            raise OSError("a dead disk")

        changed.setattr(FileReader, "read_ranges", fail)
        for own in (source, replace(source, threads=ReadThreads(1))):
            begun.clear()
            with pytest.raises(OSError, match="a dead disk"):
                read(own)
    assert len(begun) == 1, "of three, by the one thread"
    assert torch.equal(read(source), VALUES)
