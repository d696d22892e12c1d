"""Which ranks read the files: ranks exchange which files they see, and all make the same decision.

Note: comparing files.
    On rank 0's host, files are the same if the inodes are equal. On other hosts, sizes, headers and a few samples of
    the payload are compared: headers of two training steps of one model are equal.
"""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from raysharding.checkpoint import Checkpoint, CheckpointFile, FileReader, identify_files
from raysharding.checkpoint.storage import HubPath, file_system_type, is_remote, require_file, split_path, storage_of
from raysharding.config import Loading
from raysharding.distributed.comm import agreeing, all_gather_json
from raysharding.distributed.transfer import REMOTE_GAP_BYTES, host_identity
from raysharding.errors import CheckpointError

_NUM_SAMPLES = 64
_SAMPLE_BYTES = 4096
"""Bytes per sample. Samples detect another training step, which changes all values, but not a change of few bytes."""


@dataclass(frozen=True)
class FileLocations:
    """The files as rank 0 sees them; sent as JSON."""

    files: tuple[CheckpointFile, ...]
    """The checkpoint's files."""
    host: Sequence[str]
    """The host, by `host_identity`."""
    inodes: Sequence[Sequence[int]]
    """[device, inode] of each local file; empty for remote files."""
    file_system: str
    """Type of the first file's file system."""

    @classmethod
    def of(cls, files: Sequence[CheckpointFile]) -> FileLocations:
        """Return the locations as this process sees them."""
        return cls(tuple(files), host_identity(), _inodes(files), file_system_type(files[0].path))

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> FileLocations:
        """Make locations from JSON."""
        return cls(**{**value, "files": tuple(CheckpointFile(**file) for file in value["files"])})


def _inodes(files: Sequence[CheckpointFile]) -> list[list[int]]:
    """Return [device, inode] of each file; nothing if a file is remote or unreadable."""
    if any(is_remote(file.path) or not os.access(file.path, os.R_OK) for file in files):
        return []
    found = [os.stat(file.path) for file in files]
    return [[status.st_dev, status.st_ino] for status in found]


@dataclass(frozen=True)
class FileVisibility:
    """What one rank sees under the paths of the checkpoint; sent as JSON."""

    host: Sequence[str]
    """The host, by `host_identity`."""
    is_same: bool = False
    """True if the files are known to be rank 0's, from their inodes or the hub's commit."""
    error: str = ""
    """Why a file cannot be opened; empty if all can."""


@dataclass(frozen=True)
class ReadPlan:
    """Transport and readers of a load; the same on every rank."""

    transport: str
    """`broadcast`, `scatter`, or `local`, where every rank reads."""
    readers: tuple[int, ...]
    """Ranks that read files."""
    reason: str
    """Reason, as text."""
    readers_per_host: int = 1
    """Readers of the host that has most."""


def with_local_files(checkpoint: Checkpoint) -> Checkpoint:
    """Return a checkpoint of another process with the files as this process sees them; mtimes of copies may differ.

    Raises:
        CheckpointError: A file is missing or differs.
    """
    if _is_pinned(checkpoint.files):
        return checkpoint
    found = identify_files([file.path for file in checkpoint.files])
    for there, here in zip(checkpoint.files, found, strict=True):
        if (there.num_bytes, there.header_sha256) != (here.num_bytes, here.header_sha256):
            what = f"is another file on {host_identity()[0]} than where the checkpoint was opened: copy the same one"
            raise CheckpointError(f"{what} to every node, or open it anew", path=here.path)
    return replace(checkpoint, files=tuple(found))


def _is_pinned(files: Sequence[CheckpointFile]) -> bool:
    """Return True for files of a commit of the hub: they are the same everywhere, and do not change."""
    return bool(files) and is_remote(files[0].path) and HubPath.of_pinned(split_path(files[0].path)[0]) is not None


def rank_0_reads(loading: Loading) -> bool:
    """Return True if only rank 0 reads, whatever the other ranks see."""
    return not loading.mmap and loading.transport in ("scatter", "broadcast") and loading.num_readers in (None, 1)


def check_visibility(
    loading: Loading, there: FileLocations
) -> tuple[FileVisibility | None, tuple[CheckpointFile, ...]]:
    """Open the files as this rank sees them.

    Returns:
        The visibility, `None` if it is not needed; and the files with this rank's modification times, empty if a file
        is not visible. Cost: a `stat` of each file on rank 0's host, one listing of a commit of the hub, reading the
        headers elsewhere.
    """
    if rank_0_reads(loading):
        return None, ()
    host = host_identity()
    try:
        if host == there.host and there.inodes and _inodes(there.files) == there.inodes:
            return FileVisibility(host, is_same=True), there.files
        if _is_pinned(there.files):
            for file in there.files:  # one request, for the listing
                require_file(storage_of(file.path).find(file.path), file.path)
            return FileVisibility(host, is_same=True), there.files
        found = tuple(identify_files([file.path for file in there.files]))
        return FileVisibility(host), found
    except Exception as error:  # noqa: BLE001 - the other ranks wait for what this one sees
        return FileVisibility(host, error=str(error) or repr(error)), ()


def plan_reads(
    loading: Loading,
    there: FileLocations,
    by_rank: Sequence[FileVisibility],
    found: Sequence[CheckpointFile],
    piece_bytes: int,
) -> ReadPlan:
    """Choose transport and readers; collective if ranks see other inodes than rank 0.

    Args:
        loading: The same on every rank.
        there: The same on every rank.
        by_rank: Visibility on each rank, in rank order; empty if not needed. All ranks decide from the same values,
            because ranks with different decisions would wait for messages that are not sent.
        found: The files as this rank sees them.
        piece_bytes: Bytes of a rank's part of a tensor, on average.

    Raises:
        CheckpointError: On every rank, if ranks see different content under one path, or one that must read sees none.
    """
    transport = "local" if loading.mmap else loading.transport
    if not by_rank:
        return ReadPlan(transport, (0,), "asked for")
    if by_rank[0].error:
        raise CheckpointError(f"rank 0 lost sight of it: {by_rank[0].error}", path=there.files[0].path)
    if any(not (item.is_same or item.error) for item in by_rank):
        _require_same_content(found, by_rank, there)
    seeing = tuple(rank for rank, item in enumerate(by_rank) if not item.error)
    blind = [rank for rank, item in enumerate(by_rank) if item.error]
    if transport == "local" and blind:
        asked = "mmap=True" if loading.mmap else "transport='local'"
        raise CheckpointError(
            f"{asked}, but {_named(blind, by_rank)} cannot read it ({by_rank[blind[0]].error}): make it readable on "
            "every node, or use transport='auto' without mmap",
            path=there.files[0].path,
        )
    wanted = loading.num_readers or len(seeing)
    if loading.num_readers is None and is_remote(there.files[0].path):
        # A request takes as long as some bytes: each reader gets whole ones, though it sends parts of them on.
        wanted = min(wanted, max(1, wanted * piece_bytes // REMOTE_GAP_BYTES))
    readers = _spread(seeing, by_rank)[:wanted] if transport != "local" else seeing
    who = "every rank sees" if len(seeing) == len(by_rank) else f"{_named(seeing, by_rank)} alone see"
    shared = "" if len(readers) in (1, len(by_rank)) else f", {len(readers)} ranks share the reading"
    asked = "asked for"
    if transport == "auto":
        asked, transport = "auto", "local" if len(readers) == len(by_rank) else "scatter"
    reason = f"{asked}: {who} the files ({there.file_system}){shared}"
    hosts = Counter(tuple(by_rank[rank].host) for rank in readers)
    return ReadPlan(transport, tuple(sorted(readers)), reason, max(hosts.values()))


def _require_same_content(
    found: Sequence[CheckpointFile], by_rank: Sequence[FileVisibility], there: FileLocations
) -> None:
    """Compare the files of ranks with other inodes than rank 0; collective."""
    # Every rank calls this, without files too: the others would wait in the exchange.
    with agreeing():
        digest = _digest(found) if found else ""
    digests = all_gather_json(digest)
    differing = [rank for rank, item in enumerate(by_rank) if not item.error and digests[rank] != digests[0]]
    if differing:
        raise CheckpointError(
            f"{_named(differing, by_rank)} see other content under this path than {_named([0], by_rank)}: copy the "
            "same checkpoint to every node, or use transport='scatter', which takes rank 0's",
            path=there.files[0].path,
        )


def _digest(files: Sequence[CheckpointFile]) -> str:
    """Return a digest of sizes, headers and samples."""
    text = hashlib.sha256()
    with FileReader(files) as reader:
        for index, file in enumerate(files):
            text.update(f"{file.num_bytes} {file.header_sha256}\n".encode())
            # An object has the same content on all nodes; a path may not.
            for sample in range(0 if is_remote(file.path) else _NUM_SAMPLES):
                data = bytearray(min(_SAMPLE_BYTES, file.num_bytes))
                first = (file.num_bytes - len(data)) * sample // (_NUM_SAMPLES - 1)
                reader.read_into(index, first, memoryview(data))
                text.update(data)
    return text.hexdigest()


def _spread(ranks: Sequence[int], by_rank: Sequence[FileVisibility]) -> list[int]:
    """Return ranks in an order in which the first ones are on different hosts."""
    on_host: dict[tuple[str, ...], int] = {}
    position = {}
    for rank in ranks:
        host = tuple(by_rank[rank].host)
        position[rank] = on_host[host] = on_host.get(host, -1) + 1
    return sorted(ranks, key=lambda rank: (position[rank], rank))


def _named(ranks: Sequence[int], by_rank: Sequence[FileVisibility]) -> str:
    """Return a text such as `ranks 2, 3 (node-b)`."""
    hosts = ", ".join(dict.fromkeys(str(by_rank[rank].host[0]) for rank in ranks))
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))} ({hosts})"
