"""Results of a run over data: `FitStep` for the callbacks, `FitReport` for the caller."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from io import BytesIO
from typing import TYPE_CHECKING, Any

from raysharding.report import Table, html_report, svg_curve

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_DPI = 130


@dataclass(frozen=True)
class FitStep:
    """One step of a run, for callbacks."""

    num_steps: int
    """Number of steps of the whole run so far, including this one."""
    epoch: int
    """Number of epochs that were complete when the step was taken."""
    metrics: Mapping[str, float]
    """`loss`, `grad_norm`, and `lr` if there is a schedule; after a step that is followed by an evaluation also
    `eval_loss` and `eval_<metric>`."""
    num_rows: int
    """Rows of the step, over all ranks."""
    num_tokens: int
    """Elements of the step's `input_ids`, 0 without `input_ids`."""
    rows_per_s: float
    """Rows per second, over the steps since the last report to the driver."""
    tokens_per_s: float
    """Tokens per second, over the same steps."""
    is_skipped: bool = False
    """True if nothing in the batch counted, so that no update was taken: `loss` and `grad_norm` are NaN."""

    def __str__(self) -> str:
        rate = f"{self.tokens_per_s:,.0f} tokens/s" if self.num_tokens else f"{self.rows_per_s:,.1f} rows/s"
        return f"step {self.num_steps}, epoch {self.epoch}, loss {self.metrics['loss']:.4g}, {rate}"


@dataclass(frozen=True)
class BestSave:
    """The save of a run's best evaluation."""

    path: str
    """Path of the save."""
    step: int
    """Number of steps of the run at that evaluation."""
    value: float
    """Value of the metric that `keep_best` names."""


@dataclass(frozen=True)
class FitReport:
    """Report of one run. `str(report)` is for people, `as_dict()` for programs; `plot` draws the metrics."""

    num_steps: int
    """Number of steps of the whole run, including those before a resume."""
    first_step: int
    """Number of steps that had been taken when `fit` was called."""
    history: Mapping[str, tuple[float, ...]]
    """Metric → its value after each step that `fit` took; NaN for skipped steps, and for steps that a restart kept but
    that had not been reported to the driver."""
    num_rows: int
    """Rows trained on in this `fit`; rows of steps that a restart repeated count again."""
    num_tokens: int
    """Elements of `input_ids`, counted in the same way."""
    seconds: float
    """Time that `fit` took."""
    wait_s: float
    """Seconds that ranks waited for data: per report to the driver the longest wait of a rank, summed."""
    save_s: float
    """Seconds that saves took."""
    num_restarts: int
    """Number of restarts of the group, including restarts that failed because another rank was lost."""
    saved: str | None
    """Path of the last save; `None` without saves."""
    skipped: tuple[int, ...] = ()
    """Numbers of the steps whose batch had nothing that counts, so that no update was taken."""
    evaluations: Mapping[int, Mapping[str, float]] = field(default_factory=dict)
    """Number of steps → `eval_loss` and `eval_<metric>`, for each evaluation that `fit` made."""
    best: BestSave | None = None
    """The save with the best evaluation of the whole run; `None` without `keep_best`."""
    stopped: str | None = None
    """Why the run ended before its last step; `None` if it did not."""
    earlier_loss: float | None = None
    """Loss of the last step before this `fit`, if it resumed a run."""

    @property
    def loss(self) -> float:
        """Loss of the last step of the run that was not skipped, which may be one before a resume; NaN without any."""
        skipped = set(self.skipped)
        losses = list(enumerate(self.history.get("loss", ()), self.first_step + 1))
        earlier = math.nan if self.earlier_loss is None else self.earlier_loss
        return next((loss for number, loss in reversed(losses) if number not in skipped), earlier)

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second of the time that `fit` took."""
        return self.num_tokens / self.seconds if self.seconds > 0 else 0.0

    @property
    def rows_per_s(self) -> float:
        """Rows per second of the time that `fit` took."""
        return self.num_rows / self.seconds if self.seconds > 0 else 0.0

    def as_dict(self) -> dict[str, Any]:
        """Return all fields and rates, ready for JSON."""
        return asdict(self) | {"tokens_per_s": self.tokens_per_s, "rows_per_s": self.rows_per_s}

    def then(self, later: FitReport) -> FitReport:
        """Join this report and that of the run that resumed it, for one curve.

        Args:
            later: Report of the run that resumed this one.

        Raises:
            ValueError: `later` does not begin where this run ends.
        """
        if later.first_step != self.num_steps:
            raise ValueError(
                f"this run ends with step {self.num_steps}, but the later one continues after step {later.first_step}: "
                "give the report of the run that resumed this one"
            )
        added = later.history or dict.fromkeys(self.history, ())  # `later` may have taken no step
        names = [name for name in self.history if name in added]
        return replace(
            later,
            first_step=self.first_step,
            history={name: (*self.history[name], *added[name]) for name in names},
            num_rows=self.num_rows + later.num_rows,
            num_tokens=self.num_tokens + later.num_tokens,
            seconds=self.seconds + later.seconds,
            wait_s=self.wait_s + later.wait_s,
            save_s=self.save_s + later.save_s,
            num_restarts=self.num_restarts + later.num_restarts,
            saved=later.saved or self.saved,
            skipped=(*self.skipped, *later.skipped),
            evaluations={**self.evaluations, **later.evaluations},
            best=later.best or self.best,
            earlier_loss=self.earlier_loss,
        )

    def plot(self, path: str | os.PathLike[str] | None = None) -> Figure:
        """Draw loss, gradient norm and learning rate over the steps.

        Args:
            path: PNG file to write; an existing file is replaced. Default: no file.

        Returns:
            The figure, which a notebook shows.

        Raises:
            ImportError: matplotlib is not installed: `pip install 'raysharding[plot]'`.
        """
        try:
            from matplotlib.figure import Figure
        except ImportError as error:
            raise ImportError("a plot needs matplotlib: pip install 'raysharding[plot]'") from error

        class Shown(Figure):
            # Without pyplot, a notebook does not know how to show a figure.
            def _repr_png_(self) -> bytes:
                written = BytesIO()
                self.savefig(written, dpi=_DPI, format="png")
                return written.getvalue()

        names = [name for name in ("loss", "grad_norm", "lr") if self.history.get(name)]
        figure = Shown(figsize=(8, 0.6 + 2.2 * max(len(names), 1)), layout="constrained")
        all_axes = figure.subplots(max(len(names), 1), 1, squeeze=False, sharex=True)[:, 0]
        steps = range(self.first_step + 1, self.first_step + 1 + len(self.history.get("loss", ())))
        for axes, name in zip(all_axes, names, strict=False):
            axes.plot(steps, self.history[name], color="#2a6f97", linewidth=1.4)
            axes.set_ylabel(name)
            axes.grid(alpha=0.3)
            axes.spines[["top", "right"]].set_visible(False)
        all_axes[-1].set_xlabel("step")
        if path is not None:
            figure.savefig(path, dpi=_DPI, format="png")
        return figure

    def __repr__(self) -> str:
        return f"<FitReport: {self}>"

    def _repr_html_(self) -> str:
        rates = [f"{self.rows_per_s:,.1f} rows/s", *([f"{self.tokens_per_s:,.0f} tokens/s"] if self.num_tokens else [])]
        rows = [
            ("steps", f"{self.num_steps - self.first_step}, after step {self.first_step}"),
            *((name, f"{values[-1]:.4g}") for name, values in self.history.items() if values and name != "loss"),
            ("time", f"{self.seconds:.1f} s; waited {self.wait_s:.1f} s for data, saved in {self.save_s:.1f} s"),
            ("rate", ", ".join(rates)),
            *([("skipped", f"{len(self.skipped)} steps")] if self.skipped else []),
            *([("restarts", str(self.num_restarts))] if self.num_restarts else []),
            *([("saved", self.saved)] if self.saved else []),
        ]
        curve = svg_curve("loss", self.history.get("loss", ()), self.first_step + 1)
        return html_report(f"step {self.num_steps}, loss {self.loss:.4g}", Table((), rows).html(), curve)

    def __str__(self) -> str:
        tokens = f", {self.tokens_per_s:,.0f} tokens/s" if self.num_tokens else ""
        restarts = f", {self.num_restarts} restarts" if self.num_restarts else ""
        skipped = f", {len(self.skipped)} of them skipped" if self.skipped else ""
        saved = f"; saved in {self.saved}" if self.saved else ""
        saved += f"; best in {self.best.path}" if self.best else ""
        stopped = f"; stopped: {self.stopped}" if self.stopped else ""
        if self.num_steps == self.first_step:
            return f"step {self.num_steps}, loss {self.loss:.4g}: no step was left to take{stopped}{saved}"
        return (
            f"step {self.num_steps}, loss {self.loss:.4g}: {self.num_steps - self.first_step} steps{skipped} in "
            f"{self.seconds:.1f} s ({self.rows_per_s:,.1f} rows/s{tokens}, waited {self.wait_s:.1f} s for data, saved "
            f"in {self.save_s:.1f} s{restarts}){stopped}{saved}"
        )
