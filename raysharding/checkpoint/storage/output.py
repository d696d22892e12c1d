"""Outputs of a writer: a local file, written in any order, and an object of a store, written from start to end."""

from __future__ import annotations

import os
import queue
import threading
from typing import Final

from raysharding.checkpoint.storage.interface import os_errors
from raysharding.checkpoint.storage.remote import remote_storage
from raysharding.checkpoint.storage.requests import DEFAULT_REMOTE, RemoteOptions, first_line
from raysharding.checkpoint.storage.uri import is_remote
from raysharding.errors import CheckpointError

_NUM_PARTS: Final = 2
"""Parts queued behind the one that is being sent."""


def open_output(path: str, *, join: bool = False) -> Output:
    """Create a file, or open an existing local file that another process created.

    Raises:
        CheckpointError: The file cannot be created or opened.
    """
    if not is_remote(path):
        return LocalOutput(path, join=join)
    assert not join, "an object has one writer"
    return RemoteOutput(path)


class LocalOutput:
    """A local file."""

    def __init__(self, path: str, *, join: bool) -> None:
        self._path = path
        self._is_guest = join
        with os_errors(f"cannot be {'opened' if join else 'made'}", path):
            self._descriptor = os.open(path, os.O_WRONLY | (0 if join else os.O_CREAT | os.O_EXCL), 0o666)

    @property
    def inode(self) -> tuple[int, int]:
        """Device and inode."""
        found = os.fstat(self._descriptor)
        return found.st_dev, found.st_ino

    def write(self, view: memoryview, offset: int, tensor: str | None) -> None:
        """Write bytes at an offset of the file, unbuffered. Thread-safe. An error names the tensor."""
        done = 0
        while done < view.nbytes:
            try:
                # One call writes at most 2 GiB and may return early; Python itself retries on EINTR.
                done += os.pwrite(self._descriptor, view[done:], offset + done)
            except OSError as error:
                raise disk_error(error, self._path, tensor) from error

    def finish(self) -> None:
        """Make the file visible to readers: the caller has written every byte. A process that joined only closes it."""
        try:
            if not self._is_guest:
                os.fsync(self._descriptor)
        except OSError as error:
            self.abort()
            raise disk_error(error, self._path, None) from error
        os.close(self._descriptor)

    def abort(self) -> None:
        """Close the file and remove it."""
        os.close(self._descriptor)
        if not self._is_guest:
            os.unlink(self._path)


class RemoteOutput:
    """An object, which a thread sends in parts while the caller writes the next ones; readers see it once finished.

    pyarrow's streams accept bytes in file order only, so bytes that are written early stay in memory until those before
    them arrive; `distributed.transfer` writes in order. Memory: the early bytes, and `_NUM_PARTS` + 2 parts.
    """

    def __init__(self, path: str, options: RemoteOptions = DEFAULT_REMOTE) -> None:
        self._path = path
        self._part_bytes = options.part_bytes
        # pyarrow retries parts (see Note [Retries]); this deadline covers all tries of one part.
        self._timeout_s = options.request_s * options.num_tries
        self._storage = remote_storage(options)
        self._stream = self._storage.open_output(path)
        self._lock = threading.Lock()
        self._early: dict[int, bytes] = {}
        self._part = bytearray()
        self._next = 0
        self._error: CheckpointError | None = None
        self._is_given_up = False
        self._parts: queue.Queue[bytearray | None] = queue.Queue(_NUM_PARTS)
        self._thread = threading.Thread(target=self._send, name="raysharding-upload", daemon=True)
        self._thread.start()

    def write(self, view: memoryview, offset: int, tensor: str | None) -> None:
        """See `LocalOutput`."""
        with self._lock:
            if offset != self._next:
                self._early[offset] = bytes(view)
                return
            self._append(view)
            while (data := self._early.pop(self._next, None)) is not None:
                self._append(memoryview(data))

    def finish(self) -> None:
        """See `LocalOutput`."""
        assert not self._early, "every byte was written"
        self._put(self._part)
        self._end()
        if self._error is not None:
            raise self._error
        try:
            self._stream.close()
        except OSError as error:
            raise self._failed(error) from error

    def abort(self) -> None:
        """See `LocalOutput`. A stream cannot be discarded: it is closed and its object removed; no index names it."""
        self._is_given_up = True
        try:
            self._end()
            self._stream.close()
            self._storage.remove(self._path)
        except (OSError, CheckpointError):
            return  # the error that led to the abort is the one to report

    def _append(self, view: memoryview) -> None:
        self._next += view.nbytes
        self._part += view
        if len(self._part) >= self._part_bytes:
            self._put(self._part)
            self._part = bytearray()

    def _put(self, part: bytearray | None) -> None:
        if self._error is not None and part is not None:
            raise self._error
        try:
            self._parts.put(part, timeout=self._timeout_s)
        except queue.Full:
            raise self._stalled() from None

    def _end(self) -> None:
        """Wait until the thread has sent all parts or failed."""
        self._put(None)
        self._thread.join(self._timeout_s * (_NUM_PARTS + 1))
        if self._thread.is_alive():
            raise self._stalled()

    def _send(self) -> None:
        while (part := self._parts.get()) is not None:
            if self._error is not None or self._is_given_up:
                continue  # the next `_put` raises the error
            try:
                self._stream.write(part)
            except (OSError, ValueError) as error:
                self._error = self._failed(error)
                self._error.__cause__ = error

    def _stalled(self) -> CheckpointError:
        return CheckpointError(f"cannot be written: the store took nothing for {self._timeout_s:g} s", path=self._path)

    def _failed(self, error: Exception) -> CheckpointError:
        cure = "nothing was committed: check the store, its credentials and the network"
        return CheckpointError(f"cannot be written: {first_line(error)}; {cure}", path=self._path)


def disk_error(error: OSError, path: str, tensor: str | None) -> CheckpointError:
    """Return the error that reports a failed write to a local file."""
    what = f"cannot be written: {error.strerror}; nothing was committed, so what the destination held is still there"
    return CheckpointError(what, path=path, tensor=tensor)


Output = LocalOutput | RemoteOutput
"""A file that is being written."""
