"""docs/pictures.py draws from what runs here: the ranks' counters during a load."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "docs" / "pictures.py"


@pytest.mark.full
@pytest.mark.usefixtures("nothing_left")
def test_pictures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = ["load", "--out", str(tmp_path), "--width", "64"]
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *options])
    runpy.run_path(str(SCRIPT), run_name="__main__")
    drawn = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert set(drawn) == {"load.png"}
    assert drawn["load.png"].startswith(b"\x89PNG")
