"""Callbacks of `fit` with the trackers' own clients. `test_job_log.py` has Ray's gauges."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from raysharding import ShardedModelGroup
from raysharding.callbacks import MLflow, TensorBoard, Tracker, WeightsAndBiases
from tests.group.fit.runs import regression

pytestmark = pytest.mark.usefixtures("cluster")

DATA = {"input": torch.randn(6, 8, generator=torch.Generator().manual_seed(1)), "target": torch.zeros(6)}


@pytest.fixture
def group(fresh: ShardedModelGroup) -> ShardedModelGroup:
    return fresh


def losses_of(group: ShardedModelGroup, *callbacks: Any) -> list[float]:
    return list(group.fit(DATA, batch_size=2, loss=regression(), callbacks=callbacks).history["loss"])


def test_tensorboard(group: ShardedModelGroup, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    losses = losses_of(group, TensorBoard(tmp_path))
    log = EventAccumulator(str(tmp_path)).Reload()
    assert [event.value for event in log.Scalars("loss")] == pytest.approx(losses)
    assert [event.step for event in log.Scalars("rows_per_s")] == [1, 2, 3]


def test_a_tracker_of_accelerate(group: ShardedModelGroup, tmp_path: Path) -> None:
    """Started unless it is, given each step with its number and its evaluation, finished at the end."""
    pytest.importorskip("tensorboard")
    tracking = pytest.importorskip("accelerate.tracking")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    started = tracking.TensorBoardTracker("started", tmp_path)
    started.start()
    writer = started.writer
    trackers = [Tracker(tracking.TensorBoardTracker("fit", tmp_path)), Tracker(started)]
    report = group.fit(DATA, batch_size=2, loss=regression(), eval_data=DATA, eval_every=2, callbacks=trackers)
    assert started.writer is writer
    assert writer.file_writer is None, "closed"
    for name in ("fit", "started"):
        log = EventAccumulator(str(tmp_path / name)).Reload()
        assert [event.value for event in log.Scalars("loss")] == pytest.approx(report.history["loss"])
        assert {event.step: event.value for event in log.Scalars("eval_loss")} == {
            step: pytest.approx(values["eval_loss"]) for step, values in report.evaluations.items()
        }


def test_mlflow(group: ShardedModelGroup, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # the one local store that mlflow-skinny has
    mlflow.set_tracking_uri(tmp_path.as_uri())
    mlflow.set_experiment("fits")
    losses = losses_of(group, MLflow(run_name="fit"))
    run = mlflow.last_active_run()
    history = mlflow.MlflowClient().get_metric_history(run.info.run_id, "loss")
    assert [metric.value for metric in history] == pytest.approx(losses)
    assert run.info.status == "FINISHED"


def test_weights_and_biases(group: ShardedModelGroup, tmp_path: Path) -> None:
    wandb = pytest.importorskip("wandb")
    losses = losses_of(group, WeightsAndBiases(project="fit", mode="offline", dir=str(tmp_path)))
    assert wandb.run is None, "the run is over"
    assert list(tmp_path.rglob("*.wandb")), losses
