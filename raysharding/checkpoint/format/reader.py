"""`FileReader`: byte ranges of a checkpoint's files by positional reads, from any number of threads."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from contextlib import closing
from typing import Self

import torch

from raysharding.checkpoint.format.checkpoint import CheckpointFile
from raysharding.checkpoint.format.tensor_info import TensorInfo
from raysharding.checkpoint.storage import DEFAULT_REMOTE, FileStat, RemoteOptions, StoredFile, storage_of
from raysharding.errors import CheckpointError


class FileReader:
    """Reads byte ranges of a checkpoint's files. A context manager; every method is thread-safe.

    Files are opened at their first read and stay open until `close`. Reads share no file offset, so threads read the
    same file at once. Local bytes land in the caller's memory, without a buffer between; remote ones pass through the
    memory of the requests in flight.

    Args:
        files: `Checkpoint.files` of what `open_checkpoint` returned, on a machine that sees the same files.
        remote: How to read from remote URIs.
    """

    def __init__(self, files: Sequence[CheckpointFile], remote: RemoteOptions = DEFAULT_REMOTE) -> None:
        self.files = tuple(files)
        self._remote = remote
        self._opened: dict[int, StoredFile] = {}
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
            file: Index into `files`.
            offset: Byte offset from the start of the file.
            buffer: A writable, contiguous memoryview, or a contiguous uint8 tensor on the CPU. Its length says how
                many bytes to read.

        Raises:
            CheckpointError: the file is gone, ends early, cannot be read, or is not the one whose header was read.
        """
        view = buffer.numpy().data if isinstance(buffer, torch.Tensor) else buffer
        self.read_ranges(file, [(offset, (view,))])

    def read_ranges(self, file: int, ranges: Iterable[tuple[int, Sequence[memoryview]]]) -> None:
        """Read ranges of a file, one after the other, each scattered over memory.

        Args:
            file: Index into `files`.
            ranges: (byte offset from the start of the file, what is filled in turn with the bytes that begin there).
                The views are writable and contiguous; their lengths together say how many bytes to read.

        Raises:
            CheckpointError: as `read_into`.
        """
        # One call for many: between two reads Python's own state has left the caches, and each line of it costs.
        opened = self._acquire(file)
        try:
            for offset, views in ranges:
                num_bytes = opened.fill(offset, views)
                with self._lock:
                    self._num_bytes_read += num_bytes  # as they come: who waits for a slow disk looks at this
        finally:
            self._release()

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

        Call it after the last read: a file that was rewritten while it was streamed is found here, and only here.
        (pyarrow itself takes no notice when an object's answer is shorter than asked.) Of a remote file the etag is
        compared too, in one request for each file.

        Raises:
            CheckpointError: a file changed, was replaced, or is gone.
        """
        if self.files:
            storage_of(self.files[0].path, self._remote).each(self._verify, self.files)
        with self._lock:
            for index, opened in self._opened.items():
                _require_same(opened.stat, self.files[index])

    def _verify(self, file: CheckpointFile) -> None:
        storage = storage_of(file.path, self._remote)
        if file.etag is not None:
            with closing(storage.open(file.path)) as opened:  # only an open file tells its etag
                _require_same(opened.stat, file)
            return
        stat = storage.find(file.path)
        if stat.kind != "file":
            raise CheckpointError("is gone since its header was read", path=file.path)
        _require_same(stat, file)

    def close(self) -> None:
        """Close the files. Reads under way end normally, later ones raise `ValueError`. Idempotent."""
        with self._lock:
            self._closed = True
            self._close_if_idle()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, error_type: object, error: BaseException | None, traceback: object) -> None:
        self.close()

    def _acquire(self, file: int) -> StoredFile:
        """Give the open file, kept open until `_release` even if `close` is called meanwhile.

        Closing under a running read would let the kernel hand the descriptor to another file, and the read would
        return that file's bytes.
        """
        with self._lock:
            if self._closed:
                raise ValueError("FileReader is closed: read inside its `with` block, or make a new one")
            opened = self._opened.get(file)
            if opened is None:
                opened = self._opened[file] = self._open(self.files[file])
            self._num_active += 1
        return opened

    def _release(self) -> None:
        """End the use of a file that `_acquire` gave."""
        with self._lock:
            self._num_active -= 1
            self._close_if_idle()

    def _open(self, file: CheckpointFile) -> StoredFile:
        """Open the file that was validated, and no other that has since taken its path."""
        opened = storage_of(file.path, self._remote).open(file.path)
        try:
            _require_same(opened.stat, file)
        except CheckpointError:
            opened.close()
            raise
        return opened

    def _close_if_idle(self) -> None:
        if self._closed and self._num_active == 0:
            while self._opened:
                self._opened.popitem()[1].close()


def _require_same(stat: FileStat, file: CheckpointFile) -> None:
    if stat.num_bytes != file.num_bytes:
        what = f"has {stat.num_bytes} bytes, but had {file.num_bytes} when its header was read"
    elif None not in (stat.mtime_ns, file.mtime_ns) and stat.mtime_ns != file.mtime_ns:
        what = f"was changed (mtime {stat.mtime_ns} ns, was {file.mtime_ns} ns) since its header was read"
    elif None not in (stat.etag, file.etag) and stat.etag != file.etag:
        what = f"was changed (etag {stat.etag}, was {file.etag}) since its header was read"
    else:
        return
    raise CheckpointError(f"{what}: load again when nothing writes to the checkpoint", path=file.path)
