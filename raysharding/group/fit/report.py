"""What a run over data tells: each step to callbacks, the whole to the caller."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any


@dataclass(frozen=True)
class FitStep:
    """One step of a run, for callbacks."""

    num_steps: int
    """Steps of the whole run so far, this one with them."""
    epoch: int
    """Epochs that were over when it was taken."""
    metrics: Mapping[str, float]
    """`loss`, `grad_norm`, with a schedule also `lr`."""
    num_rows: int
    """Rows of the step, all ranks together."""
    num_tokens: int
    """Elements of its `input_ids`; 0 where it has none."""
    rows_per_s: float
    """Of the steps since the driver heard last."""
    tokens_per_s: float
    """Likewise."""
    is_skipped: bool = False
    """Whether nothing counted in its batch, so that no update was taken: `loss` and `grad_norm` are NaN."""


@dataclass(frozen=True)
class FitReport:
    """One run. `str(report)` is for people, `as_dict()` for programs, `plot` for a look."""

    num_steps: int
    """Steps of the whole run, those before a resume with them."""
    first_step: int
    """Steps that had been taken when `fit` was called."""
    history: Mapping[str, tuple[float, ...]]
    """Metric → its value after each step that `fit` took; NaN where a restart kept steps that it had not heard of, and
    where a step was skipped."""
    num_rows: int
    """Rows trained on in this `fit`; those of steps that a restart repeated, once more."""
    num_tokens: int
    """Elements of `input_ids`, likewise."""
    seconds: float
    """Time that `fit` took."""
    wait_s: float
    """Seconds that the rank which waited most for data has waited."""
    save_s: float
    """Seconds that saves took."""
    num_restarts: int
    """How often the group was restarted; one that failed, because another rank was lost meanwhile, counts, too."""
    saved: str | None
    """The last save; `None` where there was none."""
    skipped: tuple[int, ...] = ()
    """Numbers of the steps whose batch had nothing that counts: no update was taken."""

    @property
    def loss(self) -> float:
        """Loss of the last step that was not skipped; NaN where there is none."""
        skipped = set(self.skipped)
        losses = list(enumerate(self.history.get("loss", ()), self.first_step + 1))
        return next((loss for number, loss in reversed(losses) if number not in skipped), float("nan"))

    @property
    def tokens_per_s(self) -> float:
        """Tokens over the whole time."""
        return self.num_tokens / self.seconds if self.seconds > 0 else 0.0

    @property
    def rows_per_s(self) -> float:
        """Rows over the whole time."""
        return self.num_rows / self.seconds if self.seconds > 0 else 0.0

    def as_dict(self) -> dict[str, Any]:
        """All fields and rates, ready for JSON."""
        return asdict(self) | {"tokens_per_s": self.tokens_per_s, "rows_per_s": self.rows_per_s}

    def then(self, later: FitReport) -> FitReport:
        """Put a run and the one that went on with it together, for one curve.

        Raises:
            ValueError: The other does not begin where this one ends.
        """
        if later.first_step != self.num_steps:
            raise ValueError(
                f"a run that ends with step {self.num_steps}, and one that goes on after {later.first_step}"
            )
        names = [name for name in self.history if name in later.history]
        return replace(
            later,
            first_step=self.first_step,
            history={name: (*self.history[name], *later.history[name]) for name in names},
            num_rows=self.num_rows + later.num_rows,
            num_tokens=self.num_tokens + later.num_tokens,
            seconds=self.seconds + later.seconds,
            wait_s=self.wait_s + later.wait_s,
            save_s=self.save_s + later.save_s,
            num_restarts=self.num_restarts + later.num_restarts,
            saved=later.saved or self.saved,
            skipped=(*self.skipped, *later.skipped),
        )

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Draw loss, gradient norm and learning rate over the steps.

        Args:
            path: PNG to write; an existing one is replaced.

        Raises:
            ImportError: matplotlib is not installed: `pip install 'raysharding[bench]'`.
        """
        from matplotlib.figure import Figure

        names = [name for name in ("loss", "grad_norm", "lr") if self.history.get(name)]
        figure = Figure(figsize=(8, 0.6 + 2.2 * max(len(names), 1)), layout="constrained")
        all_axes = figure.subplots(max(len(names), 1), 1, squeeze=False, sharex=True)[:, 0]
        steps = range(self.first_step + 1, self.first_step + 1 + len(self.history.get("loss", ())))
        for axes, name in zip(all_axes, names, strict=False):
            axes.plot(steps, self.history[name], color="#2a6f97", linewidth=1.4)
            axes.set_ylabel(name)
            axes.grid(alpha=0.3)
            axes.spines[["top", "right"]].set_visible(False)
        all_axes[-1].set_xlabel("step")
        figure.savefig(path, dpi=130, format="png")

    def __str__(self) -> str:
        tokens = f", {self.tokens_per_s:,.0f} tokens/s" if self.num_tokens else ""
        restarts = f", {self.num_restarts} restarts" if self.num_restarts else ""
        skipped = f", {len(self.skipped)} of them skipped" if self.skipped else ""
        saved = f"; saved in {self.saved}" if self.saved else ""
        return (
            f"step {self.num_steps}, loss {self.loss:.4g}: {self.num_steps - self.first_step} steps{skipped} in "
            f"{self.seconds:.1f} s ({self.rows_per_s:,.1f} rows/s{tokens}, waited {self.wait_s:.1f} s for data, saved "
            f"in {self.save_s:.1f} s{restarts}){saved}"
        )
