"""`thread_state_restored`: what code of the user's may leave behind in the thread that runs all commands."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_AUTOCAST_DEVICES = ("cpu", "cuda")


@contextmanager
def thread_state_restored() -> Iterator[None]:
    """Undo at the end what changes how later code computes or where it finds files; each rank alone.

    Put back are the default dtype and device, grad, inference and autocast mode, and the working directory: what has a
    context manager that ends with the code which needs it. What is set for a whole process, on purpose, stays.
    """
    dtype, caches = torch.get_default_dtype(), torch.is_autocast_cache_enabled()
    casts = {device: torch.get_autocast_dtype(device) for device in _AUTOCAST_DEVICES}
    directory = os.open(".", os.O_PATH)  # it may be removed or renamed meanwhile
    try:
        # Leaving it puts grad, inference and autocast mode back to what they were, however they were changed inside.
        with torch.inference_mode(False):
            yield
    finally:
        os.fchdir(directory)
        os.close(directory)
        torch.set_default_dtype(dtype)
        torch.set_default_device(None)
        for device, cast in casts.items():
            torch.set_autocast_dtype(device, cast)
        torch.set_autocast_cache_enabled(caches)
        _end_autocast()


def _end_autocast() -> None:
    """Leave every `torch.autocast` that was entered: until the outermost ends, weights cast inside are used again."""
    torch.autocast_increment_nesting()
    while torch.autocast_decrement_nesting() > 0:
        pass
    torch.clear_autocast_cache()
