"""Binary units of bytes, and amounts of bytes as text."""

from __future__ import annotations

KIB, MIB, GIB, TIB = 1 << 10, 1 << 20, 1 << 30, 1 << 40


def format_bytes(num_bytes: float | None) -> str:
    """Format bytes in the largest binary unit that leaves at least 1: `1.78 GiB`, `17 B`; `?` for `None`."""
    if num_bytes is None:
        return "?"
    for unit, size in (("TiB", TIB), ("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if abs(num_bytes) >= size:
            return f"{num_bytes / size:.2f} {unit}"
    return f"{num_bytes:.0f} B"
