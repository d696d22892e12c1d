"""Screens: one picture that is drawn again and again, in a notebook's cell, on a terminal, or in a log."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from itertools import chain, repeat
from typing import Any

from tqdm import tqdm

from raysharding.group.cluster.display import tell
from raysharding.report import Report, Table


@dataclass(frozen=True, repr=False)
class Picture(Report):
    """Contents of a screen at one time."""

    title: str
    """First line, without its time."""
    time: str
    """Time of day of the picture."""
    lines: tuple[str, ...] = ()
    """Lines below the title."""
    table: Table | None = None
    """Table below the lines."""

    def _title(self) -> str:
        return f"{self.title} ({self.time})"

    def _parts(self) -> tuple[Table | str, ...]:
        return (*self.lines, self.table) if self.table and self.table.rows else self.lines


def open_screen(first: Picture) -> Screen:
    """Open a screen where this program's output is looked at, and draw its first picture.

    Call it in the thread that runs the notebook's cell: the picture is in the output of that cell.

    Args:
        first: The first picture.
    """
    screen: Screen
    if "ipykernel" in sys.modules:
        return _Cell(first)
    screen = _Terminal() if sys.stderr.isatty() else _Log()
    screen.draw(first)
    return screen


class _Cell:
    """The output of the notebook's cell that opened the screen."""

    def __init__(self, first: Picture) -> None:
        from IPython.display import display

        self._handle: Any = display(first, display_id=True)

    def draw(self, picture: Picture) -> None:
        self._handle.update(picture)

    close = draw


class _Terminal:
    """Lines of a terminal: bars of tqdm without the bar, which leave room for each other and for the bar of `fit`."""

    def __init__(self) -> None:
        self._bars: list[Any] = []

    def draw(self, picture: Picture) -> None:
        lines = str(picture).splitlines()
        while len(self._bars) < len(lines):
            # tqdm trims to the terminal's width; the padding erases a longer line of a bar that stood here.
            self._bars.append(tqdm(total=0, bar_format="{desc:<999}", dynamic_ncols=True, leave=False, file=sys.stderr))
        for bar, line in zip(self._bars, chain(lines, repeat("")), strict=False):
            bar.set_description_str(line)

    def close(self, picture: Picture) -> None:
        for bar in reversed(self._bars):
            bar.close()
        tqdm.write(str(picture), file=sys.stderr)


class _Log:
    """A file or pipe: a line when title or lines change. Times and tables would fill it."""

    _last = ""

    def draw(self, picture: Picture) -> None:
        line = ", ".join((picture.title, *picture.lines))
        if line != self._last:
            self._last = line
            tell(line)

    close = draw


Screen = _Cell | _Terminal | _Log
"""Shows one picture at a time: `draw` replaces the picture, `close` replaces it by one that stays. One thread draws."""
