"""The driver's progress bar: bytes and rate of a load, quiet where nobody looks."""

from __future__ import annotations

import sys
from collections.abc import Callable

from tqdm.auto import tqdm

from raysharding.group.call import Call

ProgressOption = bool | Callable[[int, int], None] | None
_REFRESH_S = 0.1


def follow(call: Call, title: str, option: ProgressOption) -> None:
    """Show a call's bytes until it ends, well or not.

    Args:
        call: A call whose bytes the supervision watches.
        title: Label of the bar.
        option: `True`: a bar; `False`: none; `None`: a bar in a terminal or notebook; a callable: it is given
            bytes done and bytes in all, about five times a second and once at the end.
    """
    if callable(option):
        _report(call, option)
        return
    shown = option if option is not None else sys.stderr.isatty() or "ipykernel" in sys.modules
    with tqdm(desc=title, unit="B", unit_scale=True, unit_divisor=1024, disable=not shown) as bar:
        while True:
            is_done = call.wait(_REFRESH_S)
            done, total = call.progress
            bar.total = total or None
            bar.update(done - bar.n)
            if is_done:
                return


def _report(call: Call, tell: Callable[[int, int], None]) -> None:
    told = (-1, -1)
    while True:
        is_done = call.wait(_REFRESH_S)
        if call.progress != told:
            told = call.progress
            tell(*told)
        if is_done:
            return
