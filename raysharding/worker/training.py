"""`TrainingRank`: the optimizer of a rank, and the passes and updates that it takes part in."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch

from raysharding.batch import RankBatch
from raysharding.distributed.accumulation import Accumulation
from raysharding.distributed.agreement import agree
from raysharding.distributed.gradients import clip_grad_norm_
from raysharding.distributed.loss_call import LossFunction
from raysharding.distributed.new_optimizer import make_optimizer
from raysharding.distributed.optimizer_files import OptimizerLoad, has_optimizer_state
from raysharding.distributed.schedules import Schedule, attach_schedule
from raysharding.distributed.training import forward_backward, optim_step, train_step, zero_grad
from raysharding.distributed.training_files import load_training
from raysharding.errors import CheckpointError
from raysharding.worker.state import RankState, is_training

Mode = Literal["train", "eval"]


class TrainingRank(RankState):
    """A rank that trains. Gradients add up from one update to the next; the first pass after one drops those before."""

    def set_optimizer(
        self,
        factory: Callable[..., torch.optim.Optimizer],
        kwargs: Mapping[str, Any] | None = None,
        *,
        restore: bool = False,
    ) -> None:
        """Make the optimizer as `factory(parameters, **kwargs)`, over the parameters that require gradients.

        Args:
            factory: A class, or any callable.
            kwargs: Given to it after the parameters.
            restore: Also bring back its state, the random generators and the position in the data, where the
                checkpoint that was loaded last is a save of ours that holds them. Collective then.

        Raises:
            ValueError: `factory` did not return a torch optimizer.
            PlanError: The saved state is not this optimizer's.
        """
        with self._running("call", "set_optimizer"):
            self.optimizer = make_optimizer(self.module, factory, kwargs)
            if restore and self.loaded is not None:
                state = self._plan_optimizer(self.loaded)
                if state is not None:
                    state.run(self.loading, self._follow(None), self._stall_s)
                    self.position = load_training(self.loaded)

    def set_scheduler(self, schedule: Schedule) -> None:
        """Give the optimizer a learning-rate schedule, in place of an earlier one; see `distributed.schedules`.

        Args:
            schedule: Makes it for the optimizer.

        Raises:
            ValueError: No optimizer is set, or what was made is no schedule.
        """
        optimizer = self._require_optimizer("set_scheduler")
        with self._running("call", "set_scheduler"):
            attach_schedule(optimizer, schedule)

    def _plan_optimizer(self, checkpoint: str) -> OptimizerLoad | None:
        """What a checkpoint holds of the optimizer's state; `None` where it has none, or there is no optimizer."""
        if self.optimizer is None:
            return None
        holds, error = False, None
        if self.rank == 0:
            try:
                holds = has_optimizer_state(checkpoint)
            except CheckpointError as raised:
                error = raised
        # Rank 0 alone need see the files; the others must know whether a load follows.
        if not agree(error, holds)[0]:
            return None
        return OptimizerLoad.plan(self.module, self.optimizer, checkpoint)

    def train_step(
        self,
        batch: RankBatch,
        loss: LossFunction | None = None,
        max_grad_norm: float | None = None,
        mode: Mode | None = None,
        gradient_accumulation_steps: int = 1,
    ) -> dict[str, float]:
        """One optimizer step over the whole batch; see `distributed.training.train_step`. Collective.

        Args:
            batch: From `deal`.
            loss: See `distributed.loss.loss_share`.
            max_grad_norm: Clip to this global 2-norm. Default: only measure.
            mode: `"train"` (default) or `"eval"`, for models whose training statistics depend on the whole batch.
            gradient_accumulation_steps: Parts that the rows are taken in, one after the other.

        Raises:
            ValueError: No optimizer is set, the mode is unknown, or there are no rows to take in parts.
        """
        optimizer = self._require_optimizer("train_step")
        with self._running("train_step", "train_step"):
            self._begin_update()
            return train_step(
                self.module,
                optimizer,
                self._on_device(batch),
                loss=loss,
                max_grad_norm=max_grad_norm,
                training=is_training(mode, default="train"),
                gradient_accumulation_steps=gradient_accumulation_steps,
            )

    def forward_backward(
        self, batch: RankBatch, loss: LossFunction | None = None, mode: Mode | None = None, *, sync: bool = True
    ) -> dict[str, float]:
        """Add a batch's gradients to those since the last update; see `distributed.training`. Collective.

        Args:
            batch: From `deal`.
            loss: See `distributed.loss.loss_share`.
            mode: As for `train_step`.
            sync: Whether to reduce the gradients.
        """
        with self._running("forward_backward", "forward_backward"):
            if not self.accumulation.num_passes:
                self._drop_gradients()
            self._is_spent = False
            training = is_training(mode, default="train")
            on_device = self._on_device(batch)
            return forward_backward(self.module, on_device, self.accumulation, loss=loss, training=training, sync=sync)

    def optim_step(self, max_grad_norm: float | None = None) -> dict[str, float]:
        """Update the parameters with the gradients since the last update; see `distributed.training`. Collective.

        Args:
            max_grad_norm: As for `train_step`.

        Raises:
            ValueError: No optimizer is set, there are no gradients, or they were not reduced.
        """
        optimizer = self._require_optimizer("optim_step")
        with self._running("optim_step", "optim_step"):
            if self._is_spent:
                raise ValueError("there are no gradients since the last update: call forward_backward first")
            done, self.accumulation, self._is_spent = self.accumulation, Accumulation(), True
            return optim_step(self.module, optimizer, done, max_grad_norm=max_grad_norm)

    def zero_grad(self) -> None:
        """Drop the gradients since the last update, reduced or not. Each rank alone; all of them have to."""
        with self._running("call", "zero_grad"):
            self._drop_gradients()

    def _begin_update(self) -> None:
        """Gradients of passes before this are nobody's any more."""
        self.accumulation, self._is_spent = Accumulation(), True

    def _drop_gradients(self) -> None:
        self._begin_update()
        zero_grad(self.module, self.optimizer)

    def _require_optimizer(self, method: str) -> torch.optim.Optimizer:
        if self.optimizer is None:
            raise ValueError(f"no optimizer: call set_optimizer(torch.optim.AdamW, lr=...) before {method}")
        return self.optimizer

    def clip_grad_norm_(self, max_norm: float | None, norm_type: float = 2.0) -> float:
        """Scale all gradients so that their norm is at most `max_norm`, and return the norm before. Collective.

        Args:
            max_norm: Upper bound; `None` only measures.
            norm_type: p of the p-norm.
        """
        with self._running("call", "clip_grad_norm_"):
            return float(clip_grad_norm_(self.module, max_norm, norm_type))
