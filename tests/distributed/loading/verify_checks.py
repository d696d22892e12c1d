"""What is checked on the ranks of `test_loading.py`: mapped files, checksums, values that are not finite, digests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from raysharding.checkpoint import FileReader
from raysharding.config import Loading
from raysharding.distributed import load_checkpoint
from raysharding.distributed.fully_shard.layout import module_tensors
from raysharding.distributed.loading.finish import digest_module
from raysharding.errors import CheckpointError
from tests.distributed.loading.load_checks import (
    FILE_DTYPES,
    ODD,
    raised_everywhere,
    require_filled,
    sharded,
)
from tests.distributed.models import filled

SAVED = "with-a-manifest"
"""A save of `Odd` by raysharding."""
FLIPPED = "with-a-flipped-byte"
"""The same, with one byte of one tensor changed."""
INFINITE = "infinite.safetensors"
"""`Odd` with an infinity in the last row of a matrix, and a NaN in a buffer."""
VERIFIED = (
    Loading("scatter", 64 << 10, verify="full"),
    Loading("local", 64 << 10, verify="full"),
    Loading("broadcast", 64 << 10, verify="full"),
    Loading(verify="full", mmap=True),
)


def check_mapping(root: Path) -> None:
    """Shards that are pages of the files: right values, no bytes read, nothing written back, uneven ones read."""
    path = root / ODD
    before = path.read_bytes()
    module = sharded(path)
    report = load_checkpoint(module, path, loading=Loading(mmap=True))
    require_filled(module)
    assert report.transport == "local"
    assert report.mapped_bytes > 0
    assert report.mapped_bytes + report.read_bytes <= 1.02 * report.checkpoint_bytes
    assert report.read_bytes > 0  # other dtypes, and rows that the ranks do not divide
    ids = torch.arange(8).view(2, 4)
    with torch.no_grad():
        torch.testing.assert_close(module.eval()(ids), filled()(ids), rtol=0, atol=1e-6)
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    module(ids).square().sum().backward()
    optimizer.step()
    dist.barrier()
    assert path.read_bytes() == before
    loaded = load_checkpoint(module, path, loading=Loading(mmap=True))  # real already: read into the memory it has
    assert loaded.mapped_bytes == 0
    require_filled(module)
    wide = sharded(path, dtype=torch.float64)
    converted = load_checkpoint(wide, path, loading=Loading(mmap=True))
    assert converted.mapped_bytes < report.mapped_bytes
    verified = load_checkpoint(sharded(path), root / SAVED, loading=Loading(mmap=True, verify="full"))
    assert verified.mapped_bytes > 0


def check_checksums(root: Path) -> None:
    """A flipped byte is found by every transport and named on every rank; without a manifest there is an error."""
    for loading in VERIFIED:
        module = sharded(root / ODD)
        load_checkpoint(module, root / SAVED, loading=loading)
        require_filled(module)
        errors = raised_everywhere(load_checkpoint, sharded(root / ODD), root / FLIPPED, loading=loading)
        assert all(error.startswith("CheckpointError") and "'blocks.1.weight'" in error for error in errors), errors
        assert not any("blocks.0" in error for error in errors), errors
    load_checkpoint(sharded(root / ODD), root / FLIPPED)
    errors = raised_everywhere(load_checkpoint, sharded(root / ODD), root / ODD, loading=VERIFIED[0])
    assert all("manifest" in error and "verify='finite'" in error for error in errors), errors


def check_a_failed_read_is_told_as_such(root: Path) -> None:
    """Under `verify="full"` too, and whichever rank it was: checksums of what was not read say nothing."""
    read = FileReader.read_ranges

    def fail(self: FileReader, file: int, ranges: Any) -> None:
        if dist.get_rank() == 1:
            raise CheckpointError("cannot be read: Input/output error", path="here")
        read(self, file, ranges)

    FileReader.read_ranges = fail  # type: ignore[method-assign]
    try:
        loading = Loading("local", verify="full")
        errors = raised_everywhere(load_checkpoint, sharded(root / ODD), root / SAVED, loading=loading)
    finally:
        FileReader.read_ranges = read  # type: ignore[method-assign]
    assert all("Input/output error" in error and "restore" not in error for error in errors), errors


def check_finite_values(root: Path) -> None:
    """A value that is not finite is named on every rank, in any dtype."""
    finite = Loading("scatter", 64 << 10, verify="finite")
    for dtype in FILE_DTYPES:
        load_checkpoint(sharded(root / f"{dtype}.safetensors", dtype=torch.float32), root / ODD, loading=finite)
    for dtype in (torch.float32, torch.bfloat16):
        module = sharded(root / INFINITE, dtype=dtype)
        errors = raised_everywhere(load_checkpoint, module, root / INFINITE, loading=finite)
        assert all("blocks.0.weight" in error and "inf" in error for error in errors), errors
    load_checkpoint(sharded(root / INFINITE), root / INFINITE)


def check_digests(root: Path) -> None:
    """The digest is the same by every transport, and another for other values; replicas that differ are found."""
    digests = set()
    for loading in (Loading("scatter", 64 << 10, digest=True), Loading(digest=True)):
        module = sharded(root / ODD)
        digests.add(load_checkpoint(module, root / ODD, loading=loading).digest)
    assert len(digests) == 1
    assert len(digests.pop()) == 16
    (root / "digests").mkdir(exist_ok=True)
    written = root / "digests" / f"{dist.get_world_size()}-{dist.get_rank()}"
    written.write_text(digest_module(module_tensors(module), ""))
    assert len({file.read_text() for file in (root / "digests").iterdir() if file.read_text()}) == 1
    module = sharded(root / ODD)
    other = load_checkpoint(module, root / FLIPPED, loading=Loading(digest=True)).digest
    assert other != written.read_text()
    with torch.no_grad():
        dict(module.named_buffers())["positions"].add_(dist.get_rank())
    outcome = ""
    try:
        digest_module(module_tensors(module), "here")
    except CheckpointError as error:
        outcome = str(error)
    assert (outcome == "") == (dist.get_world_size() == 1)
    assert "positions" in outcome or dist.get_world_size() == 1
