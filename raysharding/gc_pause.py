"""`paused_gc`: Python's cyclic garbage collector, paused while many objects are made that stay."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def paused_gc() -> Iterator[None]:
    """Pause the cyclic garbage collector, also of the other threads of the process.

    It traverses all objects of the process repeatedly as their number grows: most of the time of a load of 20,000
    tensors, and a quarter of that of importing torch and transformers.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
