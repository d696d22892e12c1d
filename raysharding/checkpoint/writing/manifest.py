"""`Manifest`: the files and tensors that a save wrote, with checksums, so that a load can detect changes.

Format of `raysharding.manifest.json`: {"format_version": 1, "algorithm": "crc32",
"files": {name: {"num_bytes", "header_sha256"}}, "tensors": {name: {"num_bytes", "crc32": 8 hex digits}}}.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final, Self

from raysharding.checkpoint.format import (
    ALGORITHM,
    MANIFEST_NAME,
    Checkpoint,
    Checksums,
    read_json,
)
from raysharding.checkpoint.storage import join_path, split_path, storage_of
from raysharding.checkpoint.writing.file_plan import write_file
from raysharding.checkpoint.writing.writer import FileWriter
from raysharding.errors import CheckpointError, shown

FORMAT_VERSION: Final = 1
"""The only one so far."""
_STALE: Final = (
    f"if the files were replaced on purpose, remove {MANIFEST_NAME}; if not, restore the files that were saved with it"
)


@dataclass(frozen=True, slots=True)
class ManifestFile:
    """One checkpoint file."""

    num_bytes: int
    """Size of the file, header included."""
    header_sha256: str
    """SHA-256, hex, of the 8 length bytes and the header."""


@dataclass(frozen=True, slots=True)
class ManifestTensor:
    """One tensor."""

    num_bytes: int
    """Bytes in the file."""
    crc32: int
    """CRC-32 of those bytes."""


@dataclass(frozen=True)
class Manifest:
    """The files and tensors of one save."""

    files: Mapping[str, ManifestFile]
    """File name → size and header, sorted by name."""
    tensors: Mapping[str, ManifestTensor]
    """Key in the files → size and checksum, sorted by name."""

    @classmethod
    def of_files(cls, writers: Iterable[FileWriter]) -> Self:
        """Describe finished files, from the checksums of their writers. Reads no file."""
        files = {}
        tensors = {}
        for writer in writers:
            files[split_path(writer.path)[1]] = ManifestFile(writer.num_bytes, writer.header_sha256)
            for name, info in writer.tensors.items():
                crc32 = writer.checksums.value(name, info.num_bytes)
                assert crc32 is not None, f"{name}: {writer.checksums.problem(name, info.num_bytes)}"
                tensors[name] = ManifestTensor(info.num_bytes, crc32)
        return cls(dict(sorted(files.items())), dict(sorted(tensors.items())))

    @classmethod
    def of_parts(cls, parts: Iterable[Self]) -> Self:
        """Merge the manifests of all ranks."""
        files: dict[str, ManifestFile] = {}
        tensors: dict[str, ManifestTensor] = {}
        for part in parts:
            assert not files.keys() & part.files.keys(), "two ranks wrote one file"
            assert not tensors.keys() & part.tensors.keys(), "two ranks wrote one tensor"
            files.update(part.files)
            tensors.update(part.tensors)
        return cls(dict(sorted(files.items())), dict(sorted(tensors.items())))

    @property
    def num_bytes(self) -> int:
        """Payload bytes of all tensors."""
        return sum(tensor.num_bytes for tensor in self.tensors.values())

    def as_dict(self) -> dict[str, Any]:
        """Return the manifest as a JSON value; equal manifests give the same text."""
        return {
            "format_version": FORMAT_VERSION,
            "algorithm": ALGORITHM,
            "files": {name: asdict(file) for name, file in self.files.items()},
            "tensors": {n: {"num_bytes": t.num_bytes, "crc32": f"{t.crc32:08x}"} for n, t in self.tensors.items()},
        }

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any], path: str) -> Self:
        """Parse and check what `as_dict` returned, or another program wrote.

        Args:
            fields: A JSON object.
            path: Names the manifest in errors.

        Raises:
            CheckpointError: The format or algorithm is unknown, or a field is missing or malformed. A value that is no
                size or checksum equals none of a file, so that `check_manifest` or `mismatches` names it.
        """
        version, algorithm = fields.get("format_version"), fields.get("algorithm")
        if type(version) is not int or version != FORMAT_VERSION or algorithm != ALGORITHM:
            what = f"is of format_version {shown(version)} with algorithm {shown(algorithm)}, but only "
            what += f"{FORMAT_VERSION} with {ALGORITHM!r} is known: upgrade raysharding, or remove the file"
            raise CheckpointError(what, path=path)
        try:
            files = {name: ManifestFile(**entry) for name, entry in fields["files"].items()}
            tensors = {
                name: ManifestTensor(entry["num_bytes"], int(entry["crc32"], 16))
                for name, entry in fields["tensors"].items()
            }
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            what = f"is not what a save writes: {type(error).__name__}: {shown(str(error))}"
            raise CheckpointError(what, path=path) from error
        return cls(dict(sorted(files.items())), dict(sorted(tensors.items())))


def read_manifest(checkpoint: Checkpoint) -> Manifest | None:
    """Read the manifest beside a checkpoint's files, on a rank that can read them.

    Returns:
        The manifest; `None` where there is none, as in directories that other libraries saved.

    Raises:
        CheckpointError: The manifest cannot be read, or does not come from `write_manifest`.
    """
    directory = checkpoint.directory
    fields = read_json(storage_of(directory), directory, MANIFEST_NAME, "manifest ")
    return None if fields is None else Manifest.from_dict(fields, join_path(directory, MANIFEST_NAME))


def write_manifest(directory: str, manifest: Manifest) -> None:
    """Write a manifest into a staging directory. `commit_staging` syncs it to disk.

    Raises:
        CheckpointError: The disk is full or failed.
    """
    write_file(directory, MANIFEST_NAME, json.dumps(manifest.as_dict(), separators=(",", ":")).encode("ascii") + b"\n")


def check_manifest(manifest: Manifest, checkpoint: Checkpoint) -> None:
    """Compare sizes, headers and tensors of the files with the manifest, before any payload byte is read.

    The checkpoint may lack files of the manifest: the user may have opened one of several. Reads nothing; compares what
    `open_checkpoint` read.

    Raises:
        CheckpointError: Names a file or a tensor that is not in the manifest or differs from it.
    """
    for file in checkpoint.files:
        expected = manifest.files.get(file.name)
        if expected is None:
            what = f"is not in {MANIFEST_NAME}, so the save that made that did not write this file"
        elif file.num_bytes != expected.num_bytes:
            what = f"has {file.num_bytes} bytes, but {MANIFEST_NAME} says {expected.num_bytes}"
        elif file.header_sha256 != expected.header_sha256:
            what = f"has a header with SHA-256 {file.header_sha256}, but {MANIFEST_NAME} says {expected.header_sha256}"
        else:
            continue
        raise CheckpointError(f"{what}; {_STALE}", path=file.path)
    for name, info in checkpoint.tensors.items():
        tensor = manifest.tensors.get(name)
        if tensor is None or tensor.num_bytes != info.num_bytes:
            has = "does not list it" if tensor is None else f"says {tensor.num_bytes} bytes"
            what = f"has {info.num_bytes} bytes, but the manifest {has}; {_STALE}"
            raise CheckpointError(what, path=checkpoint.files[info.file].path, tensor=name)


def mismatches(manifest: Manifest, checksums: Checksums, tensors: Iterable[str] | None = None) -> list[str]:
    """Compare checksums of what was read, merged from all ranks, with the manifest.

    Args:
        manifest: The manifest of the save.
        checksums: Of the bytes that were read.
        tensors: Keys that were read in full and must match; `None` for all keys of the manifest.

    Returns:
        A line for each tensor that differs, was not read in full, or is not in the manifest: tensor, expected, found.
    """
    lines = []
    for name in manifest.tensors if tensors is None else tensors:
        expected = manifest.tensors.get(name)
        if expected is None:
            lines.append(f"tensor {shown(name)}: is not in {MANIFEST_NAME}")
            continue
        actual = checksums.value(name, expected.num_bytes)
        if actual != expected.crc32:
            what = checksums.problem(name, expected.num_bytes) if actual is None else f"found {actual:08x}"
            wanted = f"{ALGORITHM} of {expected.num_bytes} bytes: expected {expected.crc32:08x}"
            lines.append(f"tensor {shown(name)}: {wanted}, {what}")
    return lines
