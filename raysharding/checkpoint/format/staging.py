"""Names of staging directories, and how others see whether the process that writes to one lives.

Note [Liveness]: who makes a staging directory holds a lock (`flock`) on it until it is committed or removed; the kernel
lets go of the lock when the process ends, however it ends. Such a lock may not be seen from other hosts, so the name
says which kernel, and which mount of the file system, the lock was taken through. There a directory that nobody has
locked is abandoned. Elsewhere, and where directories cannot be locked, age must tell.
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
"""Age at which a directory is taken for abandoned where no lock tells."""
_locks: Final[dict[str, int]] = {}
"""Path → descriptor of the directory that this process has locked."""


def new_token() -> str:
    """Return a random name part that keeps two saves to one destination apart."""
    return secrets.token_hex(6)


def staging_path(final: str | os.PathLike[str], token: str) -> str:
    """Return the absolute path of a temporary sibling of `final`: the same file system, so that a rename can commit it.

    Args:
        final: The destination. Where it is a symlink, the staging directory is beside its target.
        token: What `new_token` gave; the same on all ranks.
    """
    parent, name = os.path.split(os.path.realpath(final))
    return os.path.join(parent, staging_name(name, token) + _lock_domain(parent))


def renamed_staging(staging: str, token: str) -> str:
    """Return another path for a staging directory, beside it, whatever its destination may link to by now."""
    parent, name = os.path.split(staging)
    return os.path.join(parent, staging_name(staged_name(name) or name, token) + _lock_domain(parent))


def staging_name(name: str, token: str) -> str:
    """Return what the name of a staging directory for a destination of this name begins with."""
    return f".{name}.tmp-{token}"


def is_staging_path(path: str) -> bool:
    """Return True if `path` is named as an uncommitted staging directory is."""
    return staged_name(os.path.basename(path)) is not None


def staged_name(name: str) -> str | None:
    """Return the name of the destination that a staging directory is for; `None` where it is named as none."""
    match = _NAME.fullmatch(name)
    return None if match is None else match[1]


def find_set_aside(final: str) -> str | None:
    """Return the previous checkpoint that a save to `final` set aside and did not live to replace, if there is one."""
    parent, name = os.path.split(os.path.realpath(final))
    pattern = re.compile(re.escape(f".{name}.old-") + "[0-9a-f]+")
    try:
        names = sorted(os.listdir(parent))
    except OSError:
        return None  # no parent directory: then nothing was set aside in it
    return next((os.path.join(parent, found) for found in names if pattern.fullmatch(found)), None)


def make_staging(final: str, token: str) -> str:
    """Make the staging directory of a destination, lock it, and return its path.

    Raises:
        OSError: It is there already, or cannot be made.
    """
    path = staging_path(final, token)
    if os.path.lexists(path):
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)
    # Under the name that says where its lock can be seen it is locked from the first moment on.
    unlocked = path.removesuffix(_lock_domain(os.path.dirname(path)))
    os.mkdir(unlocked)
    lock(unlocked)
    os.rename(unlocked, path)
    _locks[path] = _locks.pop(unlocked)
    return path


def lock(directory: str) -> None:
    """Lock a directory for as long as this process lives, or until `unlock`, where its file system has locks."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    with suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    _locks[directory] = descriptor


def unlock(directory: str) -> None:
    """Let go of a lock; one that is not held is fine."""
    descriptor = _locks.pop(directory, None)
    if descriptor is not None:
        os.close(descriptor)


def is_abandoned(path: str) -> bool:
    """Return True if nobody writes to a staging directory any more. See Note [Liveness]."""
    match = _NAME.fullmatch(os.path.basename(path))
    if match is None or os.path.islink(path) or not os.path.isdir(path):
        return False
    if match[2] is not None and match[2] == _lock_domain(os.path.dirname(path)):
        is_locked = _is_locked(path)
        if is_locked is not None:
            return not is_locked
    return _last_change(path) < time.time() - _ABANDONED_S


def _is_locked(directory: str) -> bool | None:
    """Return True if a process has locked a directory; `None` where that cannot be told."""
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
    """Return 8 hex digits for this kernel and the mount that holds `parent`; empty where they cannot be told."""
    try:
        with open(_BOOT_ID, "rb") as file:
            kernel = file.read()
        device = os.stat(parent).st_dev
    except OSError:
        return ""
    return hashlib.sha256(b"%d %s" % (device, kernel)).hexdigest()[:8]


def _last_change(directory: str) -> float:
    """Return the latest time at which anything in a directory changed; now, where that cannot be told."""
    try:
        times = [os.stat(directory).st_mtime]
        for place, folders, files in os.walk(directory):
            times += [os.lstat(os.path.join(place, name)).st_mtime for name in (*folders, *files)]
    except OSError:  # it goes away meanwhile: somebody is at work in it
        return time.time()
    return max(times)
