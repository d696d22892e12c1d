"""Binary units of bytes, and amounts of bytes as text."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")

KIB, MIB, GIB, TIB = 1 << 10, 1 << 20, 1 << 30, 1 << 40


def format_bytes(num_bytes: float | None) -> str:
    """Format bytes in the largest binary unit that leaves at least 1: `1.78 GiB`, `17 B`; `?` for `None`."""
    if num_bytes is None:
        return "?"
    for unit, size in (("TiB", TIB), ("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if abs(num_bytes) >= size:
            return f"{num_bytes / size:.2f} {unit}"
    return f"{num_bytes:.0f} B"


def split_by_bytes(items: Iterable[T], num_bytes: Callable[[T], int], max_bytes: int) -> Iterator[list[T]]:
    """Yield items in their order, in lists of up to `max_bytes`; a larger item is alone in its list."""
    part: list[T] = []
    size = 0
    for item in items:
        if part and size + num_bytes(item) > max_bytes:
            yield part
            part, size = [], 0
        part.append(item)
        size += num_bytes(item)
    if part:
        yield part
