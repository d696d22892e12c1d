"""`run.sh`, rehearsed on CPUs: every part passes, and what does not is in the record and in the status."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.gpu.record import Record, end
from tests.grid import needs_sim

SCRIPT = Path(__file__).with_name("run.sh")


def run(out: Path, **environment: str) -> tuple[int, dict[str, Any]]:
    """The script's status and record."""
    known = {name: value for name, value in os.environ.items() if name not in ("PARTS", "BUDGET", "COMMIT")}
    command = ["bash", str(SCRIPT), str(out)]
    done = subprocess.run(
        command, env={**known, "PYTHON": sys.executable, **environment}, capture_output=True, text=True, timeout=900
    )
    assert (out / "record.txt").exists(), done.stderr
    assert done.stdout == (out / "record.txt").read_text()
    return done.returncode, json.loads((out / "record.json").read_text())


def lines_of(record: dict[str, Any], outcome: str) -> list[str]:
    """Parts and checks of an outcome."""
    return [f"{line['part']}: {line['what']}" for line in record["lines"] if line["outcome"] == outcome]


@pytest.mark.timeout(1000)
@pytest.mark.parametrize(
    "device",
    [
        pytest.param("cpu", marks=pytest.mark.full),
        pytest.param(
            "cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")]
        ),
    ],
)
def test_all_parts_pass(device: str, tmp_path: Path) -> None:
    status, record = run(tmp_path, DEVICE=device, BUDGET="880")
    failed = [line for line in record["lines"] if line["outcome"] not in ("ok", "figure")]
    assert not failed
    assert status == 0
    parts = set(re.findall(r"\bpart ([\w-]+) \d+ ", SCRIPT.read_text(), re.MULTILINE))
    parts = {part for part in parts if not part.endswith("-8b")}
    told = {line["part"] for line in record["lines"] if line["what"].startswith("all of ")}
    assert told >= parts
    assert {"sanity", "groups", "lost-ranks", "ranks", "step", "load", "generate"} <= told
    assert "groups: W=4 HSDP, two replicas: train" in lines_of(record, "ok")
    assert any("ours ÷ hand" in line for line in lines_of(record, "figure"))
    assert record["head"]["torch"] == torch.__version__


@needs_sim
@pytest.mark.full
@pytest.mark.timeout(600)
def test_groups_pass_on_simulated_devices_that_their_ranks_share(tmp_path: Path) -> None:
    status, record = run(tmp_path, DEVICE="sim", PARTS="sanity groups lost-ranks ranks")
    assert [line for line in record["lines"] if line["outcome"] != "ok"] == []
    assert status == 0
    started = {line["what"]: line["figure"] for line in record["lines"] if line["what"].endswith(": starts")}
    assert started["W=4 group: starts"].startswith("rank 0 sim:0, rank 1 sim:0, ")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_part_that_fails_is_in_the_record_and_in_the_status(tmp_path: Path) -> None:
    status, record = run(tmp_path, DEVICE="cuda", PARTS="sanity")
    assert status == 1
    (line,) = record["lines"]
    assert (line["what"], line["outcome"]) == ("all of sanity", "FAILED")
    assert "torch sees no GPU here: set DEVICE=cpu" in line["figure"]


def test_a_part_that_has_no_time_left_is_said_to_be_not_reached(tmp_path: Path) -> None:
    status, record = run(tmp_path, DEVICE="cpu", PARTS="sanity", BUDGET="0")
    assert status == 1
    assert lines_of(record, "not reached") == ["sanity: all of sanity"]


def test_what_parts_leave_in_the_record(tmp_path: Path) -> None:
    """Killed, failed in a check, failed by its status: lines of their own, and one of the part."""

    def fail() -> None:
        raise ValueError("a\nb\nc\nd")

    killed = Record(tmp_path, "killed")
    killed.check("one", lambda: "equal")
    killed.line("two", "running")
    assert "running   killed: two" in (tmp_path / "record.txt").read_text()
    assert not end(tmp_path, "killed", 9.0, status=124)
    failed = Record(tmp_path, "failed")
    failed.check("one", fail)
    assert failed.failures == 1
    assert not end(tmp_path, "failed", 9.0, status=0)
    (tmp_path / "bench.txt").write_text("ours ÷ hand 1.02\narm ÷ hand\n")
    assert not end(tmp_path, "bench", 9.0, status=1)
    found = json.loads((tmp_path / "record.json").read_text())
    assert lines_of(found, "ok") == ["killed: one"]
    assert lines_of(found, "timed out") == ["killed: two", "killed: all of killed"]
    assert lines_of(found, "FAILED") == ["failed: one", "failed: all of failed", "bench: all of bench"]
    assert [line["figure"] for line in found["lines"] if line["what"] == "one"] == ["equal", "ValueError: a | ... | d"]
    assert lines_of(found, "figure") == ["bench: ours ÷ hand 1.02"]
