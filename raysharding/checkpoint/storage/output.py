"""Outputs of a writer: a local file, written in any order, and an object of a store, written from start to end."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import Any, Final

from raysharding.checkpoint.storage.interface import os_errors
from raysharding.checkpoint.storage.remote import remote_storage
from raysharding.checkpoint.storage.requests import DEFAULT_REMOTE, RemoteOptions, first_line, in_thread
from raysharding.checkpoint.storage.uri import is_remote
from raysharding.errors import CheckpointError

_STALL_S: Final = 8.0
"""pyarrow notices a stalled answer after 8 s at the earliest, whatever its deadline is."""


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
        self._is_joined = join
        with os_errors(f"cannot be {'opened' if join else 'made'}", path):
            self._descriptor = os.open(path, os.O_WRONLY | (0 if join else os.O_CREAT | os.O_EXCL), 0o666)

    @property
    def inode(self) -> tuple[int, int]:
        """Device and inode."""
        status = os.fstat(self._descriptor)
        return status.st_dev, status.st_ino

    def write(self, view: memoryview, offset: int, tensor: str | None) -> None:
        """Write bytes at an offset of the file, unbuffered. Thread-safe. An error names the tensor."""
        done = 0
        with os_errors("cannot be written", self._path, tensor):
            while done < view.nbytes:
                # One call writes at most 2 GiB and may return early; Python itself retries on EINTR.
                done += os.pwrite(self._descriptor, view[done:], offset + done)

    def finish(self) -> None:
        """Make the file visible to readers: the caller has written every byte. A process that joined only closes it."""
        try:
            if not self._is_joined:
                with os_errors("cannot be written", self._path):
                    os.fsync(self._descriptor)
        except CheckpointError:
            self.abort()
            raise
        os.close(self._descriptor)

    def abort(self) -> None:
        """Close the file and remove it."""
        os.close(self._descriptor)
        if not self._is_joined:
            os.unlink(self._path)


class RemoteOutput:
    """An object, of which a part is sent while the caller writes the next one; readers see it once finished.

    pyarrow's streams accept bytes in file order only, so bytes that are written early stay in memory until those before
    them arrive; `distributed.transfer` writes in order. Memory: the early bytes, and two parts.
    """

    def __init__(self, path: str, options: RemoteOptions = DEFAULT_REMOTE) -> None:
        self._path = path
        self._part_bytes = options.part_bytes
        # pyarrow retries parts (Note [Retries] in `requests.py`); this deadline covers all tries of one part.
        self._timeout_s = (options.request_s + _STALL_S) * options.num_tries
        self._storage = remote_storage(options)
        self._stream = self._storage.open_output(path)
        self._lock = threading.Lock()
        self._early: dict[int, bytes] = {}
        self._part = bytearray()
        self._next = 0
        self._sending: Future[Any] | None = None

    def write(self, view: memoryview, offset: int, tensor: str | None) -> None:
        """Write bytes at an offset of the object, which are sent in order. Thread-safe."""
        with self._lock:
            if offset != self._next:
                self._early[offset] = bytes(view)
                return
            self._append(view)
            while (data := self._early.pop(self._next, None)) is not None:
                self._append(memoryview(data))

    def finish(self) -> None:
        """Send the last part, and make the object visible to readers: the caller has written every byte."""
        assert not self._early, "every byte was written"
        self._send(partial(self._stream.write, self._part))
        self._send(self._stream.close)
        self._wait()

    def abort(self) -> None:
        """Close the stream, which cannot be discarded, and remove its object, which no index names."""
        with suppress(OSError, CheckpointError):  # the error that led to the abort is the one to report
            with suppress(CheckpointError):
                self._wait()
            if self._sending is None or self._sending.done():
                self._stream.close()
                self._storage.remove(self._path)

    def _append(self, view: memoryview) -> None:
        self._next += view.nbytes
        self._part += view
        if len(self._part) >= self._part_bytes:
            self._send(partial(self._stream.write, self._part))
            self._part = bytearray()

    def _send(self, send: Callable[[], Any]) -> None:
        self._wait()
        self._sending = in_thread(send)

    def _wait(self) -> None:
        """Wait until the part that is being sent has arrived. Once one has failed, every call raises its error."""
        try:
            if self._sending is not None:
                self._sending.result(self._timeout_s)
        except TimeoutError:
            what = f"cannot be written: the store took nothing for {self._timeout_s:g} s"
            raise CheckpointError(what, path=self._path) from None
        except (OSError, ValueError) as error:
            cure = "nothing was committed: check the store, its credentials and the network"
            raise CheckpointError(f"cannot be written: {first_line(error)}; {cure}", path=self._path) from error


Output = LocalOutput | RemoteOutput
"""A file that is being written."""
