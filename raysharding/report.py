"""Reports for people: as text, and in notebooks as HTML, with a curve as SVG."""

from __future__ import annotations

import html
import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import NamedTuple

_MAX_POINTS = 500
_WIDTH, _HEIGHT, _MARGIN = 480, 140, 18


class Table(NamedTuple):
    """A table of a report."""

    header: Sequence[str]
    """Names of the columns; empty for rows of a name and a text."""
    rows: Sequence[Sequence[str]]
    """Cells of each row."""

    def __str__(self) -> str:
        if not self.header:
            return "\n".join(f"  {name:<10} {text}" for name, text in self.rows)
        every = (self.header, *self.rows)
        widths = [max(map(len, column)) for column in zip(*every, strict=True)]
        lines = ["  ".join(map(str.ljust, row, widths)) for row in every]
        return "\n".join(line.rstrip() for line in lines)

    def html(self) -> str:
        """Return the table as HTML."""
        head = "".join(f"<th>{html.escape(name)}</th>" for name in self.header)
        body = "".join("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in self.rows)
        return f"<table>{f'<tr>{head}</tr>' if head else ''}{body}</table>"


class Report(ABC):
    """Base of reports: a title with tables and lines below it, as text, and in notebooks as HTML."""

    @abstractmethod
    def _title(self) -> str: ...

    @abstractmethod
    def _parts(self) -> Iterable[Table | str]: ...

    def __repr__(self) -> str:
        return "\n".join(map(str, (self._title(), *self._parts())))

    def _repr_html_(self) -> str:
        return html_report(
            self._title(), *(part.html() if isinstance(part, Table) else html_line(part) for part in self._parts())
        )


def html_report(title: str, *parts: str) -> str:
    """Put a title above parts that are HTML."""
    return f"<div><b>{html.escape(title)}</b>{''.join(parts)}</div>"


def html_line(line: str) -> str:
    """Return a line of text as HTML."""
    return f"<div>{html.escape(line)}</div>"


def svg_curve(name: str, values: Sequence[float], first: int) -> str:
    """Draw values as a line of at most 500 points, with the range of both axes; empty for fewer than two points.

    Args:
        name: Name of the values.
        values: The values; those that are not finite are left out.
        first: Number of the first value on the x axis.
    """
    stride = math.ceil(len(values) / _MAX_POINTS) or 1
    chosen = range(len(values) - 1, -1, -stride)[::-1]  # with the last one
    points = [(index, values[index]) for index in chosen if math.isfinite(values[index])]
    if len(points) < 2:
        return ""
    low, high = min(value for _, value in points), max(value for _, value in points)
    across, up = _WIDTH / (len(values) - 1), (_HEIGHT - 2 * _MARGIN) / (high - low or 1.0)
    line = " ".join(f"{index * across:.1f},{_HEIGHT - _MARGIN - (value - low) * up:.1f}" for index, value in points)
    labels = (
        (0, _MARGIN - 5, "start", f"{name}, {low:.4g} to {high:.4g}"),
        (0, _HEIGHT - 4, "start", f"step {first}"),
        (_WIDTH, _HEIGHT - 4, "end", f"step {first + len(values) - 1}"),
    )
    texts = "".join(
        f'<text x="{x}" y="{y}" text-anchor="{anchor}" font-size="11" fill="currentColor">{html.escape(text)}</text>'
        for x, y, anchor, text in labels
    )
    curve = f'<polyline points="{line}" fill="none" stroke="#2a6f97" stroke-width="1.4"/>'
    return f'<svg width="{_WIDTH}" height="{_HEIGHT}" viewBox="0 0 {_WIDTH} {_HEIGHT}">{texts}{curve}</svg>'
