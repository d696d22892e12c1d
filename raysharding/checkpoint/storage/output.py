"""Where a writer's bytes go: a local file, in any order; or an object of a store, from its first byte to its last."""

from __future__ import annotations

import os
import queue
import threading
from typing import Final, Protocol

from raysharding.checkpoint.storage.interface import os_errors
from raysharding.checkpoint.storage.remote import remote_storage
from raysharding.checkpoint.storage.requests import DEFAULT_REMOTE, RemoteOptions, first_line
from raysharding.checkpoint.storage.uri import is_remote
from raysharding.errors import CheckpointError

_NUM_PARTS: Final = 2
"""Parts that wait for the one under way."""


class Output(Protocol):
    """A file that is being written."""

    def write(self, view: memoryview, offset: int, tensor: str | None) -> None:
        """Take bytes of the file; thread-safe. An error names the tensor."""

    def finish(self) -> None:
        """Put the file where readers see it. Every byte was written."""

    def abort(self) -> None:
        """Let go of the file, and leave nothing of it."""


def open_output(path: str, *, join: bool = False) -> Output:
    """Make a file, or join in filling a local one that is there.

    Raises:
        CheckpointError: It cannot be made.
    """
    if not is_remote(path):
        return LocalOutput(path, join=join)
    assert not join, "an object has one writer"
    return RemoteOutput(path)


class LocalOutput:
    """A file of this machine."""

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
        """See `Output`. Holds no buffer."""
        done = 0
        while done < view.nbytes:
            try:
                # One call writes at most 2 GiB, and may stop early; Python itself retries on EINTR.
                done += os.pwrite(self._descriptor, view[done:], offset + done)
            except OSError as error:
                raise disk_error(error, self._path, tensor) from error

    def finish(self) -> None:
        """See `Output`. One that joined only closes: the file is its maker's."""
        try:
            if not self._is_guest:
                os.fsync(self._descriptor)
        except OSError as error:
            self.abort()
            raise disk_error(error, self._path, None) from error
        os.close(self._descriptor)

    def abort(self) -> None:
        """See `Output`."""
        os.close(self._descriptor)
        if not self._is_guest:
            os.unlink(self._path)


class RemoteOutput:
    """An object, sent in parts by a thread of its own while the next ones come; it appears when it is finished.

    pyarrow's streams take bytes in order alone: those that come early wait. So who fills several tensors at once, or
    one from its end, holds them in memory; `distributed.transfer` brings them in order. Memory: what has come
    early, and `_NUM_PARTS` + 2 parts.
    """

    def __init__(self, path: str, options: RemoteOptions = DEFAULT_REMOTE) -> None:
        self._path = path
        self._part_bytes = options.part_bytes
        # pyarrow tries again by itself; this is for what it would wait for.
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
        """See `Output`."""
        with self._lock:
            if offset != self._next:
                self._early[offset] = bytes(view)
                return
            self._append(view)
            while (data := self._early.pop(self._next, None)) is not None:
                self._append(memoryview(data))

    def finish(self) -> None:
        """See `Output`."""
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
        """See `Output`. pyarrow cannot drop a stream: what it leaves is removed, and no index names it anyway."""
        self._is_given_up = True
        try:
            self._end()
            self._stream.close()
            self._storage.remove_file(self._path)
        except (OSError, CheckpointError):
            return  # the error that led here is the one to tell

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
        """Wait until the thread has sent all, or has seen an error."""
        self._put(None)
        self._thread.join(self._timeout_s * (_NUM_PARTS + 1))
        if self._thread.is_alive():
            raise self._stalled()

    def _send(self) -> None:
        while (part := self._parts.get()) is not None:
            if self._error is not None or self._is_given_up:
                continue  # who writes hears of it by the next part
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
    """What a write that the disk refused is to the user."""
    what = f"cannot be written: {error.strerror}; nothing was committed, so what the destination held is still there"
    return CheckpointError(what, path=path, tensor=tensor)
