"""`FittingRank`: a rank that trains over data, and knows where the run stands."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from raysharding.checkpoint import is_checkpoint, is_left_over
from raysharding.checkpoint.location import storage_of
from raysharding.checkpoint.uri import join_path
from raysharding.distributed.agreement import agree, from_rank_0
from raysharding.distributed.evaluating import Evaluation, EvaluationPlan
from raysharding.distributed.fitting import Fit, FitPlan, StepFigures
from raysharding.distributed.random_state import random_state, restore_random_state
from raysharding.distributed.training_files import Position, run_of
from raysharding.errors import CheckpointError
from raysharding.models import InputBounds
from raysharding.worker.training import TrainingRank

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

    steps: tuple[StepFigures, ...]
    """In order; fewer than asked for at the end of the run."""
    position: Position
    """Where the run stands after them."""
    is_over: bool
    """Whether there are no more."""


class FittingRank(TrainingRank):
    """A rank that trains over data."""

    _fit: Fit | None = None
    _saves_async = False

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
        with self._running("fit", "fit"):
            self.fit_end()
            found = _agreed(self.position) if resume else None
            if position is not None and (found is None or found.run != position.run):
                found = position
            if resume and found is None:
                raise ValueError(
                    "resume=True, but there is no run to go on with: load a checkpoint that fit saved, or leave it out"
                )
            self._fit = Fit(plan, self.device, found, InputBounds.of(self.module))
            self.position = self._fit.position
            self._saves_async = async_save
            if save_to is not None:
                here = self.position
                from_rank_0(lambda: _check_own_saves(save_to, here))
            return FitStart(self.position, self._fit.feed.total_steps, self.is_saved)

    def fit_steps(self, num_steps: int) -> FitSteps:
        """Take steps, as many as are left at most. Collective.

        Args:
            num_steps: How many.
        """
        optimizer = self._require_optimizer("fit")
        assert self._fit is not None, "fit_begin comes before fit_steps"
        steps: list[StepFigures] = []
        for _ in range(num_steps):
            with self._running("train_step", "fit_step"):
                self._begin_update()
                figures = self._fit.step(self.module, optimizer)
                self.position = self._fit.position
            if figures is None:
                return FitSteps(tuple(steps), self.position, is_over=True)
            steps.append(figures)
            if self._saves_async:
                self._saver.prepare(self.module, optimizer, stall_s=self._stall_s)
                self._saves_async = False
        return FitSteps(tuple(steps), self._fit.position, is_over=False)

    def evaluate(self, plan: EvaluationPlan) -> Iterator[dict[str, float] | None]:
        """Compute loss and metrics over data; see `distributed.evaluating`. Collective: every rank iterates to the end.

        Args:
            plan: The run.

        Yields:
            `None` after every few batches, in the end the values.
        """
        with self._running("forward", "evaluate"):
            run = Evaluation(plan, self.device, InputBounds.of(self.module))
        try:
            is_over = False
            while not is_over:
                with self._running("forward", "evaluate"):
                    is_over = not all(run.step(self.module) for _ in range(_BATCHES_A_STEP))
                    values = run.values() if is_over else None
                yield values
        finally:
            run.feed.close()

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
            self._fit.feed.close()
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
