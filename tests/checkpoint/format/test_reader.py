"""`FileReader` against real files: exact bytes, several threads, and a typed error when a file changes under it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import cast

import pytest
import torch
from safetensors.torch import save_file

from raysharding.checkpoint import FileReader, open_checkpoint
from raysharding.checkpoint.storage.local import LocalFile
from raysharding.errors import CheckpointError


@pytest.fixture
def path(tmp_path: Path) -> Path:
    tensors = {"a": torch.arange(1000, dtype=torch.int32), "b": torch.randn(300, 7)}
    save_file(tensors, tmp_path / "model.safetensors")
    return tmp_path / "model.safetensors"


def test_ranges_land_in_tensors_and_memoryviews_and_nowhere_else(path: Path) -> None:
    checkpoint = open_checkpoint(path)
    info = checkpoint.tensors["a"]
    with FileReader(checkpoint.files) as reader:
        buffer = torch.full((24,), 255, dtype=torch.uint8)
        reader.read_into(info.file, info.offset + 40, buffer[4:20])
        assert buffer[4:20].view(torch.int32).tolist() == [10, 11, 12, 13]
        assert buffer[:4].tolist() == buffer[20:].tolist() == [255] * 4
        view = bytearray(8)
        reader.read_into(info.file, info.offset + 4, memoryview(view).cast("i"))
        assert view == bytes([1, 0, 0, 0, 2, 0, 0, 0])
        reader.read_into(info.file, info.offset, memoryview(bytearray()))
        reader.read_into(info.file, info.offset, torch.empty(0, dtype=torch.uint8))
        assert reader.num_bytes_read == 24


def test_one_range_is_scattered_over_thousands_of_views(path: Path) -> None:
    checkpoint = open_checkpoint(path)
    info = checkpoint.tensors["b"]
    sizes = [0, 1, 3, *[2] * 2000, 0, 500, 0]
    buffer = bytearray(sum(sizes) + 2)
    memory, views, position = memoryview(buffer), [], 1
    for size in sizes:
        views.append(memory[position : position + size])
        position += size
    with FileReader(checkpoint.files) as reader:
        reader.read_ranges(info.file, [(info.offset + 7, views)])
        reader.read_ranges(info.file, [(info.offset, [])])
        assert reader.num_bytes_read == sum(sizes)
    start = info.offset + 7
    assert buffer == b"\0" + path.read_bytes()[start : start + sum(sizes)] + b"\0"


@pytest.mark.parametrize("most", [1, 5, 8, 100])
def test_a_read_that_stops_early_goes_on_where_it_stopped(
    path: Path, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the kernel does after 2 GiB: `preadv` itself, given less to fill than was asked for."""
    preadv = os.preadv

    def stops_early(descriptor: int, views: Sequence[memoryview], offset: int) -> int:
        shorter, room = [], most
        for view in views:
            shorter.append(view.cast("B")[:room])
            room -= shorter[-1].nbytes
        return preadv(descriptor, shorter, offset)

    monkeypatch.setattr(os, "preadv", stops_early)
    checkpoint = open_checkpoint(path)
    buffers = [bytearray(4), bytearray(0), bytearray(8), bytearray(1), bytearray(12)]
    views = [memoryview(buffer) for buffer in buffers]
    views[2] = views[2].cast("i")
    with FileReader(checkpoint.files) as reader:
        reader.read_ranges(0, [(64, views)])
        assert reader.num_bytes_read == 25
        with pytest.raises(CheckpointError, match=r"ends at byte \d+, but 25 bytes were asked for"):
            reader.read_ranges(0, [(64, views), (path.stat().st_size - 20, views)])
        assert reader.num_bytes_read == 50, "what came before is counted"
        reader.read_ranges(0, [(64, views)])
    assert b"".join(buffers) == path.read_bytes()[64:89]


def test_threads_share_one_reader(path: Path) -> None:
    checkpoint = open_checkpoint(path)
    info = checkpoint.tensors["a"]

    with FileReader(checkpoint.files) as reader:

        def read(start: int) -> bool:
            buffer = torch.empty(40, dtype=torch.uint8)
            reader.read_into(info.file, info.offset + start * 4, buffer)
            return buffer.view(torch.int32).tolist() == list(range(start, start + 10))

        with ThreadPoolExecutor(8) as pool:
            assert all(pool.map(read, list(range(0, 990, 3)) * 4))
        assert reader.num_bytes_read == 330 * 4 * 40


def test_close_leaves_a_descriptor_open_for_as_long_as_a_read_uses_it(path: Path) -> None:
    checkpoint = open_checkpoint(path)
    num_open = len(os.listdir("/proc/self/fd"))
    reader = FileReader(checkpoint.files)
    descriptor = cast(LocalFile, reader._acquire(0))._descriptor
    reader.close()
    reader.close()
    # A long read makes several calls; between two of them the number must not become another file's.
    assert os.pread(descriptor, 8, 0) == path.read_bytes()[:8]
    assert len(os.listdir("/proc/self/fd")) == num_open + 1
    with pytest.raises(ValueError, match="FileReader is closed"):
        reader.read_tensor(checkpoint.tensors["a"])
    reader._release()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)
    assert len(os.listdir("/proc/self/fd")) == num_open


def test_a_file_cut_short_while_it_is_read(path: Path) -> None:
    checkpoint = open_checkpoint(path)
    with FileReader(checkpoint.files) as reader:
        first, last = checkpoint.tensors.values()
        reader.read_tensor(first)
        os.truncate(path, path.stat().st_size - 100)
        with pytest.raises(CheckpointError, match="cut short after it was opened") as caught:
            reader.read_tensor(last)
        assert caught.value.path == str(path)
        assert caught.value.tensor == last.name
        with pytest.raises(CheckpointError, match="bytes, but had"):
            reader.verify_unchanged()


def test_a_file_rewritten_in_place_replaced_or_removed(path: Path) -> None:
    checkpoint = open_checkpoint(path)
    status = path.stat()
    with FileReader(checkpoint.files) as reader:
        reader.read_tensor(checkpoint.tensors["a"])
        reader.verify_unchanged()
        with open(path, "r+b") as file:
            file.seek(-1, os.SEEK_END)
            file.write(b"\0")
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
        with pytest.raises(CheckpointError, match="was changed"):
            reader.verify_unchanged()
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
        reader.verify_unchanged()
        # Another file of the same size takes the path; the descriptor still reads the old one.
        copy = path.with_suffix(".new")
        copy.write_bytes(path.read_bytes())
        copy.rename(path)
        with pytest.raises(CheckpointError, match="was changed"):
            reader.verify_unchanged()
        path.unlink()
        with pytest.raises(CheckpointError, match="is gone since its header was read"):
            reader.verify_unchanged()


def test_a_file_replaced_before_its_first_read(path: Path) -> None:
    checkpoint = open_checkpoint(path)
    save_file({"a": torch.zeros(3)}, path)
    with (
        FileReader(checkpoint.files) as reader,
        pytest.raises(CheckpointError, match=r"since its header|when its header"),
    ):
        reader.read_tensor(checkpoint.tensors["a"])
    path.unlink()
    with (
        FileReader(checkpoint.files) as reader,
        pytest.raises(CheckpointError, match="cannot open: No such file") as caught,
    ):
        reader.read_tensor(checkpoint.tensors["a"])
    assert caught.value.path == str(path)
