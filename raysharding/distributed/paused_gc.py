"""No garbage collection during a load: its plan makes many objects that stay, and none in cycles."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def paused_gc() -> Iterator[None]:
    """Pause Python's cyclic collector, which reference counting does not need.

    It walks all objects of the process again and again as they become more: of a load of 20,000 tensors that was most
    of the time.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
