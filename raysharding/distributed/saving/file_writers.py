"""Writers of checkpoint files: each rank gathers and writes the files assigned to it."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from raysharding.checkpoint import Manifest
from raysharding.checkpoint.format import ADAPTER_NAME, SINGLE_NAME
from raysharding.checkpoint.storage import is_remote, join_path
from raysharding.checkpoint.writing import FileWriter, file_names, file_order, plan_files, write_index, write_manifest
from raysharding.distributed.comm import agree, get_rank
from raysharding.distributed.transfer import Gather, as_bytes, host_identity
from raysharding.errors import CheckpointError
from raysharding.models import RunIndex, SavedTensor
from raysharding.units import MIB

MAX_FILE_BYTES = 5_000_000_000
"""Largest checkpoint file, in bytes, unless one tensor is larger; transformers' default."""
SMALL_BYTES = 256 * MIB
"""Up to this size, a checkpoint is one file, which rank 0 writes."""


@dataclass(frozen=True)
class FilePlan:
    """Assignment of tensors to files and files to ranks; the same on every rank."""

    names: tuple[tuple[str, ...], ...]
    """File → keys in the file."""
    sources: tuple[tuple[str, ...], ...]
    """File → tensors that the keys are made of."""
    files: tuple[str, ...]
    """File names."""
    writers: tuple[int, ...]
    """File → rank that writes it."""

    def destinations(self) -> dict[int, list[str]]:
        """Return rank → tensors that the rank needs."""
        wanted: dict[int, list[str]] = {}
        for sources, writer in zip(self.sources, self.writers, strict=True):
            wanted.setdefault(writer, []).extend(sources)
        return wanted


def _plan_files(
    layout: Mapping[str, SavedTensor],
    directory: str,
    file_name: str | None,
    token: str,
) -> FilePlan:
    """Distribute tensors over files, and files over the ranks that see the directory."""
    # The path may be another disk on another node. Every rank calls this, so that all make the same plan.
    sees = agree(None, is_remote(directory) or os.path.isdir(directory))
    able = [rank for rank, answer in enumerate(sees) if answer]
    sizes = {key: prod(saved.shape) * saved.dtype.itemsize for key, saved in layout.items()}
    total = sum(sizes.values())
    is_one = file_name is not None or total <= SMALL_BYTES
    num_files = 1 if is_one else max(len(able), -(-total // MAX_FILE_BYTES))
    units = _units(layout)
    dealt = plan_files({first: sum(map(sizes.__getitem__, keys)) for first, keys in units.items()}, num_files)
    position = {key: number for number, key in enumerate(layout)}
    names = tuple(
        tuple(sorted((key for first in one for key in units[first]), key=position.__getitem__)) for one in dealt
    )
    files = (file_name,) if file_name is not None else file_names(len(names), token * is_remote(directory))
    if is_remote(directory):
        names = tuple(tuple(file_order(_in_source_order(one, layout), lambda key: layout[key].dtype)) for one in names)
    sources = tuple(tuple(dict.fromkeys(run.source for key in one for run in layout[key].runs)) for one in names)
    return FilePlan(names, sources, files, tuple(able[index % len(able)] for index in range(len(names))))


def _in_source_order(names: Sequence[str], layout: Mapping[str, SavedTensor]) -> list[str]:
    """Return keys in the order in which their tensors arrive: earlier tensors would wait in memory."""
    sources = dict.fromkeys(run.source for key in names for run in layout[key].runs)
    place = {source: index for index, source in enumerate(sources)}

    def first(key: str) -> tuple[int, int]:
        runs = layout[key].runs
        return (place[runs[0].source], runs[0].source_start) if runs else (-1, 0)

    return sorted(names, key=first)


def _units(layout: Mapping[str, SavedTensor]) -> dict[str, list[str]]:
    """Return first key → keys that one rank must write, because they share a tensor."""
    units: dict[str, list[str]] = {}
    unit_of: dict[str, str] = {}
    for key, saved in layout.items():
        sources = dict.fromkeys(run.source for run in saved.runs)
        first, *others = dict.fromkeys(unit_of[source] for source in sources if source in unit_of) or (key,)
        units.setdefault(first, []).append(key)
        for other in others:
            units[first] += units.pop(other)
            unit_of |= {source: first for source, unit in unit_of.items() if unit == other}
        unit_of |= dict.fromkeys(sources, first)
    return units


@dataclass(frozen=True)
class Written:
    """Closed files of one directory, before index and manifest are written."""

    plan: FilePlan
    """Assignment of the files."""
    wire_bytes: int
    """Bytes that this rank sent."""
    parts: Sequence[Mapping[str, Any]]
    """Parts of the manifest, by rank."""

    def finish(self, directory: str) -> None:
        """Write manifest and index; an object store then holds a checkpoint. One rank calls this.

        Raises:
            CheckpointError: The disk is full or failed.
        """
        manifest = Manifest.of_parts(Manifest.from_dict(part, directory) for part in self.parts)
        write_manifest(directory, manifest)
        if SINGLE_NAME not in self.plan.files and ADAPTER_NAME not in self.plan.files:
            pairs = zip(self.plan.names, self.plan.files, strict=True)
            write_index(directory, {name: file for names, file in pairs for name in names}, manifest.num_bytes)


def write_tensors(
    tensors: Mapping[str, torch.Tensor],
    directory: str,
    device: torch.device,
    stall_s: float,
    on_round: Callable[[int], None],
    layout: Mapping[str, SavedTensor] | None = None,
    file_name: str | None = None,
    token: str = "",
) -> Written:
    """Write full tensors as one or more checkpoint files; collective.

    Args:
        tensors: Name → DTensor, or a replicated tensor (rank 0's is written).
        directory: A directory that rank 0 sees; all ranks that see it write.
        device: Device of the messages.
        stall_s: Longest wait for one round of messages, in seconds.
        on_round: Called on every rank after each round with the bytes written so far.
        layout: Key in the files → its parts of `tensors`, and the dtype that they are cast to. Default: the tensors as
            they are.
        file_name: Name of the only file. Default: one or more files under standard names.
        token: Of the save; with a URI, part of the standard names.

    Raises:
        CheckpointError: On every rank, if the disk is full or failed.
    """
    layout = layout or {name: SavedTensor.whole(name, tensor) for name, tensor in tensors.items()}
    plan = _plan_files(layout, directory, file_name, token)
    with ExitStack() as open_files:
        writers = _Writers(plan, layout, directory, open_files)
        made = agree(writers.error, {"host": host_identity(), "inodes": writers.inodes()})
        joined = agree(None, writers.join(made))
        beside = {rank: {*owners, rank} for rank, owners in enumerate(joined)}
        dtypes = {run.source: saved.dtype for saved in layout.values() for run in saved.runs}
        options: dict[str, Any] = {"beside": beside, "in_order": is_remote(directory), "dtypes": dtypes}
        gather = Gather(tensors, plan.destinations(), writers.write, device, stall_s, **options)
        gather.run(on_round)
        # A full disk on one rank fails the save on all; without this, the others would commit.
        writers.merge(agree(writers.error, writers.for_others()))
        return Written(plan, gather.wire_bytes, agree(writers.error or writers.close(), writers.written))


class _Writers:
    """Open files of this rank. After the first error, received bytes are dropped, so that senders do not wait.

    A rank also opens the files of other ranks on its host, if the path leads to the same files, and writes its shards
    there itself, without messages. It does not on other hosts: two clients of a network file system may overwrite each
    other's pages.

    Exceptions are recorded for `agree`: an exception in the gather would leave the other ranks waiting in it.
    """

    def __init__(
        self, plan: FilePlan, layout: Mapping[str, SavedTensor], directory: str, open_files: ExitStack
    ) -> None:
        self.error: Exception | None = None
        self.written: dict[str, Any] = {}
        """Manifest of this rank's files, after `close`."""
        self._plan = plan
        self._layout = layout
        self._directory = directory
        self._open_files = open_files
        self._rank = get_rank()
        self._files: dict[int, FileWriter] = {}
        self._joined_files: dict[int, FileWriter] = {}
        self._file_of: dict[str, FileWriter] = {}
        self._runs = RunIndex()
        try:
            self._files = {
                index: self._open(index) for index, writer in enumerate(plan.writers) if writer == self._rank
            }
        except CheckpointError as error:
            self.error = error

    def _open(self, index: int, *, join: bool = False) -> FileWriter:
        names = self._plan.names[index]
        layout = [(name, self._layout[name].dtype, self._layout[name].shape) for name in names]
        path = join_path(self._directory, self._plan.files[index])
        writer = self._open_files.enter_context(FileWriter(path, layout, join=join))
        self._file_of.update(dict.fromkeys(names, writer))
        for name in names:
            self._runs.add(name, self._layout[name])
        return writer

    def inodes(self) -> dict[str, list[int]]:
        """Return file number → device and inode of this rank's files; empty for object stores."""
        if self.error is not None or is_remote(self._directory):
            return {}
        return {str(index): list(writer.inode) for index, writer in self._files.items()}

    def join(self, made: Sequence[Mapping[str, Any]]) -> list[int]:
        """Open the files of ranks of this host.

        Args:
            made: Host and files, by rank.

        Returns:
            Ranks whose files this rank writes its shards into.
        """
        joined: list[int] = []
        for rank, one in enumerate(made):
            if rank == self._rank or one["host"] != made[self._rank]["host"] or not one["inodes"]:
                continue
            try:
                opened = {int(index): self._open(int(index), join=True) for index in one["inodes"]}
            except CheckpointError:
                continue  # not visible: this rank sends, as from another host
            if all(list(writer.inode) == one["inodes"][str(index)] for index, writer in opened.items()):
                self._joined_files.update(opened)
                joined.append(rank)
        return joined

    def for_others(self) -> dict[str, Any]:
        """Return file number → checksums of what this rank wrote into files of other ranks."""
        return {str(index): writer.checksums.pieces() for index, writer in self._joined_files.items()}

    def merge(self, others: Sequence[Mapping[str, Any]]) -> None:
        """Add what other ranks wrote into this rank's files."""
        for other in others:
            for index, written in other.items():
                if int(index) in self._files:
                    self._files[int(index)].checksums.merge(written)

    def write(self, name: str, first: int, values: torch.Tensor) -> None:
        """Write values of a gather."""
        if self.error is None:
            try:
                self._write(name, first, values)
            except Exception as error:  # noqa: BLE001 - raised here, it would leave other ranks waiting in the gather
                self.error = error

    def _write(self, source: str, first: int, values: torch.Tensor) -> None:
        for key, at, start, stop in self._runs.parts(source, first, values.numel()):
            dtype = self._layout[key].dtype
            self._file_of[key].write_at(key, at * dtype.itemsize, as_bytes(values[start:stop].to(dtype)))

    def close(self) -> Exception | None:
        """Sync and close all files, and fill `written`; return the first error."""
        try:
            for writer in (*self._joined_files.values(), *self._files.values()):
                writer.close()
            self.written = Manifest.of_files(self._files.values()).as_dict()
        except Exception as error:  # noqa: BLE001 - the ranks exchange it
            return error
        return None
