"""Renames that others see at once, and that outlast a loss of power."""

from __future__ import annotations

import ctypes
import errno
import os
from typing import Final

_AT_FDCWD: Final = -100
_RENAME_EXCHANGE: Final = 2
_NO_EXCHANGE: Final = (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP)


def exchange(first: str, second: str) -> bool:
    """Swap two directories in one step, and return True, where kernel, C library and file system can; else False.

    Raises:
        OSError: The kernel refused.
    """
    try:
        renameat2 = ctypes.CDLL(None, use_errno=True).renameat2
    except AttributeError:
        return False
    paths = os.fsencode(first), os.fsencode(second)
    if renameat2(_AT_FDCWD, paths[0], _AT_FDCWD, paths[1], ctypes.c_uint(_RENAME_EXCHANGE)) == 0:
        return True
    code = ctypes.get_errno()
    if code in _NO_EXCHANGE:
        return False
    raise OSError(code, os.strerror(code), first, None, second)


def sync_directory(path: str) -> None:
    """Put a directory's entries on the disk, without which a rename may be lost with the power."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:  # a file system that has no fsync of directories, such as some FUSE ones
            raise
    finally:
        os.close(descriptor)
