"""Names of staging directories, and how other processes see that the writer of one is alive.

Note [Liveness]: the process that creates a staging directory holds a lock (`flock`) on it until the directory is
committed or removed; the kernel releases the lock when the process ends, however it ends. Other hosts may not see such
a lock, so the name says through which kernel and which mount of the file system the lock was taken. There, a directory
that no process has locked is abandoned. Elsewhere, and where directories cannot be locked, its age decides.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import re
import secrets
import time
from contextlib import suppress
from typing import Final

_NAME: Final = re.compile(r"\.(.+)\.tmp-[0-9a-f]{12}([0-9a-f]{8})?")
_BOOT_ID: Final = "/proc/sys/kernel/random/boot_id"
_ABANDONED_S: Final = 3600.0
"""Age at which a directory counts as abandoned where no lock decides."""
_locks: Final[dict[str, int]] = {}
"""Path → descriptor of each directory that this process has locked."""


def new_token() -> str:
    """Return a random part of a name, which distinguishes two saves to one destination."""
    return secrets.token_hex(6)


def staging_path(final: str | os.PathLike[str], token: str) -> str:
    """Return the absolute path of a temporary sibling of `final`, on the same file system, so that a rename commits it.

    Args:
        final: The destination. Where it is a symlink, the staging directory is beside its target.
        token: From `new_token`; the same on all ranks.
    """
    parent, name = os.path.split(os.path.realpath(final))
    return os.path.join(parent, staging_name(name, token) + _lock_domain(parent))


def renamed_staging(staging: str, token: str) -> str:
    """Return another path beside a staging directory, even if its destination is another symlink by now."""
    parent, name = os.path.split(staging)
    return os.path.join(parent, staging_name(staged_name(name) or name, token) + _lock_domain(parent))


def staging_name(name: str, token: str) -> str:
    """Return the beginning of the name of a staging directory for a destination of this name."""
    return f".{name}.tmp-{token}"


def staged_name(name: str) -> str | None:
    """Return the name of a staging directory's destination; `None` where `name` is not that of a staging directory."""
    match = _NAME.fullmatch(name)
    return None if match is None else match[1]


def find_set_aside(final: str) -> str | None:
    """Return the previous checkpoint that a save to `final` renamed before it was killed, if there is one."""
    parent, name = os.path.split(os.path.realpath(final))
    pattern = re.compile(re.escape(f".{name}.old-") + "[0-9a-f]+")
    try:
        names = sorted(os.listdir(parent))
    except OSError:
        return None  # the parent directory is missing
    return next((os.path.join(parent, found) for found in names if pattern.fullmatch(found)), None)


def make_staging(final: str, token: str) -> str:
    """Make the staging directory of a destination, lock it, and return its path.

    Raises:
        OSError: The directory exists already, or cannot be created.
    """
    path = staging_path(final, token)
    if os.path.lexists(path):
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)
    # Locked before it gets the name that promises a lock, so it never looks abandoned.
    unlocked = path.removesuffix(_lock_domain(os.path.dirname(path)))
    os.mkdir(unlocked)
    lock(unlocked)
    os.rename(unlocked, path)
    _locks[path] = _locks.pop(unlocked)
    return path


def lock(directory: str) -> None:
    """Lock a directory until `unlock` or the end of this process, where the file system has locks."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    with suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    _locks[directory] = descriptor


def unlock(directory: str) -> None:
    """Release a lock; one that is not held is not an error."""
    descriptor = _locks.pop(directory, None)
    if descriptor is not None:
        os.close(descriptor)


def is_abandoned(path: str) -> bool:
    """Return True if no process writes to a staging directory any more (Note [Liveness])."""
    match = _NAME.fullmatch(os.path.basename(path))
    if match is None or os.path.islink(path) or not os.path.isdir(path):
        return False
    if match[2] is not None and match[2] == _lock_domain(os.path.dirname(path)):
        is_locked = _is_locked(path)
        if is_locked is not None:
            return not is_locked
    return _last_change(path) < time.time() - _ABANDONED_S


def _is_locked(directory: str) -> bool | None:
    """Return True if a process has locked a directory; `None` where that is unknown."""
    try:
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return None
    finally:
        os.close(descriptor)
    return False


def _lock_domain(parent: str) -> str:
    """Return 8 hex digits for this kernel and the mount that holds `parent`; empty where these are unknown."""
    try:
        with open(_BOOT_ID, "rb") as file:
            kernel = file.read()
        device = os.stat(parent).st_dev
    except OSError:
        return ""
    return hashlib.sha256(b"%d %s" % (device, kernel)).hexdigest()[:8]


def _last_change(directory: str) -> float:
    """Return the time of the latest change in a directory; now, where that is unknown."""
    try:
        times = [os.stat(directory).st_mtime]
        for place, folders, files in os.walk(directory):
            times += [os.lstat(os.path.join(place, name)).st_mtime for name in (*folders, *files)]
    except OSError:  # an entry disappeared meanwhile: a process is at work in the directory
        return time.time()
    return max(times)
