"""`Trainer`: a rank's optimizer, its forward and backward passes, updates, and runs over data."""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from raysharding.batch import RankBatch
from raysharding.checkpoint import open_checkpoint
from raysharding.checkpoint.storage import join_path, storage_of
from raysharding.checkpoint.writing import check_destination, check_writable, is_checkpoint, is_left_over, newest_save
from raysharding.data import Position
from raysharding.distributed.comm import agree, agreeing, from_rank_0, to_host
from raysharding.distributed.fully_shard import clip_grad_norm_
from raysharding.distributed.optim import Schedule, attach_schedule, make_optimizer, precision_warning
from raysharding.distributed.saving import (
    OptimizerLoad,
    has_optimizer_state,
    load_training,
    position_of,
    random_state,
    restore_random_state,
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
from raysharding.models import AdapterNames, InputBounds
from raysharding.worker.status import RankStatus, is_training

Mode = Literal["train", "eval"]


_NO_RUN = "load a checkpoint that fit saved, with an optimizer set, as by optimizer= of from_checkpoint"
_BATCHES_A_STEP = 8
_STEP_NAME = re.compile(r"step-\d+")


@dataclass(frozen=True)
class FitStart:
    """State of a run before its next step."""

    position: Position
    """The run's current position in the data."""
    total_steps: int | None
    """Steps of the whole run; `None` if unknown."""
    is_saved: bool
    """True if files hold the ranks' state: it was loaded, or saved with the optimizer, and not trained since."""
    has_save: bool
    """True if the directory of the run's saves holds that of this position; the weights may have changed since."""
    warning: str | None
    """A warning about the trained weights' dtype that the driver has not had yet."""


@dataclass(frozen=True)
class FitSteps:
    """Results of consecutive steps on one rank."""

    steps: tuple[StepMetrics, ...]
    """Metrics of the steps, in order; fewer than requested at the end of the run."""
    position: Position
    """The run's position after these steps, without its evaluations."""
    is_over: bool
    """True if no steps are left."""
    dropped: tuple[str, ...] = ()
    """Columns of the data that this rank has dropped so far, since the model does not take them."""


class Trainer:
    """Training of a rank's module. Gradients accumulate between updates; the first pass after an update drops old ones.

    Args:
        status: The rank's status, with module and optimizer.
    """

    def __init__(self, status: RankStatus) -> None:
        self._status = status
        self.position: Position | None = None
        """Position of the last run, or of the run in which the loaded weights were saved."""
        self._fit: Fit | None = None
        self._steps: list[StepMetrics] = []
        self._saves_async = False
        self._dropped: tuple[str, ...] = ()
        self._warning: str | None = None

    def new_warning(self) -> str | None:
        """Return the warning about the trained weights' dtype; `None` without one, or if the last call returned it."""
        last, self._warning = self._warning, precision_warning(self._status.module)
        return None if self._warning == last else self._warning

    def set_optimizer(
        self,
        factory: Callable[..., torch.optim.Optimizer],
        kwargs: Mapping[str, Any] | None = None,
        restore: bool = False,
    ) -> None:
        """Make the optimizer as `factory(parameters, **kwargs)`, over the parameters that require gradients.

        Args:
            factory: A class, or any callable.
            kwargs: Keyword arguments for `factory`.
            restore: Also restore the optimizer's state, the random generators and the position in the data, if the
                checkpoint that was loaded last is a save by raysharding that holds these. Collective in that case.

        Raises:
            ValueError: `factory` did not return a torch optimizer.
            PlanError: The saved state does not match this optimizer.
        """
        with self._status.running("call", "set_optimizer"):
            self._status.optimizer = make_optimizer(self._status.module, factory, kwargs)
            if restore and self._status.loaded is not None:
                state = self.plan_optimizer(self._status.loaded)
                if state is not None:
                    state.run(self._status.loading, self._status.follow, self._status.stall_s)
                    self.position = load_training(self._status.loaded)

    def set_scheduler(self, schedule: Schedule) -> tuple[str, str]:
        """Give the optimizer a learning-rate schedule, at the step of the one that it replaces.

        Args:
            schedule: Called with the optimizer; returns the schedule.

        Returns:
            Texts, of a schedule that replaces another: how it continues, and a warning, as of `attach_schedule`.

        Raises:
            ValueError: No optimizer is set, or `schedule` did not return a schedule.
        """
        optimizer = self._require_optimizer("set_scheduler")
        with self._status.running("call", "set_scheduler"):
            continues, inherited = attach_schedule(optimizer, schedule)
            # A restart from the files would go on with the schedule that was replaced.
            self._status.num_changes += bool(continues)
            return continues, inherited

    def plan_optimizer(self, checkpoint: str) -> OptimizerLoad | None:
        """Plan the load of a checkpoint's optimizer state. Collective: ranks without the files ask rank 0.

        Returns:
            The plan; `None` if the checkpoint has no optimizer state, or that of a base, which adapters stay on, or no
            optimizer is set.
        """
        if self._status.optimizer is None:
            return None
        names = AdapterNames.of(self._status.module)

        def has_own() -> bool:
            is_alike = names is None or open_checkpoint(checkpoint).adapter is not None
            return is_alike and has_optimizer_state(checkpoint)

        # Only rank 0 needs to see the files. Without this exchange the others would not know whether a load follows,
        # and rank 0 would wait in it for them.
        if not from_rank_0(has_own):
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
        """Take one optimizer step over the whole batch. Collective.

        Args:
            batch: Result of `deal` for this rank.
            loss: Called with the output; returns the loss. Default: the output's own.
            max_grad_norm: Clip to this global 2-norm. Default: only measure.
            mode: `"train"` (default) or `"eval"`, for models whose training statistics depend on the whole batch.
            gradient_accumulation_steps: Number of parts that the rows are split into, run one after the other.

        Raises:
            ValueError: No optimizer is set, the mode is unknown, or there are no rows to split.
        """
        optimizer = self._require_optimizer("train_step")
        with self._status.running("train_step", "train_step"):
            self._status.forget_gradients()
            metrics = train_step(
                self._status.module,
                optimizer,
                self._status.on_device(batch),
                loss=loss,
                max_grad_norm=max_grad_norm,
                training=is_training(mode, default="train"),
                gradient_accumulation_steps=gradient_accumulation_steps,
            )
            self._status.num_changes += 1
            return metrics

    def forward_backward(
        self, batch: RankBatch, loss: LossFunction | None = None, mode: Mode | None = None, sync: bool = True
    ) -> dict[str, float]:
        """Add a batch's gradients to those since the last update. Collective.

        Args:
            batch: Result of `deal` for this rank.
            loss: Called with the output; returns the loss. Default: the output's own.
            mode: As for `train_step`.
            sync: Reduce the gradients over the ranks.
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
        """Update the parameters with the gradients since the last update. Collective.

        Args:
            max_grad_norm: As for `train_step`.

        Raises:
            ValueError: No optimizer is set, or there are no gradients, or the gradients were not reduced.
        """
        optimizer = self._require_optimizer("optim_step")
        with self._status.running("optim_step", "optim_step"):
            if self._status.is_spent:
                raise ValueError("there are no gradients since the last update: call forward_backward first")
            done = self._status.accumulation
            self._status.forget_gradients()
            metrics = optim_step(self._status.module, optimizer, done, max_grad_norm=max_grad_norm)
            self._status.num_changes += 1
            return metrics

    def zero_grad(self) -> None:
        """Drop the gradients since the last update, reduced or not. No collective, but every rank must call it."""
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
        """Scale all gradients to a norm of at most `max_norm`, and return the norm before scaling. Collective.

        Args:
            max_norm: Upper bound; `None` only measures.
            norm_type: p of the p-norm.
        """
        with self._status.running("call", "clip_grad_norm_"):
            return float(to_host(clip_grad_norm_(self._status.module, max_norm, norm_type)))

    def fit_begin(
        self,
        plan: FitPlan,
        position: Position | None,
        resume: bool,
        save_to: str | None = None,
        async_save: bool = False,
    ) -> FitStart:
        """Check the data and determine where the run begins. Collective.

        Args:
            plan: The run.
            position: With `resume`: where that run began; used if the ranks hold no position of that run. `None`: the
                ranks must hold a position.
            resume: Continue at the position of the last run; otherwise begin a new run.
            save_to: Directory of the run's saves, which must not hold another run's saves; `None`: no saves.
            async_save: Write the saves in the background.

        Returns:
            The run's state before its next step.

        Raises:
            ValueError: No optimizer is set, or there is no run to resume.
            DataError: On every rank: the data cannot be read, or is not the data that the run used before.
            CheckpointError: On every rank: `save_to` holds the saves of another run, or a node cannot write to it.
        """
        self._require_optimizer("fit")
        with self._status.running("fit", "fit"):
            self.fit_end()
            found = _agreed(self.position) if resume else None
            if position is not None and (found is None or found.run != position.run):
                found = position
            if resume and found is None:
                raise ValueError(f"resume=True, but there is no run to resume: {_NO_RUN}")
            module = self._status.module
            bounds = InputBounds.of(module).for_loss(plan.loss)
            self._fit = Fit(plan, self._status.device, found, bounds, module)
            self.position = self._fit.position
            self._saves_async = async_save
            has_save = False
            if save_to is not None:
                here = self.position
                has_save = from_rank_0(lambda: _check_own_saves(save_to, here))
                with agreeing():  # before the first step, not at the first save
                    if self._status.local_rank == 0:
                        check_writable(save_to)
            total_steps, is_saved = self._fit.data_loader.total_steps, self._status.is_saved
            return FitStart(self.position, total_steps, is_saved, has_save, self.new_warning())

    def latest_save(self, save_to: str) -> tuple[str, bool] | None:
        """Return the newest complete save of a run, and True if the ranks hold it, or a later step of its run.

        Collective.

        Args:
            save_to: Directory of the run's saves, which rank 0 sees.

        Returns:
            `None` without a save.

        Raises:
            CheckpointError: On every rank: a save cannot be read.
        """
        newest = from_rank_0(lambda: _newest(save_to))
        if newest is None:
            return None
        held = _agreed(self.position)
        is_held = held is not None and held.run == newest["run"] and held.num_steps >= newest["num_steps"]
        return newest["path"], is_held

    def fit_steps(self, num_steps: int) -> FitSteps:
        """Take steps until `num_steps` are done or the run ends. Collective.

        Args:
            num_steps: Number of steps.

        Returns:
            The results of the steps taken.
        """
        optimizer = self._require_optimizer("fit")
        assert self._fit is not None, "fit_begin comes before fit_steps"
        self._steps = []
        for number in range(1, num_steps + 1):
            with self._status.running("train_step", "fit_step"):
                self._status.forget_gradients()
                step_metrics = self._fit.step(self._status.module, optimizer)
                if number == num_steps or self._saves_async:
                    self._fit.settle()
                self.position = self._fit.position
            if step_metrics is None:
                return self._taken(is_over=True)
            self._status.num_changes += 1
            self._steps.append(step_metrics)
            if self._saves_async:
                self._status.saver.prepare(self._status.module, optimizer, stall_s=self._status.stall_s)
                self._saves_async = False
        return self._taken(is_over=False)

    def _taken(self, *, is_over: bool) -> FitSteps:
        assert self._fit is not None, "fit_begin comes first"
        # The driver has the evaluations, and they would grow with the run.
        place = replace(self._fit.position, evaluations=())
        return FitSteps(tuple(self._steps), place, is_over, self._fit.data_loader.dropped)

    def note_evaluation(self, evaluation: Mapping[str, Any]) -> tuple[str, ...]:
        """Add an evaluation to the run's position, which the run's saves hold. No collective.

        Args:
            evaluation: Its step and metrics, as an entry of `Position.evaluations`.

        Returns:
            Columns of the data that this rank has dropped in its last evaluation, since the model does not take them.
        """
        assert self._fit is not None, "fit_begin comes before note_evaluation"
        where = self._fit.position
        self.position = replace(where, evaluations=(*where.evaluations, evaluation))
        self._fit.data_loader.position = self.position
        return self._dropped

    def evaluate(self, plan: EvaluationPlan | None) -> Generator[None, None, dict[str, float]]:
        """Compute loss and metrics over data. Collective.

        Random generators have the same state after the evaluation as before, so that a run's steps do not depend on it.

        A rank that stops iterating before the end leaves the others waiting in a forward.

        Args:
            plan: The evaluation; `None` for that of the run, whose data is open.

        Yields:
            `None` after every few batches.

        Returns:
            The values.
        """
        with self._status.running("forward", "evaluate"):
            module = self._status.module
            plan = plan or (self._fit.evaluation if self._fit else None)
            assert plan is not None, "fit_begin comes first"
            run = Evaluation(plan, self._status.device, InputBounds.of(module).for_loss(plan.loss), module)
        own: Mapping[str, Any] | None = None
        keeps = True
        try:
            while True:
                with self._status.running("forward", "evaluate", keeps_gathered=True):
                    keeps = keeps and self._status.keep_gathered(plan.summon_full_params)
                    outer = random_state()
                    restore_random_state(own or outer)
                    try:
                        if not all(run.step(self._status.module) for _ in range(_BATCHES_A_STEP)):
                            return run.values()
                    finally:
                        own = random_state()
                        restore_random_state(outer)
                yield
        finally:
            self._dropped = run.data_loader.dropped
            run.data_loader.close()
            self._status.release_gathered()

    def fit_end(self) -> FitSteps | None:
        """Release the run's data, and return the steps since the last `fit_steps` began. No collective.

        Returns:
            The steps, which the driver lacks if that call raised; `None` if no run has begun.
        """
        if self._fit is None:
            return None
        self._fit.data_loader.close()
        taken, self._fit, self._steps = self._taken(is_over=True), None, []
        return taken


def _agreed(position: Position | None) -> Position | None:
    """Return the position, after a check that it is the same on every rank. Collective.

    Raises:
        ValueError: On every rank: ranks are at different steps.
    """
    said = agree(None, None if position is None else position.as_dict())
    if any(one != said[0] for one in said):
        raise ValueError(f"ranks are at different steps of the run: {[one and one['num_steps'] for one in said]}")
    return position


def _newest(directory: str) -> dict[str, Any] | None:
    path = newest_save(directory, "step-")
    position = None if path is None else position_of(path)
    return None if position is None else {"path": path, "run": position.run, "num_steps": position.num_steps}


def _check_own_saves(directory: str, here: Position) -> bool:
    """Return True if a directory holds the save of a run's position.

    Raise CheckpointError if the run would overwrite or remove another run's saves there, or overwrite a save of its own
    to which files were added: that save would be refused in the middle of the run.

    A directory whose save the run itself removed may still hold files that the user added: such a directory is no save.
    """
    storage, has_save = storage_of(directory), False
    if storage.find(directory).kind != "directory":
        return False
    for name in storage.list_names(directory):
        path = join_path(directory, name)
        if not _STEP_NAME.fullmatch(name) or is_left_over(path):
            continue
        is_save, number = is_checkpoint(path), int(name.removeprefix("step-"))
        found = position_of(path) if is_save else None
        if is_save and (found is None or found.run != here.run):
            what = f"holds {name} of another run: save to another directory, or resume that run: load it, resume=True"
            raise CheckpointError(what, path=directory)
        # The same save has another epoch, and step of it, if an epoch's end was found after it.
        same = (here.num_steps, here.num_steps, here.loss, here.evaluations)
        is_held = found is not None and (number, found.num_steps, found.loss, found.evaluations) == same
        has_save = has_save or is_held
        if number >= here.num_steps and not is_held:
            check_destination(path, overwrite=True)
    return has_save
