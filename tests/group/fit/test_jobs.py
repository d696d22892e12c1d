"""A run as a job: SIGTERM ends it with a save, the next one continues from there, and the log has lines."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import ray

from raysharding import FitReport, FitStep, ShardedModelGroup
from raysharding.checkpoint.format import MANIFEST_NAME
from raysharding.checkpoint.writing import create_staging
from raysharding.group import GroupState
from raysharding.group.calls import progress
from tests.conftest import make_group
from tests.group.fit.runs import ADAMW, fit

pytestmark = pytest.mark.usefixtures("nothing_left")

RUN: dict[str, Any] = {"epochs": 3, "shuffle": True}
NUM_STEPS = 24


def train(checkpoint: Path, data: Path, **options: Any) -> FitReport:
    with make_group(checkpoint, optimizer=ADAMW) as group:
        report: FitReport = fit(group, data, **RUN, **options)
    return report


class Ends:
    """Sends this process SIGTERM at a step, and keeps the losses."""

    def __init__(self, at: int) -> None:
        self.at = at
        self.losses: list[float] = []

    def __call__(self, step: FitStep) -> None:
        self.losses.append(step.metrics["loss"])
        if step.num_steps == self.at:
            os.kill(os.getpid(), signal.SIGTERM)


def test_sigterm_saves_and_latest_continues(
    fresh: ShardedModelGroup,
    checkpoint: Path,
    parquet: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("raysharding.group.fit.run._MAX_STEPS", 4)
    saves, ends = tmp_path / "saves", Ends(at=6)
    job: dict[str, Any] = {"save_to": saves, "save_every": 3, "resume": "latest", "save_on_signal": True}
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as ended:
        train(checkpoint, parquet, callbacks=[ends], **job)
    assert ended.value.code == 0
    assert signal.getsignal(signal.SIGTERM) == before
    done = len(ends.losses)
    assert 6 <= done < NUM_STEPS
    assert f"SIGTERM ended the run after step {done}" in capfd.readouterr().err
    assert sorted(os.listdir(saves), key=lambda name: int(name[5:]))[-1] == f"step-{done}"
    # A killed save leaves its staging directory, which is no save.
    torn = Path(create_staging(str(saves / f"step-{NUM_STEPS}"), overwrite=False))
    (torn / MANIFEST_NAME).write_text("{}")
    (torn / "model.safetensors").write_bytes(b"half")
    rest = train(checkpoint, parquet, **job)
    assert rest.first_step == done
    assert rest.num_steps == NUM_STEPS
    whole = fit(fresh, parquet, **RUN)
    assert [*ends.losses, *rest.history["loss"]] == pytest.approx(whole.history["loss"], abs=1e-6)


def test_latest_does_not_go_back_behind_what_the_group_holds(
    fresh: ShardedModelGroup, parquet: Path, tmp_path: Path
) -> None:
    fit(fresh, parquet, max_steps=5, **RUN, save_to=tmp_path)
    fit(fresh, parquet, max_steps=6, **RUN, resume=True)
    report = fit(fresh, parquet, max_steps=8, **RUN, resume="latest", save_to=tmp_path)
    assert report.first_step == 6


def test_what_a_job_needs_is_said(group: ShardedModelGroup, parquet: Path, tmp_path: Path) -> None:
    group.set_optimizer(ADAMW)
    with pytest.raises(ValueError, match=r"resume='newest': give True, False or 'latest'"):
        fit(group, parquet, resume="newest")
    with pytest.raises(ValueError, match="resume='latest', but nothing is saved: give a directory, save_to="):
        fit(group, parquet, resume="latest")
    with pytest.raises(ValueError, match="save_on_signal=True, but nothing is saved: give"):
        fit(group, parquet, save_on_signal=True)
    raised: list[str] = []

    def in_a_thread() -> None:
        try:
            fit(group, parquet, save_to=tmp_path, save_on_signal=True)
        except ValueError as error:
            raised.append(str(error))

    thread = threading.Thread(target=in_a_thread)
    thread.start()
    thread.join(60)
    assert "outside the main thread" in raised[0]
    assert group.state is GroupState.READY


def test_a_log_has_lines(
    checkpoint: Path, parquet: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A short run has its end alone, and `progress=False` nothing."""

    def lines() -> list[str]:
        return [line for line in capfd.readouterr().err.splitlines() if line.startswith("raysharding: ")]

    with make_group(checkpoint, optimizer=ADAMW) as group:
        fit(group, parquet, max_steps=2)
        load, ready, short = lines()
        assert load.startswith(f"raysharding: loading {checkpoint}: ")
        assert " of 848 B (100%), " in load
        assert ready.startswith("raysharding: group ")
        assert short.startswith("raysharding: fit: 2 of 2 steps (100%)")
        for name, value in (("_LINE_S", 0.0), ("_PART_S", 0.0)):
            monkeypatch.setattr(progress, name, value)
        monkeypatch.setattr("raysharding.group.fit.run._MAX_STEPS", 4)
        fit(group, parquet, **RUN, callbacks=[lambda step: time.sleep(0.001)])
    fits = [line for line in lines() if line.startswith("raysharding: fit: ")]
    assert len(fits) == NUM_STEPS
    assert fits[11].startswith("raysharding: fit: 12 of 24 steps (50%), loss ")
    assert fits[11].endswith(" left")
    assert "rows/s, " in fits[11]
    assert fits[-1].startswith("raysharding: fit: 24 of 24 steps (100%), loss ")
    with make_group(checkpoint, optimizer=ADAMW, progress=False) as group:
        fit(group, parquet, max_steps=2, progress=False)
    assert not lines()


def test_a_relative_output_in_a_directory_that_ray_removes_is_refused(
    group: ShardedModelGroup, parquet: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`ray job submit --working-dir` runs the driver in a copy of the directory, which Ray removes."""
    group.set_optimizer(ADAMW)
    copy = Path(ray._private.worker._global_node.get_session_dir_path(), "runtime_resources/working_dir_files/copy")
    copy.mkdir(parents=True)
    monkeypatch.chdir(copy)
    outputs: list[tuple[str, Callable[[str], Any]]] = [
        ("path", group.save),
        ("save_to", lambda out: fit(group, parquet, max_steps=1, save_to=out)),
        ("output", lambda out: group.predict(str(parquet), batch_size=4, output=out)),
    ]
    for name, write in outputs:
        with pytest.raises(ValueError, match=rf"{name}='out' is relative to .*: give an absolute path .*, or a URI"):
            write("out")
    assert not os.listdir(copy)
    group.save(f"file://{tmp_path}/saved")
    monkeypatch.chdir(tmp_path)
    group.save("relative")
    assert sorted(os.listdir(tmp_path)) == ["relative", "saved"]
