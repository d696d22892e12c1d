"""The driver's progress bars: bytes of a load, steps of a run; no output without a terminal or notebook."""

from __future__ import annotations

import sys
from collections.abc import Callable

from tqdm.auto import tqdm

from raysharding.group.calls.call import Call

ProgressOption = bool | Callable[[int, int], None] | None
_REFRESH_S = 0.1


def follow(call: Call, title: str, num_bytes: int, option: ProgressOption) -> None:
    """Show a call's progress in bytes until the call ends, with or without an error.

    Args:
        call: A call whose bytes the supervision watches.
        title: Label of the bar.
        num_bytes: Bytes in total, used until the ranks report their own total.
        option: `True`: a bar; `False`: none; `None`: a bar in a terminal or notebook; a callable: it is called with
            the bytes done and the bytes in total, about five times a second and once at the end.
    """
    if callable(option):
        _watch(call, num_bytes, option)
        return
    with tqdm(desc=title, unit="B", unit_scale=True, unit_divisor=1024, disable=not is_shown(option)) as bar:

        def draw(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        _watch(call, num_bytes, draw)


def is_shown(option: bool | None) -> bool:
    """Return True if bars are drawn: as `option` says, by default on a terminal and in a notebook."""
    return option if option is not None else sys.stderr.isatty() or "ipykernel" in sys.modules


def _watch(call: Call, num_bytes: int, tell: Callable[[int, int], None]) -> None:
    reported = None
    while True:
        is_done = call.wait(_REFRESH_S)
        done, total = call.progress
        total = total or num_bytes
        # The ranks were last probed before the last byte: a load that succeeded is complete.
        now = (total, total) if call.succeeded() else (done, total)
        if now != reported:
            tell(*now)
            reported = now
        if is_done:
            return
