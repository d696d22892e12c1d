"""`merge_fsdp_weights`: convert a checkpoint of `torch.distributed.checkpoint` to safetensors or `.bin` files."""

from __future__ import annotations

import io
import os
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import IO, Any, cast

import torch
import torch.distributed as dist

from raysharding.checkpoint import DcpReader, Manifest, TensorInfo
from raysharding.checkpoint.format import INDEX_NAME, MANIFEST_NAME, make_staging, new_token
from raysharding.checkpoint.storage import LocalOutput, os_errors
from raysharding.checkpoint.torch_formats import METADATA_NAME, DcpMetadata, Path
from raysharding.checkpoint.writing import (
    FileWriter,
    commit_files,
    file_names,
    is_weight_name,
    plan_files,
    remove_left_overs,
    remove_staging,
    write_index,
    write_manifest,
)
from raysharding.distributed.comm import agree, broadcast_json, current_group, get_rank, using_group
from raysharding.distributed.saving.file_writers import MAX_FILE_BYTES
from raysharding.errors import CheckpointError, listed

HEARTBEAT_S = 5.0
"""Seconds between two messages of the merging rank to the waiting ranks."""
TORCH_NAME = "pytorch_model.bin"
_STAGED = "raysharding-merge"

Progress = Callable[[int, int], None]
"""Called as `progress(bytes_done, bytes_total)`; tensors of a `.bin` are written, and counted, twice."""


@dataclass(frozen=True)
class MergeReport:
    """Report of a merge."""

    files: tuple[str, ...]
    """Paths of the checkpoint files."""
    num_tensors: int
    """Number of tensors."""
    num_bytes: int
    """Bytes of the tensors."""
    skipped: tuple[str, ...]
    """Keys of saved values that were left out."""


def merge_fsdp_weights(
    checkpoint_dir: str | os.PathLike[str],
    output_path: str | os.PathLike[str],
    safe_serialization: bool = True,
    remove_checkpoint_dir: bool = False,
    process_group: dist.ProcessGroup | None = None,
) -> None:
    """Merge a sharded checkpoint into standard files, like accelerate's function of that name.

    Without a process group, the calling process merges. In a process group, all its ranks call it, and rank 0 reads and
    writes, like accelerate's main process; the other ranks wait while bytes move, each time at most the timeout of the
    process group. Only rank 0's arguments matter.

    Tensors are read one at a time. Memory: at most the largest tensor and one chunk, or one chunk if shards are whole
    rows, as FSDP's are; accelerate holds all tensors. A state with one key, such as accelerate's `{"model": ...}`, is
    unwrapped. torch saves tied tensors under each of their names, and they stay so. Files are renamed when they are
    complete, the index last; other files in `output_path`, such as config.json, stay, and weights of an earlier save
    under the standard names are replaced. safetensors files get a manifest for `Loading(verify="full")`.

    No pickle of the checkpoint runs code: a name in `.metadata` outside of torch's checkpoint metadata is an error, and
    tensors and values are read by `torch.load(weights_only=True)`.

    Args:
        checkpoint_dir: A local directory with `.metadata` and `*.distcp` files by `torch.distributed.checkpoint.save`,
            e.g. accelerate's `pytorch_model_fsdp_0` or `optimizer_0`.
        output_path: Output directory; created if missing.
        safe_serialization: True: `model.safetensors`, or, above 5 GB, several files with an index. Values that are no
            tensors are left out with a warning; nested state such as an optimizer's is refused. False: one
            `pytorch_model.bin` for `torch.load(weights_only=True)`, which may hold nested state, numbers and lists.
            Values that such a load refuses are left out with a warning. Writing takes twice its size on disk.
        remove_checkpoint_dir: True to remove `.metadata` and the `*.distcp` files when the output is on disk, and
            `checkpoint_dir` if it is empty then.
        process_group: The ranks that call it. Default: all ranks.

    Raises:
        CheckpointError: On every rank, before anything is written: the directory is no sharded checkpoint (the error
            names subdirectories that are), the files differ from `.metadata`, chunks overlap or leave gaps, or the
            state does not fit the format. During the merge: a file is damaged, or the disk is full or failed;
            `output_path` is then unchanged.
    """
    with using_group(process_group or current_group()):
        report = merge_checkpoint(checkpoint_dir, output_path, safe_serialization, remove_checkpoint_dir)
    if report is not None and report.skipped:
        warnings.warn(skipped_line(report), stacklevel=2)


def skipped_line(report: MergeReport) -> str:
    """Return a line about the values that a merge left out."""
    return f"left out of {os.path.basename(report.files[0])}, because it holds tensors only: {listed(report.skipped)}"


def merge_checkpoint(
    checkpoint_dir: str | os.PathLike[str],
    output_path: str | os.PathLike[str],
    safe_serialization: bool = True,
    remove_checkpoint_dir: bool = False,
    progress: Progress | None = None,
) -> MergeReport | None:
    """Merge as `merge_fsdp_weights`, and return a report.

    Args:
        checkpoint_dir: As for `merge_fsdp_weights`, like the next three.
        output_path: Output directory.
        safe_serialization: True for safetensors files, False for one `pytorch_model.bin`.
        remove_checkpoint_dir: True to remove the sharded checkpoint.
        progress: Called on the rank that merges, after each tensor.

    Returns:
        The report; `None` on ranks other than 0.

    Raises:
        CheckpointError: As from `merge_fsdp_weights`.
    """
    source, output = os.fspath(checkpoint_dir), os.fspath(output_path)

    def run(tell: Progress) -> MergeReport:
        _check_removal(source, output, remove_checkpoint_dir)
        write = _write_safetensors if safe_serialization else _write_torch_file
        reader = DcpReader(source)
        with _staging_in(output) as staging:
            report = write(reader, staging, output, tell)
        if remove_checkpoint_dir:
            _remove(source, output)
        return report

    if not (dist.is_available() and dist.is_initialized()):
        return run(progress or _silent)
    return _on_rank_0(run, progress or _silent)


def _silent(done: int, total: int) -> None:
    """Do nothing; the default for `progress`."""


def _on_rank_0(run: Callable[[Progress], MergeReport], progress: Progress) -> MergeReport | None:
    """Call `run` on rank 0, which sends the other ranks a message every few seconds, and the outcome; collective."""
    report = None
    error: Exception | None = None
    if get_rank() == 0:
        last = time.monotonic()

        def tell(done: int, total: int) -> None:
            nonlocal last
            progress(done, total)
            if time.monotonic() - last >= HEARTBEAT_S:
                # A merge may take longer than one collective may wait: each message restarts the others' wait.
                broadcast_json(True)
                last = time.monotonic()

        try:
            report = run(tell)
        except Exception as raised:  # noqa: BLE001 - the other ranks wait for the outcome
            error = raised
        # Always: the other ranks wait in this broadcast until they receive that no message follows.
        broadcast_json(False)
    else:
        while broadcast_json(None):
            pass
    agree(error)
    return report


def _check_removal(source: str, output: str, remove: bool) -> None:
    """Raise if the output is in the directory that is to be removed."""
    inside = os.path.commonpath((os.path.realpath(source), os.path.realpath(output))) == os.path.realpath(source)
    if remove and inside:
        what = f"is in {source}, which remove_checkpoint_dir=True removes: merge into another directory"
        raise CheckpointError(what, path=output)


def _remove(source: str, output: str) -> None:
    """Remove a sharded checkpoint, and its directory if it is empty then."""
    try:
        names = sorted(os.listdir(source))  # .metadata first: the rest is no checkpoint without it
        for name in names:
            if name == METADATA_NAME or name.endswith(".distcp"):
                os.unlink(os.path.join(source, name))
        if not os.listdir(source) and not os.path.islink(source):
            os.rmdir(source)
    except OSError as error:
        what = f"is merged into {output}, but could not be removed: {error.strerror}"
        raise CheckpointError(what, path=source) from error


@contextmanager
def _staging_in(output: str) -> Iterator[str]:
    """Make a temporary directory within the output directory, so on the same file system; remove it at the end."""
    is_new = not os.path.isdir(output)
    target = os.path.join(output, _STAGED)
    try:
        os.makedirs(output, exist_ok=True)
        remove_left_overs(target)
        path = make_staging(target, new_token())
    except OSError as error:
        raise CheckpointError(f"cannot make a directory: {error.strerror}", path=target) from error
    try:
        yield path
    except BaseException as error:
        try:
            remove_staging(path)
            if is_new:
                os.rmdir(output)
        except (CheckpointError, OSError) as left:
            error.add_note(str(left))  # the first error is the one that is raised
        raise
    remove_staging(path)


def _counter(tell: Progress, total: int) -> Callable[[int], None]:
    """Return a function that counts bytes, for waiting ranks and the progress bar."""
    done = 0

    def count(num_bytes: int) -> None:
        nonlocal done
        done = min(done + num_bytes, total)
        tell(done, total)

    return count


def _write_safetensors(reader: DcpReader, staging: str, output: str, tell: Progress) -> MergeReport:
    tensors = _by_name(reader.metadata)
    sizes = {name: tensor.num_bytes for name, tensor in tensors.items()}
    count = _counter(tell, sum(sizes.values()))
    parts = plan_files(sizes, max(1, -(-sum(sizes.values()) // MAX_FILE_BYTES)))
    files = file_names(len(parts))
    with ExitStack() as open_files:
        writers = []
        for names, file in zip(parts, files, strict=True):
            layout = [(name, tensors[name].dtype, tensors[name].shape) for name in names]
            writers.append(open_files.enter_context(FileWriter(os.path.join(staging, file), layout)))
        for writer in writers:
            for name in writer.tensors:
                reader.read_tensor(tensors[name].name, partial(writer.write_at, name))
                count(sizes[name])
            writer.close()
    manifest = Manifest.of_files(writers)
    write_manifest(staging, manifest)
    committed = [*files, MANIFEST_NAME]
    if len(files) > 1:
        weight_map = {name: file for names, file in zip(parts, files, strict=True) for name in names}
        write_index(staging, weight_map, manifest.num_bytes)
        committed.append(INDEX_NAME)
    # Older files under the standard names would be opened instead, or stay forever.
    stale = [name for name in os.listdir(output) if is_weight_name(name) and name not in committed]
    commit_files(staging, output, committed, remove=stale)
    return _report(output, files, reader.metadata, reader.metadata.values)


def _by_name(metadata: DcpMetadata) -> dict[str, TensorInfo]:
    """Return name → tensor for a safetensors file, which has no nesting."""
    paths = [metadata.paths[key] for key in metadata.tensors]
    if not paths:
        raise CheckpointError("holds no tensor, so there is nothing to merge", path=metadata.directory)
    # A single outer key is unwrapped, as by accelerate; a single tensor has no outer key.
    depth = 2 if len(paths[0]) == 2 and len({path[0] for path in paths}) == 1 else 1
    named = {str(path[-1]): tensor for path, tensor in zip(paths, metadata.tensors.values(), strict=True)}
    if any(len(path) != depth or not isinstance(path[-1], str) for path in paths):
        below = ", ".join(sorted({str(path[0]) for path in paths})[:8])
        what = f"holds nested state, with a tensor at {max(paths, key=len)}; its first keys are {below}"
        cure = "safetensors files hold one flat state dict: save the model's alone, or pass safe_serialization=False"
        raise CheckpointError(f"{what}; {cure}", path=metadata.directory)
    if len(named) != len(paths):
        raise CheckpointError("gives two tensors the same place in the saved state", path=metadata.directory)
    return named


def _write_torch_file(reader: DcpReader, staging: str, output: str, tell: Progress) -> MergeReport:
    metadata = reader.metadata
    count = _counter(tell, 2 * sum(tensor.num_bytes for tensor in metadata.tensors.values()))
    leaves: dict[str, Any] = {}
    skipped = []
    for key in metadata.values:
        try:
            leaves[key] = reader.read_value(key)
        except CheckpointError:
            skipped.append(key)  # the report names it
    _nest(dict.fromkeys((*metadata.tensors, *leaves)), metadata)  # raises before anything is written
    leaves = _map_tensors(reader, os.path.join(staging, "tensors"), count) | leaves
    tree = _nest(leaves, metadata)
    # As accelerate does for {"model": ...}; a single tensor keeps its name.
    only = next(iter(tree.values())) if len(tree) == 1 else None
    _torch_save(only if isinstance(only, dict) else tree, os.path.join(staging, TORCH_NAME), count)
    commit_files(staging, output, (TORCH_NAME,))
    return _report(output, (TORCH_NAME,), metadata, skipped)


def _map_tensors(reader: DcpReader, path: str, count: Callable[[int], None]) -> dict[str, torch.Tensor]:
    """Write each tensor into an unlinked file and map it, so that the tensors take no anonymous memory."""
    mapped = {}
    for key, info in reader.metadata.tensors.items():
        file = LocalOutput(path, join=False)
        try:
            reader.read_tensor(key, partial(_write_at, file, key))
            count(info.num_bytes)
            if info.num_bytes:
                flat = torch.from_file(path, size=info.num_elements, dtype=info.dtype)
            else:
                flat = torch.empty(0, dtype=info.dtype)  # an empty file cannot be mapped
            mapped[key] = flat.view(info.shape)
        finally:
            file.abort()
    return mapped


def _write_at(file: LocalOutput, key: str, offset: int, piece: memoryview) -> None:
    file.write(piece, offset, key)


def _torch_save(state: Mapping[str, Any], path: str, count: Callable[[int], None]) -> None:
    """Write a file for `torch.load(weights_only=True)`."""
    with os_errors("cannot be written", path), _CountedFile(path, "xb") as file:
        file.count = count
        try:
            torch.save(state, cast(IO[bytes], file))
        except RuntimeError as error:
            # torch raises an error of its own after one of the file's.
            raise (error.__context__ if isinstance(error.__context__, OSError) else error) from None
        os.fsync(file.fileno())


class _CountedFile(io.FileIO):
    """File that counts the bytes that are written."""

    count: Callable[[int], None]

    def write(self, data: Any) -> int:
        """Write all bytes, unlike the system, which writes 2 GiB at most in one call."""
        view = memoryview(data).cast("B")
        done = 0
        while done < view.nbytes:
            done += super().write(view[done:])
        self.count(view.nbytes)
        return view.nbytes


def _nest(leaves: Mapping[str, Any], metadata: DcpMetadata) -> dict[str, Any]:
    """Return the nested dicts and lists of the saved state, from the value of each key."""
    values = {metadata.paths[key]: value for key, value in leaves.items()}
    if len(values) != len(leaves):
        raise CheckpointError("holds two values at one place of the saved state", path=metadata.directory)
    nested = _nested(values, metadata.directory)
    assert isinstance(nested, dict), "a path begins with a key"
    return nested


def _nested(values: Mapping[Path, Any], directory: str) -> Any:
    """Return a dict if the paths begin with names, a list if they begin with indices; at an empty path, the value."""
    below: dict[str | int, dict[Path, Any]] = {}
    for path, value in values.items():
        if not path:
            if len(values) > 1:
                raise CheckpointError(f"holds both a value and, below it, {list(values)[:8]}", path=directory)
            return value
        below.setdefault(path[0], {})[path[1:]] = value
    if all(isinstance(part, str) for part in below):
        return {part: _nested(inner, directory) for part, inner in below.items()}
    if below.keys() != set(range(len(below))):
        what = f"holds a list with the positions {sorted(map(str, below))[:8]}: one is missing"
        raise CheckpointError(what, path=directory)
    return [_nested(below[position], directory) for position in range(len(below))]


def _report(output: str, files: Sequence[str], metadata: DcpMetadata, skipped: Sequence[str]) -> MergeReport:
    paths = tuple(os.path.join(output, file) for file in files)
    num_bytes = sum(tensor.num_bytes for tensor in metadata.tensors.values())
    return MergeReport(paths, len(metadata.tensors), num_bytes, tuple(skipped))
