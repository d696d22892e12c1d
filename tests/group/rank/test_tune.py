"""`examples/tune.py`: a sweep of Ray Tune whose trials own groups, on a cluster with room for one trial at a time."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from examples.tune import BUNDLES, Report, main
from tests.group.conftest import room_for

pytestmark = [pytest.mark.full, pytest.mark.usefixtures("nothing_left")]


@pytest.fixture(autouse=True)
def _room_for_one_trial(cluster: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TUNE_DISABLE_SIGINT_HANDLER", "1")  # Tune leaves its handler in this process
    with room_for(len(BUNDLES)):
        yield


def test_a_sweep_finds_the_better_learning_rate_and_stops_the_other_early(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One trial after the other, so that the second finds the first's losses, and the room that it had."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["tune.py", "--steps", "10", "--out", "results"])
    main()
    printed = capsys.readouterr().out
    trials = re.findall(r"^lr (\S+): loss (\S+) after (\d+) steps$", printed, re.MULTILINE)
    assert [(rate, int(steps)) for rate, _, steps in trials] == [("0.003", 10), ("3e-05", Report.every)]
    assert float(trials[0][1]) < float(trials[1][1]) - 0.5
    assert "best: lr 0.003\n" in printed


def test_a_sweep_without_a_report_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["tune.py", "--steps", str(Report.every - 1)])
    with pytest.raises(SystemExit):
        main()
    assert "a trial reports after every 5 steps" in capsys.readouterr().err
