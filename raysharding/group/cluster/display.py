"""Output for people: lines on stderr, tables as text and HTML."""

from __future__ import annotations

import html
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from raysharding.group.ranks import RankInfo
from raysharding.units import MIB

_MEMORY = ("host", "peak_host", "device", "peak_device")
_COLUMNS = ("rank", "node", "pid", "local_rank", "device")


def tell(line: str) -> None:
    """Write a line to stderr. Do not call it from a signal handler: the main thread may be writing to stderr."""
    sys.stderr.write(f"raysharding: {line}\n")
    sys.stderr.flush()


def _rows(ranks: Sequence[RankInfo]) -> list[tuple[str, ...]]:
    return [(str(one.rank), one.node_ip, str(one.pid), str(one.local_rank), one.device) for one in ranks]


def text_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Format rows of strings as an aligned table."""
    widths = [max(len(row[column]) for row in (header, *rows)) for column in range(len(header))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in (header, *rows)]
    return "\n".join(line.rstrip() for line in lines)


def html_rows(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Format rows of strings as an HTML table."""
    head = "".join(f"<th>{html.escape(name)}</th>" for name in header)
    body = "".join("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><tr>{head}</tr>{body}</table>"


def html_table(title: str, ranks: Sequence[RankInfo]) -> str:
    """Format the ranks as a small HTML table."""
    return f"<div><b>{html.escape(title)}</b>{html_rows(_COLUMNS, _rows(ranks))}</div>"


def ranks_table(ranks: Sequence[RankInfo]) -> str:
    """Format a table of where each rank runs."""
    return text_table(_COLUMNS, _rows(ranks))


def memory_table(statuses: Sequence[Mapping[str, Any]]) -> str:
    """Format a table of the ranks' memory in MiB, from their statuses; `?` for a rank that did not answer."""
    header = ("rank", *(f"{name.replace('_', ' ')} MiB" for name in _MEMORY))
    rows = [(str(one["rank"]), *(_mib(one.get(f"{name}_bytes")) for name in _MEMORY)) for one in statuses]
    return text_table(header, rows)


def _mib(num_bytes: Any) -> str:
    return "?" if num_bytes is None else f"{num_bytes / MIB:.1f}"
