"""The driver's progress bars: bytes of a load, steps of a run; quiet where nobody looks."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Self

from tqdm.auto import tqdm

from raysharding.group.call import Call
from raysharding.group.fit_report import FitStep

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
    with tqdm(desc=title, unit="B", unit_scale=True, unit_divisor=1024, disable=not _is_shown(option)) as bar:

        def draw(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        _watch(call, num_bytes, draw)


class StepBar:
    """Steps of a run, with loss, rate and the time that is left."""

    def __init__(self, total: int | None, done: int, option: bool | None) -> None:
        """Show the bar.

        Args:
            total: Steps in all; `None` where nobody knows.
            done: Steps taken before.
            option: `True`: a bar; `False`: none; `None`: a bar in a terminal or notebook.
        """
        self._bar = tqdm(desc="fit", unit="step", total=total, initial=done, disable=not _is_shown(option))

    def step(self, step: FitStep) -> None:
        """Go on by a step."""
        rate = f"{step.tokens_per_s:,.0f} tokens/s" if step.num_tokens else f"{step.rows_per_s:,.1f} rows/s"
        self._bar.set_postfix_str(f"loss {step.metrics['loss']:.4g}, {rate}", refresh=False)
        self._bar.update(1)

    def go_back(self, done: int) -> None:
        """A restart has lost some steps."""
        self._bar.update(done - self._bar.n)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()


def _is_shown(option: bool | None) -> bool:
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
