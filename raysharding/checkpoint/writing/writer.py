"""`FileWriter`: one standard safetensors file, written in parts in any order."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final, Self

import torch

from raysharding.checkpoint.format import MAX_HEADER_BYTES, NAME_OF_DTYPE, Checksums, TensorInfo, header_sha256, is_text
from raysharding.checkpoint.storage import LocalOutput, Output, open_output
from raysharding.errors import CheckpointError

_ALIGNMENT: Final = 8
_PART_BYTES: Final = 256 << 10
"""Written, then checksummed, a part at a time: the checksum finds the part in the cache."""
_PYTORCH_METADATA: Final[dict[str, str]] = {"format": "pt"}
"""transformers opens a file only if its metadata names the framework."""


class FileWriter:
    """Writes one safetensors file. A context manager: a normal exit closes the file, an error aborts it.

    The constructor writes the header. Any thread may write the tensors' bytes, in any order; call `close` or `abort`
    after all of them. Unbuffered: bytes go from the caller's memory to the file. An object of a store accepts bytes in
    file order only, and keeps early ones in memory (`RemoteOutput`).

    Several processes of one host may fill a file: one creates it and the others join; before the first closes the file,
    it merges their checksums into its own.

    Args:
        path: A path or a remote URI. A local file must not exist yet.
        tensors: (name, dtype, full shape) of each tensor, laid out in this order, but wider dtypes first, so that every
            tensor is aligned to its element size.
        metadata: `__metadata__` of the file.
        join: Fill a file that another process created for the same tensors, without writing the header.

    Raises:
        CheckpointError: A name is given twice or reserved, safetensors lacks a dtype, or the file cannot be created.
    """

    def __init__(
        self,
        path: str,
        tensors: Sequence[tuple[str, torch.dtype, Sequence[int]]],
        metadata: Mapping[str, str] = _PYTORCH_METADATA,
        *,
        join: bool = False,
    ) -> None:
        header, infos = _lay_out(path, tensors, metadata)
        self.path = path
        """Path or URI of the file."""
        self.tensors: Mapping[str, TensorInfo] = infos
        """Name → place in this file, in file order; `TensorInfo.file` is 0."""
        self.num_bytes = len(header) + sum(info.num_bytes for info in infos.values())
        """Size of the finished file, header included."""
        self.header_sha256 = header_sha256(header[8:])
        """SHA-256, in hex, of the 8 length bytes and the header, as `CheckpointFile` has it."""
        self.checksums = Checksums()
        """Checksums of the bytes given to `write_at`; complete after `close`."""
        self._is_joined = join
        self._output: Output | None = open_output(path, join=join)
        try:
            if not join:
                self._write(memoryview(header), 0, None)
        except BaseException:
            self.abort()
            raise

    @property
    def inode(self) -> tuple[int, int]:
        """Device and inode of the open local file, by which processes of a host recognise the same file."""
        assert isinstance(self._output, LocalOutput), "inode of a file that is closed, or of an object"
        return self._output.inode

    def write_at(self, name: str, byte_offset: int, buffer: memoryview | torch.Tensor) -> None:
        """Write a part of one tensor. Thread-safe.

        Args:
            name: The tensor.
            byte_offset: Offset of the part from the first byte of the tensor.
            buffer: A contiguous memoryview, or a contiguous uint8 tensor on the CPU.

        Raises:
            CheckpointError: The disk is full or failed.
        """
        view = buffer.numpy().data if isinstance(buffer, torch.Tensor) else buffer
        info = self.tensors[name]
        end = byte_offset + view.nbytes
        assert 0 <= byte_offset <= end <= info.num_bytes, f"{name}: [{byte_offset}, {end}) of {info.num_bytes}"
        data = view.cast("B") if view.nbytes else memoryview(b"")
        for start in range(0, data.nbytes, _PART_BYTES):
            part = data[start : start + _PART_BYTES]
            self._write(part, info.offset + byte_offset + start, name)
            self.checksums.add(name, byte_offset + start, part)

    def close(self) -> None:
        """Check that every byte was written, sync the file to disk or finish the object, and close it. Idempotent.

        A process that joined only closes the file: its creator finishes it.

        Raises:
            CheckpointError: Bytes are missing or parts overlap, or the disk failed. The file is removed.
        """
        if self._output is None:
            return
        if not self._is_joined:
            try:
                self._require_complete()
            except CheckpointError:
                self.abort()
                raise
        output, self._output = self._output, None
        output.finish()

    def abort(self) -> None:
        """Close and remove the file. Does nothing after `close`, or a second time."""
        if self._output is not None:
            output, self._output = self._output, None
            output.abort()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, error_type: object, error: BaseException | None, traceback: object) -> None:
        if error is None:
            self.close()
        else:
            self.abort()

    def _write(self, view: memoryview, offset: int, name: str | None) -> None:
        if self._output is None:
            raise ValueError(f"{self.path}: FileWriter is closed")
        self._output.write(view, offset, name)

    def _require_complete(self) -> None:
        for name, info in self.tensors.items():
            if self.checksums.problem(name, info.num_bytes):
                what = "was not written in full, or in parts that overlap"
                raise CheckpointError(what, path=self.path, tensor=name)


def _lay_out(
    path: str, tensors: Sequence[tuple[str, torch.dtype, Sequence[int]]], metadata: Mapping[str, str]
) -> tuple[bytes, dict[str, TensorInfo]]:
    """Return the header with its length in front, and the place of each tensor."""
    entries: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    infos = []
    position = 0
    for name, dtype, shape in sorted(tensors, key=lambda tensor: -tensor[1].itemsize):  # as `file_plan.file_order`
        if name in entries or name == "__metadata__" or not is_text(name):
            raise CheckpointError("the name is given twice, reserved, or not Unicode text", path=path, tensor=name)
        if dtype not in NAME_OF_DTYPE:
            what = f"safetensors has no {dtype}: convert it, or leave the tensor out"
            raise CheckpointError(what, path=path, tensor=name)
        info = TensorInfo(name, dtype, tuple(shape), 0, position)
        end = position + info.num_bytes
        entries[name] = {"dtype": NAME_OF_DTYPE[dtype], "shape": info.shape, "data_offsets": (position, end)}
        infos.append(info)
        position = end
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode("utf-8")
    text += b" " * (-len(text) % _ALIGNMENT)
    if len(text) > MAX_HEADER_BYTES:
        what = f"{len(tensors)} tensors make a header of {len(text)} bytes, over the cap of {MAX_HEADER_BYTES}"
        raise CheckpointError(f"{what}: save into more files", path=path)
    header = len(text).to_bytes(8, "little") + text
    return header, {info.name: replace(info, offset=len(header) + info.offset) for info in infos}
