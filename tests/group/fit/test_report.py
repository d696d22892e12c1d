"""What a fit leaves behind: a report when it ends early, too, which a notebook shows as a table and a curve."""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
from IPython.core.formatters import DisplayFormatter

from raysharding import FitReport

REPORT = FitReport(
    num_steps=2005,
    first_step=5,
    history={"loss": tuple(1 / number for number in range(1, 2001)), "lr": (0.5,) * 2000},
    num_rows=8000,
    num_tokens=0,
    seconds=4.0,
    wait_s=0.5,
    save_s=0.25,
    num_restarts=1,
    saved="/tmp/<saves>/step-2005",
)


def parsed(html: str) -> ElementTree.Element:
    """HTML that is well-formed, so that no text of a user's ends a tag."""
    return ElementTree.fromstring(html.replace("<br>", "<br/>"))


def points(html: str) -> list[tuple[float, float]]:
    (line,) = parsed(html).iter("polyline")
    x_and_y = (pair.split(",") for pair in line.attrib["points"].split())
    return [(float(x), float(y)) for x, y in x_and_y]


def test_a_cell_ends_with_a_table_and_a_curve() -> None:
    data, _ = DisplayFormatter().format(REPORT)
    shown = {row[0].text: row[1].text for row in parsed(data["text/html"]).iter("tr")}
    assert shown["steps"] == "2000, after step 5"
    assert shown["rate"] == "2,000.0 rows/s"
    assert shown["saved"] == "/tmp/<saves>/step-2005"
    assert shown["restarts"] == "1"
    drawn = points(data["text/html"])
    assert 400 <= len(drawn) <= 500
    assert drawn[-1][0] == 480, "with the last step"
    assert [y for _, y in drawn] == sorted(y for _, y in drawn), "a loss that falls goes down"
    assert len(data["text/plain"]) < 300
    assert len(data["text/html"]) < 10_000


@pytest.mark.parametrize("losses", [(), (1.0,), (math.nan, 2.0), (1.0, 1.0, 1.0), (math.nan, 3.0, math.inf, 2.0)])
def test_a_curve_of_few_or_odd_losses(losses: tuple[float, ...]) -> None:
    report = replace(REPORT, history={"loss": losses}, num_steps=5 + len(losses))
    finite = sum(map(math.isfinite, losses))
    html = report._repr_html_()
    assert "nan," not in html
    assert (len(points(html)) if "polyline" in html else 0) == (finite if finite > 1 else 0)


def test_the_plot_is_shown_where_it_is_made(tmp_path: Path) -> None:
    figure = REPORT.plot()
    data, _ = DisplayFormatter().format(figure)
    assert data["image/png"].startswith(b"\x89PNG")
    REPORT.plot(tmp_path / "curve.png")
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")


def test_a_plot_without_matplotlib_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"pip install 'raysharding\[plot\]'"):
        REPORT.plot()
