"""How remote checkpoints are read: sizes, tries and deadlines."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class RemoteOptions:
    """How to read from an object store. The defaults end a read that cannot succeed within about 105 s.

    That is less than `Timeouts.load_stall_s`, so an error names the store rather than a stalled load.
    """

    part_bytes: int = 8 << 20
    """Most bytes of one ranged request. A connection that takes longer than `request_s` for this much is too slow."""
    max_in_flight: int = 8
    """Requests under way at once in this process, all readers together. Their answers take at most
    `max_in_flight * part_bytes` of memory, 64 MiB by default; abandoned requests keep theirs until they end."""
    num_tries: int = 5
    """How often a request is sent before its error counts. Only errors that may pass are tried again."""
    request_s: float = 20.0
    """Deadline of one request, from its sending to its last byte."""
    backoff_s: float = 0.2
    """Wait before the second try, doubled before each further one, with ±50 % of jitter."""
    max_backoff_s: float = 5.0
    """Longest wait between two tries, before jitter."""

    def __post_init__(self) -> None:
        for name in ("part_bytes", "max_in_flight", "num_tries"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise ValueError(f"{name}={value!r}: give a positive integer")
        for name in ("request_s", "backoff_s", "max_backoff_s"):
            value = getattr(self, name)
            if not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
                raise ValueError(f"{name}={value!r}: give a positive number of seconds; a deadline is finite")


DEFAULT_REMOTE = RemoteOptions()
