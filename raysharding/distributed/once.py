"""`warn_once`: what a user should hear, and not at every call."""

from __future__ import annotations

import warnings

_warned: set[str] = set()


def warn_once(message: str) -> None:
    """Give a UserWarning, the first time only that this process has this message."""
    if message not in _warned:
        _warned.add(message)
        warnings.warn(message, UserWarning, stacklevel=4)
