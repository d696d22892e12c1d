"""Callbacks of `fit` that log to trackers through the trackers' own clients, and to the metrics of Ray's dashboard."""

from __future__ import annotations

import os
import re
from typing import Any

from ray.util.metrics import Gauge

from raysharding.group.fit.report import FitStep


def figures(step: FitStep) -> dict[str, float]:
    """Return the values that are logged for a step: its metrics, its epoch, and the rates.

    Of a step that was skipped, only the metrics of an evaluation after it are.
    """
    rates = {"epoch": float(step.epoch), "rows_per_s": step.rows_per_s}
    if step.num_tokens:
        rates["tokens_per_s"] = step.tokens_per_s
    kept = {name: one for name, one in step.metrics.items() if not step.is_skipped or name.startswith("eval_")}
    return {**kept, **rates}


class RayGauges:
    """Gauges `raysharding_fit_<name>`, tagged with the group's name; Ray exports them and its dashboard can chart them.

    `fit` always adds its own `RayGauges`.
    """

    def __init__(self, group: str) -> None:
        """Create no gauge yet.

        Args:
            group: Value of the tag `group`.
        """
        self._tags = {"group": group}
        self._gauges: dict[str, Gauge] = {}

    def __call__(self, step: FitStep) -> None:
        """Set the gauges."""
        for name, value in {**figures(step), "step": float(step.num_steps)}.items():
            self.set(name, value)

    def set(self, name: str, value: float) -> None:
        """Set the gauge `raysharding_fit_<name>`."""
        if name not in self._gauges:
            described = f"{name} of a raysharding run, after its last step"
            exported = re.sub(r"\W", "_", name, flags=re.ASCII)  # the user names metrics of evaluations
            self._gauges[name] = Gauge(f"raysharding_fit_{exported}", described, tag_keys=("group",))
        self._gauges[name].set(value, tags=self._tags)


class Tracker:
    """Logs to a tracker of accelerate, such as `accelerate.tracking.CometMLTracker("project")`.

    The classes below do the same for three trackers without accelerate.
    """

    def __init__(self, tracker: Any) -> None:
        """Start the tracker, unless it is started.

        Args:
            tracker: An `accelerate.tracking.GeneralTracker`: its `log(values, step=...)` is called with each step, and
                its `finish()` at the end of the run.
        """
        self._tracker = tracker
        if getattr(tracker, "tracker", None) is None:  # trackers have one once they are started
            tracker.start()

    def __call__(self, step: FitStep) -> None:
        """Log a step."""
        self._tracker.log(figures(step), step=step.num_steps)

    def close(self) -> None:
        """End the tracker's run."""
        self._tracker.finish()


class TensorBoard:
    """Writes scalars for TensorBoard: `pip install 'raysharding[tensorboard]'`."""

    def __init__(self, log_dir: str | os.PathLike[str]) -> None:
        """Open the log.

        Args:
            log_dir: Directory of the log, on the driver.

        Raises:
            ImportError: tensorboard is not installed.
        """
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(os.fspath(log_dir))

    def __call__(self, step: FitStep) -> None:
        """Write a step."""
        for name, value in figures(step).items():
            self._writer.add_scalar(name, value, step.num_steps)

    def close(self) -> None:
        """Flush the log to disk and close it."""
        self._writer.close()


class WeightsAndBiases(Tracker):
    """Logs to Weights & Biases: `pip install 'raysharding[wandb]'`."""

    def __init__(self, **options: Any) -> None:
        """Begin a run.

        Args:
            **options: Arguments of `wandb.init`: `project=`, `name=`, `mode="offline"`, ...

        Raises:
            ImportError: wandb is not installed.
        """
        import wandb

        self._tracker = wandb.init(**options)


class MLflow:
    """Logs to MLflow: `pip install 'raysharding[mlflow]'`."""

    def __init__(self, **options: Any) -> None:
        """Begin a run on the tracking server that MLflow is configured for.

        Args:
            **options: Arguments of `mlflow.start_run`: `run_name=`, `experiment_id=`, ...

        Raises:
            ImportError: mlflow is not installed.
        """
        import mlflow

        self._mlflow: Any = mlflow
        self._run: Any = mlflow.start_run(**options)

    def __call__(self, step: FitStep) -> None:
        """Log a step."""
        self._mlflow.log_metrics(figures(step), step=step.num_steps, run_id=self._run.info.run_id)

    def close(self) -> None:
        """End the run."""
        self._mlflow.end_run()
