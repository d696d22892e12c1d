"""`InputFile`: a stored file as Python's, which pyarrow reads as `pyarrow.PythonFile`."""

from __future__ import annotations

import io
import os
from typing import Any

from raysharding.checkpoint.storage.interface import StoredFile


class InputFile(io.RawIOBase):
    """A file whose reads are those of a `StoredFile`. A read ends at the end of the file."""

    def __init__(self, file: StoredFile) -> None:
        """Stand at the first byte."""
        super().__init__()
        self._file = file
        self._num_bytes = file.found.num_bytes
        self._next = 0

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True

    def tell(self) -> int:
        """Return the offset of the next read."""
        return self._next

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Set the offset of the next read, and return it."""
        self._next = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._next, os.SEEK_END: self._num_bytes}[whence]
        return self._next

    def readinto(self, memory: Any) -> int:
        """Fill memory, and return the number of bytes."""
        view = memoryview(memory)[: max(0, self._num_bytes - self._next)]
        if view.nbytes:
            self._next += self._file.fill(self._next, (view,))
        return view.nbytes
