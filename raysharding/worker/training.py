"""`Trainer`: the optimizer of a rank, the passes and updates that it takes part in, and its runs over data."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch

from raysharding.batch import RankBatch
from raysharding.checkpoint import is_checkpoint, is_left_over
from raysharding.checkpoint.storage import join_path, storage_of
from raysharding.data import Position
from raysharding.distributed.comm import agree, from_rank_0
from raysharding.distributed.fully_shard import clip_grad_norm_
from raysharding.distributed.optim import Schedule, attach_schedule, make_optimizer
from raysharding.distributed.saving import (
    OptimizerLoad,
    has_optimizer_state,
    load_training,
    random_state,
    restore_random_state,
    run_of,
)
from raysharding.distributed.training import (
    Evaluation,
    EvaluationPlan,
    Fit,
    FitPlan,
    LossFunction,
    StepMetrics,
    forward_backward,
    optim_step,
    train_step,
    zero_grad,
)
from raysharding.errors import CheckpointError
from raysharding.models import InputBounds
from raysharding.worker.status import RankStatus, is_training

Mode = Literal["train", "eval"]


_BATCHES_A_STEP = 8
_STEP_NAME = re.compile(r"step-\d+")


@dataclass(frozen=True)
class FitStart:
    """A run that is about to go on."""

    position: Position
    """Where it stands."""
    total_steps: int | None
    """Steps of the whole run; `None` where nobody knows."""
    is_saved: bool
    """Whether files hold what the ranks hold: what was loaded, or saved with the optimizer, and not trained since."""


@dataclass(frozen=True)
class FitSteps:
    """Some steps, as one rank saw them."""

    steps: tuple[StepMetrics, ...]
    """In order; fewer than asked for at the end of the run."""
    position: Position
    """Where the run stands after them."""
    is_over: bool
    """Whether there are no more."""


class Trainer:
    """Trains a rank's module. Gradients add up from one update to the next; the first pass after one drops older ones.

    Args:
        status: What the rank holds and does.
    """

    def __init__(self, status: RankStatus) -> None:
        self._status = status
        self.position: Position | None = None
        """Where the last run stands, or the one that the weights were saved in."""
        self._fit: Fit | None = None
        self._saves_async = False

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
        with self._status.running("call", "set_optimizer"):
            self._status.optimizer = make_optimizer(self._status.module, factory, kwargs)
            if restore and self._status.loaded is not None:
                state = self.plan_optimizer(self._status.loaded)
                if state is not None:
                    state.run(self._status.loading, self._status.follow(None), self._status.stall_s)
                    self.position = load_training(self._status.loaded)

    def set_scheduler(self, schedule: Schedule) -> None:
        """Give the optimizer a learning-rate schedule, in place of an earlier one; see `distributed.optim.factories`.

        Args:
            schedule: Makes it for the optimizer.

        Raises:
            ValueError: No optimizer is set, or what was made is no schedule.
        """
        optimizer = self._require_optimizer("set_scheduler")
        with self._status.running("call", "set_scheduler"):
            attach_schedule(optimizer, schedule)

    def plan_optimizer(self, checkpoint: str) -> OptimizerLoad | None:
        """Plan the load of a checkpoint's optimizer state; `None` where it has none, or no optimizer is set."""
        if self._status.optimizer is None:
            return None
        holds, error = False, None
        if self._status.rank == 0:
            try:
                holds = has_optimizer_state(checkpoint)
            except CheckpointError as raised:
                error = raised
        # Rank 0 alone need see the files; the others must know whether a load follows.
        if not agree(error, holds)[0]:
            return None
        return OptimizerLoad.plan(self._status.module, self._status.optimizer, checkpoint)

    def train_step(
        self,
        batch: RankBatch,
        loss: LossFunction | None = None,
        max_grad_norm: float | None = None,
        mode: Mode | None = None,
        gradient_accumulation_steps: int = 1,
    ) -> dict[str, float]:
        """One optimizer step over the whole batch; see `distributed.training.step.train_step`. Collective.

        Args:
            batch: From `deal`.
            loss: See `distributed.training.loss.loss_share`.
            max_grad_norm: Clip to this global 2-norm. Default: only measure.
            mode: `"train"` (default) or `"eval"`, for models whose training statistics depend on the whole batch.
            gradient_accumulation_steps: Parts that the rows are taken in, one after the other.

        Raises:
            ValueError: No optimizer is set, the mode is unknown, or there are no rows to take in parts.
        """
        optimizer = self._require_optimizer("train_step")
        with self._status.running("train_step", "train_step"):
            self._status.forget_gradients()
            return train_step(
                self._status.module,
                optimizer,
                self._status.on_device(batch),
                loss=loss,
                max_grad_norm=max_grad_norm,
                training=is_training(mode, default="train"),
                gradient_accumulation_steps=gradient_accumulation_steps,
            )

    def forward_backward(
        self, batch: RankBatch, loss: LossFunction | None = None, mode: Mode | None = None, *, sync: bool = True
    ) -> dict[str, float]:
        """Add a batch's gradients to those since the last update; see `distributed.training.step`. Collective.

        Args:
            batch: From `deal`.
            loss: See `distributed.training.loss.loss_share`.
            mode: As for `train_step`.
            sync: Whether to reduce the gradients.
        """
        with self._status.running("forward_backward", "forward_backward"):
            if not self._status.accumulation.num_passes:
                self.drop_gradients()
            self._status.is_spent = False
            training = is_training(mode, default="train")
            on_device = self._status.on_device(batch)
            passes = self._status.accumulation
            return forward_backward(self._status.module, on_device, passes, loss=loss, training=training, sync=sync)

    def optim_step(self, max_grad_norm: float | None = None) -> dict[str, float]:
        """Update the parameters with the gradients since the last update; see `distributed.training.step`. Collective.

        Args:
            max_grad_norm: As for `train_step`.

        Raises:
            ValueError: No optimizer is set, there are no gradients, or they were not reduced.
        """
        optimizer = self._require_optimizer("optim_step")
        with self._status.running("optim_step", "optim_step"):
            if self._status.is_spent:
                raise ValueError("there are no gradients since the last update: call forward_backward first")
            done = self._status.accumulation
            self._status.forget_gradients()
            return optim_step(self._status.module, optimizer, done, max_grad_norm=max_grad_norm)

    def zero_grad(self) -> None:
        """Drop the gradients since the last update, reduced or not. Each rank alone; all of them have to."""
        with self._status.running("call", "zero_grad"):
            self.drop_gradients()

    def drop_gradients(self) -> None:
        """Drop all gradients of the module. No collective."""
        self._status.forget_gradients()
        zero_grad(self._status.module, self._status.optimizer)

    def _require_optimizer(self, method: str) -> torch.optim.Optimizer:
        if self._status.optimizer is None:
            raise ValueError(f"no optimizer: call set_optimizer(torch.optim.AdamW, lr=...) before {method}")
        return self._status.optimizer

    def clip_grad_norm_(self, max_norm: float | None, norm_type: float = 2.0) -> float:
        """Scale all gradients so that their norm is at most `max_norm`, and return the norm before. Collective.

        Args:
            max_norm: Upper bound; `None` only measures.
            norm_type: p of the p-norm.
        """
        with self._status.running("call", "clip_grad_norm_"):
            return float(clip_grad_norm_(self._status.module, max_norm, norm_type))

    def fit_begin(
        self,
        plan: FitPlan,
        position: Position | None,
        *,
        resume: bool,
        save_to: str | None = None,
        async_save: bool = False,
    ) -> FitStart:
        """Look at the data, and find where to begin. Collective.

        Args:
            plan: The run.
            position: With `resume`: where that run began, to which it goes back where the ranks hold no place of it;
                `None`: there must be one.
            resume: Whether to go on where the last run stands; otherwise one begins anew.
            save_to: Directory of its saves, which must not hold another run's; `None`: there are none.
            async_save: Whether they are written in the background.

        Raises:
            ValueError: No optimizer is set, or there is no run to resume.
            DataError: On every rank: the data cannot be read, or is not what the run was fed before.
            CheckpointError: On every rank: `save_to` holds the saves of another run.
        """
        self._require_optimizer("fit")
        with self._status.running("fit", "fit"):
            self.fit_end()
            found = _agreed(self.position) if resume else None
            if position is not None and (found is None or found.run != position.run):
                found = position
            if resume and found is None:
                raise ValueError(
                    "resume=True, but there is no run to go on with: load a checkpoint that fit saved, or leave it out"
                )
            self._fit = Fit(plan, self._status.device, found, InputBounds.of(self._status.module))
            self.position = self._fit.position
            self._saves_async = async_save
            if save_to is not None:
                here = self.position
                from_rank_0(lambda: _check_own_saves(save_to, here))
            return FitStart(self.position, self._fit.data_loader.total_steps, self._status.is_saved)

    def fit_steps(self, num_steps: int) -> FitSteps:
        """Take steps, as many as are left at most. Collective.

        Args:
            num_steps: How many.
        """
        optimizer = self._require_optimizer("fit")
        assert self._fit is not None, "fit_begin comes before fit_steps"
        steps: list[StepMetrics] = []
        for _ in range(num_steps):
            with self._status.running("train_step", "fit_step"):
                self._status.forget_gradients()
                step_metrics = self._fit.step(self._status.module, optimizer)
                self.position = self._fit.position
            if step_metrics is None:
                return FitSteps(tuple(steps), self.position, is_over=True)
            steps.append(step_metrics)
            if self._saves_async:
                self._status.saver.prepare(self._status.module, optimizer, stall_s=self._status.stall_s)
                self._saves_async = False
        return FitSteps(tuple(steps), self._fit.position, is_over=False)

    def evaluate(self, plan: EvaluationPlan) -> Iterator[dict[str, float] | None]:
        """Compute loss and metrics over data; see `distributed.training.evaluate`. Collective: all iterate to the end.

        Args:
            plan: The run.

        Yields:
            `None` after every few batches, in the end the values.
        """
        with self._status.running("forward", "evaluate"):
            run = Evaluation(plan, self._status.device, InputBounds.of(self._status.module))
        try:
            is_over = False
            while not is_over:
                with self._status.running("forward", "evaluate"):
                    is_over = not all(run.step(self._status.module) for _ in range(_BATCHES_A_STEP))
                    values = run.values() if is_over else None
                yield values
        finally:
            run.data_loader.close()

    def generators(self) -> dict[str, Any]:
        """Return this rank's random generators, as `random_state` gives them."""
        return random_state()

    def restore_generators(self, state: Mapping[str, Any]) -> None:
        """Put back what `generators` gave.

        Args:
            state: This rank's.
        """
        restore_random_state(state)

    def fit_end(self) -> None:
        """Let go of the data. Each rank alone."""
        if self._fit is not None:
            self._fit.data_loader.close()
            self._fit = None


def _agreed(position: Position | None) -> Position | None:
    """Where the run stands, of which a rank that has taken a lost one's place knows nothing; collective.

    Raises:
        ValueError: On every rank: ranks stand at different steps.
    """
    said = agree(None, None if position is None else position.as_dict())
    known = [Position.from_dict(one) for one in said if one is not None]
    if any(one != known[0] for one in known):
        raise ValueError(f"ranks stand at different steps of the run: {sorted(one.num_steps for one in known)}")
    return known[0] if known else None


def _check_own_saves(directory: str, here: Position) -> None:
    """Refuse a directory in which a run would overwrite, or remove, what another has saved.

    Where one of its own was removed, what the user put beside it may be left: that is no save.
    """
    storage = storage_of(directory)
    if storage.find(directory).kind != "directory":
        return
    for name in storage.list_names(directory):
        path = join_path(directory, name)
        if not _STEP_NAME.fullmatch(name) or is_left_over(path):
            continue
        if int(name.removeprefix("step-")) < here.num_steps and not is_checkpoint(path):
            continue
        if run_of(path) != here.run:
            what = (
                f"holds {name} of another run: save to another directory, or go on with that run: load it, resume=True"
            )
            raise CheckpointError(what, path=directory)
