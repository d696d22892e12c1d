"""`EarlyStop`: ends a run whose evaluations no longer improve; and which values of a metric are better."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from raysharding.arguments import check_int


def direction(metric: str) -> tuple[str, int]:
    """Return the name of a metric in `FitStep.metrics`, and 1 if larger values are better, else -1.

    As in transformers, smaller values are better for names that end in `loss`; a `-` before another name says the same.

    Args:
        metric: Name of the metric, with or without `eval_`.
    """
    name = metric.removeprefix("-").removeprefix("eval_")
    return f"eval_{name}", -1 if metric.startswith("-") or name.endswith("loss") else 1


@dataclass(frozen=True)
class EarlyStop:
    """Ends `fit` when a metric of `eval_data` has not improved in `patience` evaluations in a row.

    The evaluations are part of the run's saves: a resumed or restarted run counts on.
    """

    metric: str
    """`"loss"`, or a name in `metrics=`. Larger values are better, except for names that end in `loss`; write `"-wer"`
    for any other metric of which smaller values are better. The values are those of `eval_data`."""
    patience: int = 1
    """Number of evaluations in a row without an improvement after which the run ends."""
    min_delta: float = 0.0
    """Improvement over the best value so far that a value must exceed to count as one."""

    def __post_init__(self) -> None:
        """Check the fields.

        Raises:
            ValueError: `patience` is not a positive int, or `min_delta` is negative or not finite.
        """
        check_int("EarlyStop: patience", self.patience)
        if not 0 <= self.min_delta < math.inf:
            raise ValueError(f"EarlyStop(min_delta={self.min_delta!r}): give a number, 0 or more")

    def is_over(self, values: Iterable[float | None]) -> bool:
        """Return True if a run with these evaluations ends.

        Args:
            values: The metric after each evaluation of the run, in order; `None` where it was not finite, which is no
                improvement.
        """
        sign = direction(self.metric)[1]
        best, num_bad = -math.inf, 0
        for value in values:
            if value is not None and sign * value > best + self.min_delta:
                best, num_bad = sign * value, 0
            else:
                num_bad += 1
        return num_bad >= self.patience
