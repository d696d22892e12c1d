"""Output for people: lines on stderr, tables as text and HTML."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from raysharding.group.ranks import RankInfo
from raysharding.report import Table, html_line, html_report
from raysharding.units import MIB

_MEMORY = ("host_bytes", "peak_host_bytes", "device_bytes", "peak_device_bytes")


def tell(line: str) -> None:
    """Write a line to stderr. Do not call it from a signal handler: the main thread may be writing to stderr."""
    sys.stderr.write(f"raysharding: {line}\n")
    sys.stderr.flush()


def warn(message: str) -> None:
    """Issue a UserWarning at the line of the program that called this library, through whatever decorators."""
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and frame.f_globals["__name__"].startswith("raysharding."):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, UserWarning, stacklevel=level)


def ranks_table(ranks: Sequence[RankInfo]) -> Table:
    """Return a table of where each rank runs."""
    rows = [(str(one.rank), one.node_ip, str(one.pid), str(one.local_rank), one.device) for one in ranks]
    return Table(("rank", "node", "pid", "local_rank", "device"), rows)


def memory_table(statuses: Sequence[Mapping[str, Any]]) -> str:
    """Format a table of the ranks' memory in MiB, from their statuses; `?` for a rank that did not answer.

    A line for each GPU that several ranks share gives what they hold together.
    """
    gpus: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for one in statuses:
        if one.get("device", "cpu") != "cpu":
            gpus.setdefault((one["node_ip"], one["device"]), []).append(one)
    shared = [
        f"{device} of {node_ip} is shared by ranks {', '.join(str(one['rank']) for one in those)}: "
        f"{sum(one['device_bytes'] for one in those) / MIB:.1f} MiB together"
        for (node_ip, device), those in gpus.items()
        if len(those) > 1
    ]
    return "\n".join([str(status_table(("rank", *_MEMORY), statuses)), *shared])


def status_table(columns: Sequence[str], statuses: Sequence[Mapping[str, Any]]) -> Table:
    """Return a table of the ranks' statuses, memory in MiB; `?` for what a rank did not answer.

    Args:
        columns: Items of the statuses. A phase also shows how much of its bytes is done.
        statuses: Result of `rank_statuses`.
    """
    header = tuple(name.replace("_bytes", " MiB").replace("_", " ") for name in columns)
    return Table(header, [tuple(_cell(name, one) for name in columns) for one in statuses])


class StatusReport(dict[str, Any]):
    """Result of `ShardedModelGroup.status`: a dict, which a notebook shows as a table."""

    def _repr_html_(self) -> str:
        ranks = self["ranks"]
        table = status_table(("rank", "node_ip", "pid", "phase", *_MEMORY, "answers"), ranks)
        cause = [] if self["cause"] is None else map(html_line, self["cause"].splitlines())
        return html_report(f"{self['name']}: {self['state']}", *([table.html()] if ranks else []), *cause)


def _cell(column: str, status: Mapping[str, Any]) -> str:
    value = status.get(column)
    if value is None:
        return "?"
    if column.endswith("_bytes"):
        return f"{value / MIB:.1f}"
    done, total = status.get("bytes_done", 0), status.get("bytes_total", 0)
    return f"{value} {done / total:.0%}" if column == "phase" and done < total else str(value)
