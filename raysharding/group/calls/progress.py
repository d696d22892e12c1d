"""The driver's progress bars: bytes of a load, steps of a run; quiet where nobody looks."""

from __future__ import annotations

import sys
from collections.abc import Callable

from tqdm.auto import tqdm

from raysharding.group.calls.call import Call

ProgressOption = bool | Callable[[int, int], None] | None
_REFRESH_S = 0.1


def follow(call: Call, title: str, num_bytes: int, option: ProgressOption) -> None:
    """Show a call's bytes until it ends, well or not.

    Args:
        call: A call whose bytes the supervision watches.
        title: Label of the bar.
        num_bytes: Bytes in all, until the ranks have said it.
        option: `True`: a bar; `False`: none; `None`: a bar in a terminal or notebook; a callable: it is given
            bytes done and bytes in all, about five times a second and once at the end.
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
    """Return True if bars are drawn: where asked for, else on a terminal and in a notebook."""
    return option if option is not None else sys.stderr.isatty() or "ipykernel" in sys.modules


def _watch(call: Call, num_bytes: int, tell: Callable[[int, int], None]) -> None:
    told = None
    while True:
        is_done = call.wait(_REFRESH_S)
        done, total = call.progress
        total = total or num_bytes
        # The last question was asked before the last byte: a load that went well is whole.
        now = (total, total) if call.succeeded() else (done, total)
        if now != told:
            tell(*now)
            told = now
        if is_done:
            return
