"""`FileReader`: byte ranges of a checkpoint's files by positional reads, from any number of threads."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from operator import attrgetter
from types import TracebackType
from typing import Final, Self

import torch

from raysharding.checkpoint.checkpoint import Checkpoint, CheckpointFile
from raysharding.checkpoint.tensor_info import TensorInfo
from raysharding.errors import CheckpointError

_MAX_VIEWS: Final = os.sysconf("SC_IOV_MAX")
"""Most buffers that one `preadv` takes; 1,024 on Linux."""
_num_bytes = attrgetter("nbytes")


class FileReader:
    """Reads byte ranges of a checkpoint's files. A context manager; every method is thread-safe.

    Files are opened at their first read and stay open until `close`. Positional reads share no file offset, so
    threads read the same file at once. Holds no buffer: bytes land in the caller's memory.

    Args:
        checkpoint: What `open_checkpoint` returned, on a machine that sees the same files.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self._descriptors: dict[int, int] = {}
        self._lock = threading.Lock()
        self._num_active = 0
        self._closed = False
        self._num_bytes_read = 0

    @property
    def num_bytes_read(self) -> int:
        """Bytes read so far, all threads together."""
        return self._num_bytes_read

    def read_into(self, file: int, offset: int, buffer: memoryview | torch.Tensor) -> None:
        """Fill `buffer` with the bytes at `offset`.

        Args:
            file: Index into `Checkpoint.files`.
            offset: Byte offset from the start of the file.
            buffer: A writable, contiguous memoryview, or a contiguous uint8 tensor on the CPU. Its length says how
                many bytes to read.

        Raises:
            CheckpointError: the file is gone, ends early, cannot be read, or is not the one whose header was read.
        """
        view = buffer.numpy().data if isinstance(buffer, torch.Tensor) else buffer
        self.read_views(file, offset, (view,))

    def read_views(self, file: int, offset: int, views: Sequence[memoryview]) -> None:
        """Fill `views` in turn with the bytes that begin at `offset`: one range of the file, scattered over memory.

        Args:
            file: Index into `Checkpoint.files`.
            offset: Byte offset from the start of the file.
            views: Writable and contiguous. Their lengths together say how many bytes to read.

        Raises:
            CheckpointError: as `read_into`.
        """
        with self._open_descriptor(file) as descriptor:
            num_bytes = _fill(descriptor, self._checkpoint.files[file], offset, views)
        with self._lock:
            self._num_bytes_read += num_bytes

    def read_tensor(self, info: TensorInfo) -> torch.Tensor:
        """Read one whole tensor into new CPU memory of `info.num_bytes`.

        Raises:
            CheckpointError: as `read_into`, naming the tensor.
        """
        data = torch.empty(info.num_bytes, dtype=torch.uint8)
        try:
            self.read_into(info.file, info.offset, data)
        except CheckpointError as error:
            raise CheckpointError(error.message, path=error.path, tensor=info.name) from error
        return data.view(info.dtype).reshape(info.shape)

    def verify_unchanged(self) -> None:
        """Check that every file still has the size and the mtime that it had when its header was read.

        Call it after the last read: a file that was rewritten while it was streamed is found here.

        Raises:
            CheckpointError: a file changed, was replaced, or is gone.
        """
        for file in self._checkpoint.files:
            try:
                status = os.stat(file.path)
            except OSError as error:
                what = f"is gone since its header was read ({error.strerror})"
                raise CheckpointError(what, path=file.path) from error
            _require_same(status, file)
        with self._lock:
            for index, descriptor in self._descriptors.items():
                _require_same(os.fstat(descriptor), self._checkpoint.files[index])

    def close(self) -> None:
        """Close the files. Reads under way end normally, later ones raise `ValueError`. Idempotent."""
        with self._lock:
            self._closed = True
            self._close_if_idle()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    @contextmanager
    def _open_descriptor(self, file: int) -> Iterator[int]:
        """Give the descriptor of `file`, kept open until the block ends even if `close` is called meanwhile.

        Closing under a running read would let the kernel hand the number to another file, and the read would
        return that file's bytes.
        """
        with self._lock:
            if self._closed:
                raise ValueError("FileReader is closed: read inside its `with` block, or make a new one")
            descriptor = self._descriptors.get(file)
            if descriptor is None:
                descriptor = self._descriptors[file] = _open(self._checkpoint.files[file])
            self._num_active += 1
        try:
            yield descriptor
        finally:
            with self._lock:
                self._num_active -= 1
                self._close_if_idle()

    def _close_if_idle(self) -> None:
        if self._closed and self._num_active == 0:
            while self._descriptors:
                os.close(self._descriptors.popitem()[1])


def _fill(descriptor: int, file: CheckpointFile, offset: int, views: Sequence[memoryview]) -> int:
    """Fill `views` and return how many bytes they hold."""
    position = offset
    for first in range(0, len(views), _MAX_VIEWS):
        batch = views[first : first + _MAX_VIEWS]
        missing = sum(map(_num_bytes, batch))
        while missing:
            try:
                # One call reads at most 2 GiB, and may stop early; Python itself retries on EINTR.
                count = os.preadv(descriptor, batch, position)
            except OSError as error:
                raise CheckpointError(f"cannot read at byte {position}: {error.strerror}", path=file.path) from error
            if count == 0:
                what = f"ends at byte {position}, but {sum(map(_num_bytes, views))} bytes were asked for at {offset}"
                cure = "the file was cut short after its header was read; restore it and load again"
                raise CheckpointError(f"{what}: {cure}", path=file.path)
            position += count
            missing -= count
            if missing:
                batch = _after(batch, count)
    return position - offset


def _after(views: Sequence[memoryview], num_bytes: int) -> Sequence[memoryview]:
    """What of `views` is left when the first `num_bytes` are filled."""
    for index, view in enumerate(views):
        if num_bytes < view.nbytes:
            return [view.cast("B")[num_bytes:], *views[index + 1 :]]
        num_bytes -= view.nbytes
    return []


def _open(file: CheckpointFile) -> int:
    """Open the file that was validated, and no other that has since taken its path."""
    try:
        descriptor = os.open(file.path, os.O_RDONLY)
    except OSError as error:
        raise CheckpointError(f"cannot open: {error.strerror}", path=file.path) from error
    try:
        _require_same(os.fstat(descriptor), file)
        if hasattr(os, "posix_fadvise"):
            # Doubles the kernel's read-ahead window: the plan reads each file forward.
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_SEQUENTIAL)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _require_same(status: os.stat_result, file: CheckpointFile) -> None:
    if status.st_size != file.num_bytes:
        what = f"has {status.st_size} bytes, but had {file.num_bytes} when its header was read"
    elif file.mtime_ns is not None and status.st_mtime_ns != file.mtime_ns:
        what = f"was changed (mtime {status.st_mtime_ns} ns, was {file.mtime_ns} ns) since its header was read"
    else:
        return
    raise CheckpointError(f"{what}: load again when nothing writes to the checkpoint", path=file.path)
