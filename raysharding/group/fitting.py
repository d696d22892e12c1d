"""`Fitting`: training over data, in one call."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from raysharding.checkpoint.uri import normal_path
from raysharding.data import Collate
from raysharding.distributed.evaluating import EvaluationPlan
from raysharding.distributed.feeding import FeedPlan
from raysharding.distributed.fitting import FitPlan
from raysharding.distributed.training import check_max_grad_norm
from raysharding.group.call import Call, Collect
from raysharding.group.dataset import Given, given
from raysharding.group.fit_report import FitReport
from raysharding.group.fit_run import Callback, FitOptions, FitRun
from raysharding.group.handle import blocking, driver_handle, handle
from raysharding.group.results import LastValue
from raysharding.group.training import Training


class Fitting(Training):
    """What `ShardedModelGroup` trains over data with."""

    @driver_handle
    @blocking
    def fit(
        self,
        data: Any,
        *,
        batch_size: int,
        epochs: int = 1,
        max_steps: int | None = None,
        shuffle: bool = False,
        seed: int = 0,
        columns: Sequence[str] | None = None,
        collate: Collate | None = None,
        loss: Callable[..., Any] | None = None,
        max_grad_norm: float | None = None,
        gradient_accumulation_steps: int = 1,
        on_empty: Literal["skip", "raise"] = "skip",
        prefetch: int = 2,
        save_to: str | os.PathLike[str] | None = None,
        save_every: int | None = None,
        keep_last: int | None = None,
        async_save: bool = False,
        resume: bool = False,
        callbacks: Sequence[Callback] = (),
        progress: bool | None = None,
    ) -> FitReport:
        """Train over data: each rank reads its own rows, and the steps are those that one process would take.

        What a step is fed depends on data, batch size and seed, and not on the number of ranks. Ctrl-C ends the run
        after the steps under way (those of half a second), with the group READY; `resume=True` goes on from there. A
        group that breaks is restarted up to `max_restarts` times (see `from_checkpoint`); the run goes on from its last
        save, or its beginning, which is saved first where no file holds it; random generators go back with it.

        One `fit` runs on a group at a time. Meanwhile other threads and `callbacks` may call what leaves the model as
        it is (`forward`, `generate`, `evaluate`, `state_dict`, `save`, `status` and the like): it runs between two
        steps, in the order of submission, and so does a `call`, whatever its function changes. What would change the
        model (another `fit`, `train_step`, `forward_backward`, `optim_step`, `zero_grad`, `set_optimizer`,
        `set_scheduler`, `load`, `restart`) is refused by a `GroupError`, and the run goes on. `interrupt` ends it after
        the steps under way, by `CallCancelledError`; `shutdown` ends it with the group.

        Args:
            data: A `ray.data.Dataset`, whose blocks are computed once, in the object store; a Parquet file or a
                directory of them, as a path or URI that all ranks' nodes read; a list of rows, or anything with `len`
                and `[number]`; a mapping of names to columns; an iterable that pickles, or a function that returns one,
                which every rank runs through. A row is usually a mapping of names to numbers, lists or tensors.
            batch_size: Rows of a step, all ranks together. The last step of an epoch has what is left.
            epochs: How often the data is gone through.
            max_steps: Steps after which the run ends, those before a resume with them. Default: no such end.
            shuffle: Whether rows come in a random order, which differs from epoch to epoch: single rows of a list; of
                Parquet files and datasets row groups or blocks, their rows in windows of 512, and every batch holds
                rows of as many places as it has. Not for an iterable.
            seed: Of that order.
            columns: Columns of Parquet files or datasets to read. Default: all.
            collate: Makes a batch of a list of rows: a mapping of the model's keyword arguments, a tuple of its
                positional ones, or one tensor; transformers' data collators do. It runs between the steps. Default:
                rows are stacked column by column.
            loss: As for `train_step`.
            max_grad_norm: As for `train_step`.
            gradient_accumulation_steps: As for `train_step`: parts that a batch is taken in.
            on_empty: What becomes of a batch in which nothing counts, because all its labels are masked. `"skip"`: all
                ranks leave it out alike; it takes its number and its place in the data, optimizer and schedule take no
                step, its `loss` and `grad_norm` are NaN in the report, whose `skipped` has its number, and a warning
                says so once. `"raise"`: it ends the run with an `EmptyBatchError`. Default skip.
            prefetch: Batches that each rank reads ahead; two at least where `collate` is not given.
            save_to: Directory or URI of saves, `step-<number>` each, as for `save`. Default:
                nothing is saved. It may hold saves of the same run, and no others.
            save_every: Steps between two saves; one more comes at the end. Default: only that.
            keep_last: Saves that are kept; older ones are removed. Default: all.
            async_save: Write saves in the background, while the ranks train on; see `save`. Default no.
            resume: Go on where the last run stands: in this group, or in the save that it was made from.
            callbacks: Each is given a `FitStep` for every step, in the thread of `fit`, which hears of quick steps many
                at a time: the ranks, and what a callback asks of them, stand after the last of those. They take no
                steps meanwhile. What a callback raises ends the run, with the group READY, and `fit` raises it; where a
                call of the callback broke the group, that is like a step that did. One with a `close` method is closed
                at the end.
            progress: Whether to show a bar. Default: in a terminal or notebook.

        Returns:
            What became of it: losses, rates, restarts, the last save.

        Raises:
            ValueError: A bad argument, no optimizer, or `resume=True` where there is nothing to go on with.
            TypeError: `data` is none, or does not pickle.
            DataError: The data cannot be read, has no rows, or is not what a resumed run was fed before. The group is
                READY.
            CheckpointError: A save failed, in the background too (no later call raises that again), or `save_to` holds
                the saves of another run.
            CallCancelledError: `interrupt` ended the run.
            GroupError: Ranks failed, more often than `max_restarts` allows; or another `fit` runs on the group.
        """
        self._require_optimizer("fit")
        check_max_grad_norm(max_grad_norm)
        with self._fits.running(self.name):
            found = self._given(data, columns, collate)
            feed = FeedPlan(
                source=found.source,
                batch_size=batch_size,
                epochs=epochs,
                max_steps=max_steps,
                shuffle=shuffle,
                seed=seed,
                collate=collate,
                prefetch=prefetch,
                stall_s=self._channel.timeouts.load_stall_s,
                run=secrets.token_hex(8),
            )
            plan = FitPlan(feed, loss, max_grad_norm, gradient_accumulation_steps, on_empty)
            target = None if save_to is None else normal_path(os.fspath(save_to))
            options = FitOptions(target, save_every, keep_last, async_save, resume, callbacks, progress)
            run = FitRun(
                self,
                lambda: self._channel,
                plan,
                found,
                options,
                self._fits,
                self._restart,
                self._spec.max_restarts,
            )
            return run.run()

    @handle
    def evaluate(
        self,
        data: Any,
        *,
        batch_size: int,
        metrics: Mapping[str, Callable[..., Any]] | None = None,
        loss: Callable[..., Any] | None = None,
        with_loss: bool = True,
        max_steps: int | None = None,
        columns: Sequence[str] | None = None,
        collate: Collate | None = None,
        prefetch: int = 2,
    ) -> Call:
        """Compute loss and metrics over data in eval mode, without gradients: those of one process on the same rows.

        Args:
            data: As for `fit`.
            batch_size: Rows of a forward, all ranks together.
            metrics: Name → `metric(output, ...)`, which takes of the batch's arguments those that it names, and returns
                (sum, count) over its rows: the value is the sum of all sums by that of all counts. Runs on the ranks.
            loss: As for `train_step`.
            with_loss: Whether to compute the loss; without it rows need no labels. Default yes.
            max_steps: Batches after which to end. Default: all.
            columns: As for `fit`.
            collate: As for `fit`.
            prefetch: As for `fit`.

        Returns:
            `{"loss": float, <metric>: float, ..., "num_rows": float}`; NaN where nothing counted in any batch: one in
            which nothing counts adds nothing to the loss.

        Raises:
            ValueError: A bad argument.
            TypeError: `data` is none, or does not pickle.
            DataError: The data cannot be read, or has no rows. The group is READY.
            GroupError: The model or a metric raised, or ranks failed.
        """
        found, members = self._given(data, columns, collate), self._channel.members
        feed = FeedPlan(
            source=found.source,
            batch_size=batch_size,
            max_steps=max_steps,
            collate=collate,
            prefetch=prefetch,
            stall_s=self._channel.timeouts.load_stall_s,
        )
        plan = EvaluationPlan(feed, loss, with_loss, dict(metrics or {}))
        last = LastValue()
        found.lend(members)
        call = self._channel.submit_same("evaluate", plan, keep_step=last.keep, collect=Collect(last.collect))
        call.when_done(lambda _: found.take_back(members))
        return call.keep_alive(self)

    def _given(self, data: Any, columns: Sequence[str] | None, collate: Collate | None) -> Given:
        # A collate function may make anything of a column; without one it is the argument of its name.
        whole = self._launched.bounds.num_ids if collate is None else ()
        return given(data, columns, self._channel.timeouts.load_stall_s, whole)
