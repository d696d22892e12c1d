"""What a notebook shows where a cell ends with a report; that of `fit` is in `fit/test_report.py`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from IPython.core.formatters import DisplayFormatter

from raysharding import ShardedModelGroup
from raysharding.group.launch import RestartReport
from tests.group.fit.test_report import parsed


def cells(report: Any) -> tuple[str | None, list[list[str | None]]]:
    """Title, and rows of all tables."""
    data, _ = DisplayFormatter().format(report)
    shown: ElementTree.Element = parsed(data["text/html"])
    return shown[0].text, [[cell.text for cell in row] for row in shown.iter("tr")]


def test_load_and_save(group: ShardedModelGroup, tmp_path: Path) -> None:
    report = group.load_report
    title, rows = cells(report)
    assert title == str(report).partition("\n")[0]
    assert [f"  {name:<10} {text}" for name, text in rows] == str(report).splitlines()[1:]
    saved = group.save(tmp_path / "a<b")
    title, rows = cells(saved)
    assert title == f"saved 4 tensors, 848 B, in 1 files to {tmp_path / 'a<b'}"
    assert [name for name, _ in rows] == ["time", "sent", "memory"]


def test_preflight(group: ShardedModelGroup) -> None:
    report = group.preflight_report
    assert report is not None
    title, rows = cells(report)
    assert title == "preflight"
    assert [row[0] for row in rows] == ["node", *(node.node_ip for node in report.nodes)]
    assert "link: all-reduce" in report._repr_html_()
    assert [line.split()[0] for line in str(report).splitlines()[:2]] == ["preflight", "node"]


def test_start(group: ShardedModelGroup) -> None:
    report = group.start_report
    title, rows = cells(report)
    assert title == str(report).partition("\n")[0] == f"ready after {report.seconds:.2f} s"
    assert [row[0] for row in rows] == ["phase", *(phase.name for phase in report.phases)]


def test_restart() -> None:
    report = RestartReport("rank <1> died", "/a", 2, 1.5)
    assert cells(report) == (
        "restarted",
        [["why", "rank <1> died"], ["checkpoint", "/a"], ["ranks", "2"], ["time", "1.50 s"]],
    )


def test_status_is_a_dict_and_a_table(group: ShardedModelGroup) -> None:
    status = group.status()
    title, rows = cells(status)
    assert title == f"{group.name}: ready"
    assert [row[:3] for row in rows[1:]] == [[str(one.rank), one.node_ip, str(one.pid)] for one in group.ranks]
    assert rows[1][rows[0].index("phase")] == "ready"
    plain = {key: status[key] for key in ("name", "state", "cause", "ranks")}
    assert status == plain
    assert json.loads(json.dumps(status)) == json.loads(json.dumps(plain))
