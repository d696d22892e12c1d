"""`Fit`: training over data. The batches are those of one process, and so are the steps."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
from torch import nn

from raysharding.batch import RankBatch
from raysharding.distributed.feeding import Feed, FeedPlan, check_whole
from raysharding.distributed.loss_call import LossFunction
from raysharding.distributed.training import train_step
from raysharding.distributed.training_files import Position
from raysharding.models import InputBounds


@dataclass(frozen=True)
class FitPlan:
    """What a run over data is asked to do. Picklable; the same on every rank."""

    feed: FeedPlan
    """The data."""
    loss: LossFunction | None = None
    """See `loss.loss_share`."""
    max_grad_norm: float | None = None
    """See `train_step`."""
    gradient_accumulation_steps: int = 1
    """See `train_step`."""

    def __post_init__(self) -> None:
        """Refuse what no run can do."""
        check_whole("gradient_accumulation_steps", self.gradient_accumulation_steps, least=1)


@dataclass(frozen=True)
class StepFigures:
    """One step, as one rank saw it."""

    metrics: dict[str, float]
    """What `train_step` returned: the same on every rank."""
    epoch: int
    """Epochs that were over."""
    num_rows: int
    """Rows of this rank."""
    num_tokens: int
    """Elements of `input_ids` of this rank; 0 where the batch has none."""
    wait_s: float
    """Seconds that this rank waited for its batch."""


class Fit:
    """A run that trains. Every rank makes one, with the same plan, and takes the same steps."""

    def __init__(
        self,
        plan: FitPlan,
        device: torch.device,
        position: Position | None = None,
        bounds: InputBounds | None = None,
    ) -> None:
        """Look at the data; collective. As `Feed`."""
        self._plan = plan
        self.feed = Feed(plan.feed, device, position, bounds)

    @property
    def position(self) -> Position:
        """Where the run stands, after the last step."""
        return self.feed.position

    def step(self, module: nn.Module, optimizer: torch.optim.Optimizer) -> StepFigures | None:
        """Take one step; collective. `None` where the run is over.

        Args:
            module: The sharded root module.
            optimizer: Over its parameters.

        Raises:
            DataError: On every rank, and nothing has changed: the next batch could not be made on some rank.
            Exception: As from `train_step`.
        """
        begun = time.perf_counter()
        batch = self.feed.next()
        wait_s = time.perf_counter() - begun
        if batch is None:
            return None
        metrics = train_step(
            module,
            optimizer,
            batch,
            loss=self._plan.loss,
            max_grad_norm=self._plan.max_grad_norm,
            gradient_accumulation_steps=self._plan.gradient_accumulation_steps,
        )
        self.feed.advance()
        return StepFigures(metrics, self.position.epoch, batch.num_rows or 0, _num_tokens(batch), wait_s)


def _num_tokens(batch: RankBatch) -> int:
    ids = batch.kwargs.get("input_ids")
    return ids.numel() if isinstance(ids, torch.Tensor) and not batch.is_dummy else 0
