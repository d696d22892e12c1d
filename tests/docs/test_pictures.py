"""docs/pictures.py draws from what runs here: the ranks' counters during a load, and a fit's curve."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "docs" / "pictures.py"


@pytest.mark.full
@pytest.mark.usefixtures("nothing_left")
def test_pictures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = ["load", "curve", "--out", str(tmp_path), "--width", "64", "--steps", "5"]
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *options])
    runpy.run_path(str(SCRIPT), run_name="__main__")
    drawn = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert set(drawn) == {"load.png", "curve.png"}
    assert all(picture.startswith(b"\x89PNG") for picture in drawn.values())
