"""`Predictor`: a rank's part of a `predict`, between the driver's calls."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from raysharding.batch import RankBatch
from raysharding.data import schema_as_text
from raysharding.distributed.training import Prediction, PredictPlan
from raysharding.models import InputBounds
from raysharding.worker.status import RankStatus


@dataclass(frozen=True)
class PredictStart:
    """A `predict` before its next forward."""

    num_rows: int
    """Rows of the data."""
    num_done: int
    """Rows whose results are there."""
    num_parts: int
    """Number of parts that the rows are cut into."""
    is_over: bool
    """True if there is nothing to compute."""
    is_saved: bool
    """True if files hold the rank's weights: a restart of the group would bring back the same."""


@dataclass(frozen=True)
class PredictSteps:
    """Results of consecutive forwards on one rank."""

    num_steps: int
    """Number of forwards."""
    num_rows: int
    """Rows of this rank in them."""
    finished: tuple[tuple[int, int, str], ...]
    """First row, bytes and serialized schema of the parts whose tables can be taken, at most one; none if there is an
    `output`."""
    is_over: bool
    """True if no forwards are left."""
    dropped: tuple[str, ...]
    """Columns of the data that this rank has dropped so far, since the model does not take them."""


class Predictor:
    """Holds the `predict` of a rank from call to call.

    Args:
        status: The rank's status, with the module.
    """

    def __init__(self, status: RankStatus) -> None:
        self._status = status
        self._run: Prediction | None = None
        self._summons: bool | None = None

    def predict_begin(self, plan: PredictPlan) -> PredictStart:
        """Open the data and the output. Collective. Ends an earlier run that was not ended.

        Raises:
            DataError: On every rank: the data cannot be read, or the output holds something else.
        """
        with self._status.running("forward", "predict"):
            self.predict_end()
            module = self._status.module
            self._summons = plan.summon_full_params
            self._run = run = Prediction(plan, self._status.device, InputBounds.of(module), module)
            return PredictStart(run.num_rows, run.num_done, len(run.parts), run.is_over, self._status.is_saved)

    def predict_steps(self, num_steps: int) -> PredictSteps:
        """Take up to `num_steps` forwards. Collective."""
        with self._status.running("forward", "predict", keeps_gathered=True):
            run = self._run
            assert run is not None, "predict_begin comes first"
            if not run.is_over and not self._status.keep_gathered(self._summons):
                self._summons = False  # the ranks ask for memory until it lacks
            num_taken, num_rows = run.steps(self._status.module, num_steps)
            finished = tuple((part.start, table.nbytes, schema_as_text(table.schema)) for part, table in run.finished)
            return PredictSteps(num_taken, num_rows, finished, run.is_over, run.dropped)

    def predict_take(self, batch: RankBatch) -> Any:
        """Return the table of the part that this rank has finished, and let go of it; `None` without one.

        Args:
            batch: An empty one: the caller wants a value of each rank.
        """
        assert self._run is not None, "predict_begin comes first"
        finished, self._run.finished = self._run.finished, []
        return finished[0][1] if finished else None

    def predict_end(self) -> None:
        """Let go of data and output. No collective."""
        if self._run is not None:
            self._run.close()
            self._run = None
            self._status.release_gathered()
