"""`Fit`: training over data, with the batches and steps of one process."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import nn

from raysharding.arguments import check_int
from raysharding.batch import RankBatch
from raysharding.data import Position
from raysharding.distributed.fully_shard import is_recoverable
from raysharding.distributed.optim import learning_rate
from raysharding.distributed.training.data_loader import DataPlan, DistributedDataLoader
from raysharding.distributed.training.evaluate import Evaluation, EvaluationPlan
from raysharding.distributed.training.losses import LossFunction, known_arguments
from raysharding.distributed.training.step import PendingStep, queue_train_step
from raysharding.errors import EmptyBatchError
from raysharding.models import InputBounds

_ROWS_SHOWN = 32


@dataclass(frozen=True)
class FitPlan:
    """Options of a run over data. Picklable; the same on every rank."""

    data: DataPlan
    """The data."""
    loss: LossFunction | None = None
    """Function of the output; `None` for the output's `.loss`."""
    max_grad_norm: float | None = None
    """Global 2-norm to clip gradients to; `None` to only measure."""
    gradient_accumulation_steps: int = 1
    """Number of parts that the rows of a step are processed in."""
    on_empty: Literal["skip", "raise"] = "skip"
    """Action on a batch without counted items: all ranks skip it, or the run ends."""
    evaluation: EvaluationPlan | None = None
    """Evaluation that the driver asks for between steps; its data is opened once, before the first step."""

    def __post_init__(self) -> None:
        """Check the options."""
        check_int("gradient_accumulation_steps", self.gradient_accumulation_steps)
        if self.on_empty not in ("skip", "raise"):
            raise ValueError(f"on_empty={self.on_empty!r}: give 'skip' or 'raise'")


@dataclass(frozen=True)
class StepMetrics:
    """Metrics of one step on one rank."""

    metrics: dict[str, float]
    """Result of `train_step`, the same on every rank; `grad_norm` is NaN until the next step, or `Fit.settle`. NaN,
    except `lr`, for a skipped batch."""
    epoch: int
    """Number of completed epochs."""
    num_rows: int
    """Number of rows of this rank."""
    num_tokens: int
    """Elements of `input_ids` of this rank; 0 without `input_ids`."""
    wait_s: float
    """Seconds that this rank waited for its batch."""
    skipped: str = ""
    """Why the batch was skipped; empty if it was not."""


class Fit:
    """A training run. Every rank makes one with the same plan, and takes the same steps."""

    def __init__(
        self,
        plan: FitPlan,
        device: torch.device,
        position: Position | None = None,
        bounds: InputBounds | None = None,
        module: nn.Module | None = None,
    ) -> None:
        """Open the data; collective.

        Args:
            plan: The run.
            device: Device of the module.
            position: Position to resume at; `None` for the beginning.
            bounds: Valid ids of the model.
            module: The root module, by whose forward columns are dropped; `None`: only text is.
        """
        self._plan = plan
        known = None if module is None else known_arguments(module, [plan.loss] if plan.loss else [])
        num_parts = plan.gradient_accumulation_steps
        self.data_loader = DistributedDataLoader(plan.data, device, position, bounds, known, num_parts)
        self._pending: PendingStep | None = None
        self.evaluation = plan.evaluation
        """The plan's evaluation, with its data opened."""
        if plan.evaluation is not None:  # raises now, not after an epoch
            source = Evaluation(plan.evaluation, device, bounds, module).data_loader.source
            self.evaluation = replace(plan.evaluation, data=replace(plan.evaluation.data, source=source))

    @property
    def position(self) -> Position:
        """Position of the run, after the last step."""
        return self.data_loader.position

    def step(self, module: nn.Module, optimizer: torch.optim.Optimizer) -> StepMetrics | None:
        """Take one step; collective. Return `None` at the end of the run.

        On an accelerator the step is queued, and the one before it is complete; see Note [Waits] in `step.py`.

        Args:
            module: The sharded root module.
            optimizer: Optimizer over its parameters.

        A skipped batch (see `FitPlan.on_empty`) keeps its step number and position in the data; optimizer and schedule
        take no step.

        Raises:
            DataError: On every rank, without changes: a rank could not make the next batch.
            EmptyBatchError: On every rank, under `on_empty="raise"`.
            Exception: As from `train_step`.
        """
        try:
            return self._step(module, optimizer)
        except BaseException:
            self.settle()  # where the step before was lost, too, its error is raised, with this one as context
            raise

    def settle(self) -> None:
        """Wait until the last step is complete, before anything but the next one uses what it changed. Not collective.

        Raises:
            RuntimeError: As from `PendingStep.read`.
        """
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.read()

    def _step(self, module: nn.Module, optimizer: torch.optim.Optimizer) -> StepMetrics | None:
        begun = time.perf_counter()
        passes = self.data_loader.next()
        wait_s = time.perf_counter() - begun
        if passes is None:
            self.settle()
            return None
        try:
            plan, earlier = self._plan, self._pending
            self._pending = queue_train_step(module, optimizer, passes, plan.loss, plan.max_grad_norm, earlier=earlier)
        except Exception as error:
            is_empty = isinstance(error, EmptyBatchError) and is_recoverable(error)
            if not is_empty or self._plan.on_empty == "raise":
                counts = [sum(some) for some in zip(*(one.rows for part in passes for one in part), strict=True)]
                where, rows = self.position, self.data_loader.row_numbers(counts)
                what = f"{len(rows)} rows of the data, {rows[:_ROWS_SHOWN]}"
                error.add_note(f"raysharding: in step {where.num_steps + 1}, epoch {where.epoch}, with {what}")
                raise
            self.data_loader.advance()
            nothing = {"loss": math.nan, "grad_norm": math.nan, **learning_rate(optimizer)}
            return StepMetrics(nothing, self.position.epoch, 0, 0, wait_s, str(error))
        metrics = self._pending.metrics
        self.data_loader.advance(metrics["loss"])
        own = [one for part in passes for one in part if not one.is_dummy]
        num_rows, num_tokens = sum(one.num_rows or 0 for one in own), sum(map(_num_tokens, own))
        return StepMetrics(metrics, self.position.epoch, num_rows, num_tokens, wait_s)


def _num_tokens(batch: RankBatch) -> int:
    ids = batch.kwargs.get("input_ids")
    return ids.numel() if isinstance(ids, torch.Tensor) else 0
