"""`thread_state_restored`: cleanup of state that user code may leave behind in the thread that runs all commands."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def thread_state_restored() -> Iterator[None]:
    """Undo changes on exit that would affect how later code computes or where it finds files. No collective.

    The context restores the default dtype and device, the grad, inference and autocast modes, and the working
    directory: settings that have context managers for the duration of some code. Settings that are meant for the whole
    process stay.
    """
    dtype, caches = torch.get_default_dtype(), torch.is_autocast_cache_enabled()
    accelerator = torch.accelerator.current_accelerator()
    devices = ("cpu",) if accelerator is None else ("cpu", accelerator.type)
    casts = {device: torch.get_autocast_dtype(device) for device in devices}
    directory = os.open(".", os.O_PATH)  # it may be removed or renamed meanwhile
    try:
        # On exit, `inference_mode` restores the grad, inference and autocast modes, however the body changed them.
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
    """Leave every `torch.autocast` that is still entered: torch reuses cast weights until the outermost one ends."""
    torch.autocast_increment_nesting()
    while torch.autocast_decrement_nesting() > 0:
        pass
    torch.clear_autocast_cache()
