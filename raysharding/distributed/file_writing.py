"""Writing tensors as checkpoint files: each rank gathers and writes its own, as part of a save."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from raysharding.checkpoint import FileWriter, Manifest, file_names, plan_files, write_index, write_manifest
from raysharding.config import MIB
from raysharding.distributed.agreement import agree
from raysharding.distributed.gathering import Gather
from raysharding.distributed.source import as_bytes
from raysharding.errors import CheckpointError

MAX_FILE_BYTES = 5_000_000_000
"""Largest checkpoint file, unless a single tensor is larger: transformers' own default."""
SMALL_BYTES = 256 * MIB
"""Up to this size a checkpoint is one file, written by rank 0: more files would only be harder to read."""


@dataclass(frozen=True)
class FilePlan:
    """Who writes what; the same on every rank."""

    names: tuple[tuple[str, ...], ...]
    """File → FQNs in it."""
    files: tuple[str, ...]
    """File names."""
    writers: tuple[int, ...]
    """File → rank that writes it."""

    def of_rank(self, rank: int) -> list[int]:
        """Files that a rank writes."""
        return [index for index, writer in enumerate(self.writers) if writer == rank]

    def destinations(self) -> dict[int, list[str]]:
        """Rank → FQNs that it must get."""
        wanted: dict[int, list[str]] = {}
        for names, writer in zip(self.names, self.writers, strict=True):
            wanted.setdefault(writer, []).extend(names)
        return wanted


def total_bytes(tensors: Mapping[str, torch.Tensor]) -> int:
    """Bytes of whole tensors."""
    return sum(tensor.numel() * tensor.itemsize for tensor in tensors.values())


def _plan_files(tensors: Mapping[str, torch.Tensor], directory: str, group: dist.ProcessGroup | None) -> FilePlan:
    """Deal the tensors over files and the files over the ranks that see the directory."""
    # On another node the path may be another disk. Every rank answers, so that all make the same plan.
    sees = agree(None, os.path.isdir(directory), group)
    able = [rank for rank, answer in enumerate(sees) if answer]
    total = total_bytes(tensors)
    num_files = 1 if total <= SMALL_BYTES else max(len(able), -(-total // MAX_FILE_BYTES))
    names = plan_files({name: tensor.numel() * tensor.itemsize for name, tensor in tensors.items()}, num_files)
    return FilePlan(names, file_names(len(names)), tuple(able[index % len(able)] for index in range(len(names))))


@dataclass(frozen=True)
class Written:
    """Files of one directory, all closed, before index and manifest are beside them."""

    plan: FilePlan
    """Who wrote what."""
    wire_bytes: int
    """Bytes that this rank sent."""
    parts: Sequence[Mapping[str, Any]]
    """By rank: its part of the manifest."""

    def finish(self, directory: str) -> None:
        """Write index and manifest. One rank calls it.

        Raises:
            CheckpointError: The disk is full or failed.
        """
        manifest = Manifest.of_parts(Manifest.from_dict(part, directory) for part in self.parts)
        if len(self.plan.files) > 1:
            pairs = zip(self.plan.names, self.plan.files, strict=True)
            write_index(directory, {name: file for names, file in pairs for name in names}, manifest.num_bytes)
        write_manifest(directory, manifest)


def write_tensors(
    tensors: Mapping[str, torch.Tensor],
    directory: str,
    device: torch.device,
    stall_s: float,
    on_round: Callable[[int], None],
    group: dist.ProcessGroup | None = None,
) -> Written:
    """Write tensors as one or more checkpoint files, whole; collective: every rank calls it.

    Args:
        tensors: Name → DTensor, or a tensor that every rank holds whole (rank 0's is written).
        directory: A directory that rank 0 sees; the ranks that see it too share the writing.
        device: Of the messages.
        stall_s: Longest wait for one round of messages.
        on_round: Called on every rank after each round with the bytes written so far.
        group: Of all ranks. Default: the default group.

    Raises:
        CheckpointError: On every rank: the disk is full or failed.
    """
    plan = _plan_files(tensors, directory, group)
    with ExitStack() as open_files:
        writers = _Writers(plan, tensors, directory, open_files)
        agree(writers.error, group=group)
        gather = Gather(tensors, plan.destinations(), writers.write, device, stall_s, group=group)
        gather.run(on_round)
        # A full disk on one rank is everybody's failure; before this the others would go on to the commit.
        return Written(plan, gather.wire_bytes, agree(writers.error or writers.close(), writers.written, group))


class _Writers:
    """This rank's open files. After the first error it takes bytes and drops them, so that no sender is left.

    Every exception is kept and handed to `agree`: one that left the gather here would leave the other ranks in it.
    """

    def __init__(
        self, plan: FilePlan, tensors: Mapping[str, torch.Tensor], directory: str, open_files: ExitStack
    ) -> None:
        self.error: Exception | None = None
        self.written: dict[str, Any] = {}
        """Manifest of this rank's files, after `close`."""
        self._files: list[FileWriter] = []
        self._file_of: dict[str, FileWriter] = {}
        for index in plan.of_rank(dist.get_rank()):
            layout = [(name, tensors[name].dtype, tuple(tensors[name].shape)) for name in plan.names[index]]
            try:
                writer = open_files.enter_context(FileWriter(os.path.join(directory, plan.files[index]), layout))
            except CheckpointError as error:
                self.error = error
                return
            self._files.append(writer)
            self._file_of.update(dict.fromkeys(plan.names[index], writer))

    def write(self, name: str, first: int, values: torch.Tensor) -> None:
        """The gather's sink."""
        if self.error is None:
            try:
                self._file_of[name].write_at(name, first * values.itemsize, as_bytes(values))
            except Exception as error:  # noqa: BLE001 - see the class
                self.error = error

    def close(self) -> Exception | None:
        """Put every file on the disk and fill `written`; the first failure is returned."""
        try:
            for writer in self._files:
                writer.close()
            self.written = Manifest.of_files(self._files).as_dict()
        except Exception as error:  # noqa: BLE001 - see the class
            return error
        return None
