"""Which ranks read the files: each says what it sees of them, and all decide alike.

Header hashes alone would take two training steps of one model for the same files, so a few samples of the payload are
compared as well.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from raysharding.checkpoint import Checkpoint, CheckpointFile, FileReader, file_system_type, identify_files
from raysharding.config import Loading
from raysharding.distributed.agreement import agree
from raysharding.distributed.shared_ring import host_identity
from raysharding.errors import CheckpointError

_NUM_SAMPLES = 8
_SAMPLE_BYTES = 4096


@dataclass(frozen=True)
class Sight:
    """What one rank sees under the checkpoint's paths; travels as JSON."""

    host: Sequence[str]
    """See `host_identity`."""
    digest: str
    """Of sizes, headers and samples of all files; empty where a file is not seen."""
    file_system: str
    """Type of the first file's file system."""
    why_not: str
    """Why a file is not seen."""


@dataclass(frozen=True)
class Choice:
    """How a load moves its bytes; the same on every rank."""

    transport: str
    """`broadcast`, `scatter`, or `local`: every rank reads."""
    readers: tuple[int, ...]
    """Ranks that read files."""
    reason: str
    """Why, in words."""


def look(files: Sequence[CheckpointFile]) -> tuple[Sight, tuple[CheckpointFile, ...]]:
    """Open the files as this rank sees them.

    Args:
        files: As rank 0 sees them.

    Returns:
        What there is, and the files with this rank's own modification times; none if one is not seen. Cost: the headers
        and 32 KiB of each local file.
    """
    kind = file_system_type(files[0].path)
    try:
        found = tuple(identify_files([file.path for file in files]))
        return Sight(host_identity(), _digest(found), kind, ""), found
    except (CheckpointError, OSError) as error:
        return Sight(host_identity(), "", kind, str(error)), ()


def _digest(files: Sequence[CheckpointFile]) -> str:
    text = hashlib.sha256()
    with FileReader(Checkpoint("", tuple(files), {}, None, {})) as reader:
        for index, file in enumerate(files):
            text.update(f"{file.num_bytes} {file.header_sha256}\n".encode())
            # An object has one content, wherever it is read; a path has one on each node.
            for sample in range(0 if "://" in file.path else _NUM_SAMPLES):
                length = min(_SAMPLE_BYTES, file.num_bytes)
                data = bytearray(length)
                reader.read_into(
                    index, (file.num_bytes - length) * sample // max(_NUM_SAMPLES - 1, 1), memoryview(data)
                )
                text.update(data)
    return text.hexdigest()


def choose(loading: Loading, files: Sequence[CheckpointFile], world_size: int) -> tuple[Choice, Checkpoint | None]:
    """Decide how the bytes move; collective, every rank passes the same arguments.

    Returns:
        The choice, and the files for `FileReader` where this rank sees them and was asked to look.

    Raises:
        CheckpointError: On every rank, when ranks see different content under one path, or too few see the files.
    """
    transport = "local" if loading.mmap else loading.transport
    if transport in ("scatter", "broadcast") and loading.num_readers in (None, 1):
        return Choice(transport, (0,), "asked for"), None
    sight, found = look(files)
    # A rank that decided from its own sight alone would wait for messages that nobody sends.
    sights = [Sight(**value) for value in agree(None, asdict(sight))]
    _require_same_content(files, sights)
    if not sights[0].digest:
        raise CheckpointError(f"rank 0 lost sight of it: {sights[0].why_not}", path=files[0].path)
    seeing = tuple(rank for rank, item in enumerate(sights) if item.digest)
    blind = [rank for rank in range(world_size) if rank not in seeing]
    if transport == "local" and blind:
        asked = "mmap=True" if loading.mmap else "transport='local'"
        raise CheckpointError(
            f"{asked}, but {_named(blind, sights)} cannot read it ({sights[blind[0]].why_not}): make it readable on "
            "every node, or use transport='auto' without mmap",
            path=files[0].path,
        )
    wanted = loading.num_readers or len(seeing)
    if loading.num_readers is not None and wanted > len(seeing):
        raise CheckpointError(
            f"num_readers={wanted}, but only {_named(seeing, sights)} can read it: leave num_readers out to have all "
            "that can",
            path=files[0].path,
        )
    readers = _spread(seeing, sights)[:wanted] if transport != "local" else seeing
    checkpoint = Checkpoint("", found, {}, None, {}) if found else None
    return _choice(transport, tuple(sorted(readers)), seeing, sights), checkpoint


def _choice(transport: str, readers: tuple[int, ...], seeing: Sequence[int], sights: Sequence[Sight]) -> Choice:
    name = transport
    if transport == "auto":
        name = "local" if len(readers) == len(sights) else "scatter"
    kind = sights[readers[0]].file_system
    who = "every rank sees" if len(seeing) == len(sights) else f"{_named(seeing, sights)} alone see"
    shared = "" if len(readers) in (1, len(sights)) else f", {len(readers)} ranks share the reading"
    asked = "auto" if transport == "auto" else "asked for"
    return Choice(name, readers, f"{asked}: {who} the files ({kind}){shared}")


def _spread(ranks: Sequence[int], sights: Sequence[Sight]) -> list[int]:
    """Ranks so ordered that the first few are on different hosts."""
    on_host: dict[tuple[str, ...], int] = {}
    position = {}
    for rank in ranks:
        host = tuple(sights[rank].host)
        position[rank] = on_host[host] = on_host.get(host, -1) + 1
    return sorted(ranks, key=lambda rank: (position[rank], rank))


def _require_same_content(files: Sequence[CheckpointFile], sights: Sequence[Sight]) -> None:
    differing = [rank for rank, item in enumerate(sights) if item.digest and item.digest != sights[0].digest]
    if differing:
        raise CheckpointError(
            f"{_named(differing, sights)} see other content under this path than {_named([0], sights)}: copy the same "
            "checkpoint to every node, or use transport='scatter', which takes rank 0's",
            path=files[0].path,
        )


def _named(ranks: Sequence[int], sights: Sequence[Sight]) -> str:
    """`ranks 2, 3 (node-b)`."""
    hosts = ", ".join(dict.fromkeys(str(sights[rank].host[0]) for rank in ranks))
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))} ({hosts})"


def files_to_json(files: Sequence[CheckpointFile]) -> list[Mapping[str, Any]]:
    """Encode for the outline."""
    return [asdict(file) for file in files]


def files_from_json(value: Sequence[Mapping[str, Any]]) -> tuple[CheckpointFile, ...]:
    """Decode what `files_to_json` gave."""
    return tuple(CheckpointFile(**file) for file in value)
