"""What kind of file system a path is on, as the kernel's mount table says."""

from __future__ import annotations

import os
import re
from typing import Final

_MOUNTS: Final = "/proc/self/mountinfo"
_ESCAPE: Final = re.compile(rb"\\([0-7]{3})")
_SCHEME: Final = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+)://")


def file_system_type(path: str) -> str:
    """Type of the file system that holds `path` for this process.

    Args:
        path: A local path, which need not exist, or a URI.

    Returns:
        `ext4`, `tmpfs`, `nfs4`, `overlay`, ...; of a URI its scheme, such as `s3`; `unknown` where the kernel has no
        mount table at hand.
    """
    scheme = _SCHEME.match(path)
    if scheme is not None:
        return scheme[1].lower()
    return _type_in(_read_mounts(), os.fsencode(os.path.realpath(path)))


def mount_points_below(path: str) -> list[str]:
    """Return the mount points at a local path and below it, bind mounts of the same file system with them.

    Args:
        path: A normal path without symlinks.
    """
    points = (os.fsdecode(_mount_point(line)) for line in _read_mounts().splitlines())
    found = {point for point in points if point == path or point.startswith(path.rstrip("/") + "/")}
    # The table may be out of sight; of another file system the number tells.
    return sorted(found | ({path} if os.path.ismount(path) else set()))


def _read_mounts() -> bytes:
    """Return the kernel's table of mounts that this process sees; empty where there is none at hand."""
    try:
        with open(_MOUNTS, "rb") as file:
            return file.read()
    except OSError:
        return b""


def _mount_point(line: bytes) -> bytes:
    return _ESCAPE.sub(lambda escape: bytes([int(escape[1], 8)]), line.split(b" ")[4])


def _type_in(mounts: bytes, path: bytes) -> str:
    """Find the mount point that is the longest prefix of `path`; of two on one point, the later hides the earlier."""
    longest, found = b"", "unknown"
    for line in mounts.splitlines():
        point, rest = _mount_point(line), line.partition(b" - ")[2]
        inside = path == point or path.startswith(point.rstrip(b"/") + b"/")
        if inside and len(point) >= len(longest):
            longest, found = point, os.fsdecode(rest.split(b" ")[0])
    return found
