"""`FitRun`: the driver's part of a run over data: the number of steps per call, saves, restarts, and reports.

Each call makes the ranks take as many steps as begin within half a second, so that the round trip to the driver costs
a run with quick steps nothing. A call ends at a step after which there is a save, an evaluation, or a callback that
says `every`.
"""

from __future__ import annotations

import math
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Literal

from raysharding.arguments import check_int, for_fields
from raysharding.checkpoint.storage import join_path
from raysharding.data import Position
from raysharding.distributed.training import DataPlan, FitPlan, StepMetrics, check_max_grad_norm
from raysharding.errors import CheckpointError, GroupError
from raysharding.group.calls import Call, Client, ProgressBar, collect_all, output_path, progress_bar
from raysharding.group.cluster import tell, warn
from raysharding.group.fit.callbacks import RayGauges
from raysharding.group.fit.datasets import DatasetHandle, group_dataset, pinned_for
from raysharding.group.fit.evaluations import EvalOptions, Evaluations, eval_options, steps_to, tell_dropped
from raysharding.group.fit.report import FitReport, FitStep
from raysharding.group.fit.restarts import Restarts
from raysharding.group.fit.run_lock import RunLock
from raysharding.group.fit.stop_signal import NotedInterrupts, StopSignal
from raysharding.group.launch import RestartReport, RunningGroup
from raysharding.group.messages import GroupState
from raysharding.worker import FitStart, FitSteps

_CALL_S = 0.5
_MAX_STEPS = 200

Callback = Callable[[FitStep], object]
"""Called on the driver with each step, or, if it has an attribute `every`, with each step that is a multiple of it and
before the next one is taken; if it has a `close` method, that is called at the end."""


@dataclass(frozen=True)
class FitOptions:
    """The driver's options of a run."""

    save_to: str | None
    """Directory of the saves; `None` for no saves."""
    save_every: int | None
    """Number of steps between two saves; `None` for one save at the end."""
    keep_last: int | None
    """Number of saves to keep; `None` for all."""
    async_save: bool
    """True if saves are written in the background."""
    resume: bool | Literal["latest"]
    """True if the run continues where the last run ended; `latest`: after the newest save in `save_to`, if any."""
    callbacks: Sequence[Callback]
    """Callables that are called with each step."""
    progress: bool | None
    """True if a bar is shown; `None`: in a terminal or notebook, and lines elsewhere."""
    save_on_signal: bool = False
    """True if SIGTERM or Ctrl-C ends the run with a save."""
    evaluation: EvalOptions | None = None
    """Evaluations between the steps; `None` for none."""

    def __post_init__(self) -> None:
        """Refuse invalid options.

        Raises:
            ValueError: `save_every`, `keep_last` or a callback's `every` is not a positive int; `resume` is unknown; an
                option of saves is given without `save_to`; `save_on_signal` outside the main thread.
        """
        for every in self.callback_intervals:
            check_int("a callback has every", every)
        for name in ("save_every", "keep_last"):
            if (value := getattr(self, name)) is not None:
                check_int(name, value)
        if self.resume not in (True, False, "latest"):
            raise ValueError(f"resume={self.resume!r}: give True, False or 'latest'")
        of_saves = {
            "keep_best": None if self.evaluation is None else self.evaluation.keep_best,
            "save_every": self.save_every,
            "keep_last": self.keep_last,
            "resume": "latest" if self.resume == "latest" else None,
            "save_on_signal": self.save_on_signal or None,
        }
        for name, value in of_saves.items():
            if value is not None and self.save_to is None:
                raise ValueError(f"{name}={value!r}, but nothing is saved: give a directory, save_to=")
        if self.save_on_signal and threading.current_thread() is not threading.main_thread():
            raise ValueError(
                "save_on_signal=True outside the main thread, where Python handles no signals: call fit in the main "
                "thread, or let a handler of your own call group.interrupt()"
            )

    @property
    def callback_intervals(self) -> list[int]:
        """The `every` of the callbacks that have one."""
        return [every for callback in self.callbacks if (every := getattr(callback, "every", None)) is not None]


def run_fit(running: RunningGroup, lock: RunLock, options: Mapping[str, Any], **files: Any) -> FitReport:
    """Train, by the arguments of `ShardedModelGroup.fit`.

    Args:
        running: The group.
        lock: Held while the run lasts.
        options: The arguments.
        **files: `save`, `restart` and `load` of the group.
    """
    client, eval_data, save_to = running.client, options["eval_data"], options["save_to"]
    check_max_grad_norm(options["max_grad_norm"])
    with lock.running(client):
        dataset = group_dataset(running, options["data"], options)
        data_plan = DataPlan(
            source=dataset.source,
            stall_s=client.timeouts.load_stall_s,
            run=secrets.token_hex(8),
            **for_fields(DataPlan, options),
        )
        held_out = None if eval_data is None else group_dataset(running, eval_data, options)
        evaluation = eval_options(held_out, data_plan, options)
        given = {
            **options,
            "data": data_plan,
            "evaluation": None if evaluation is None else evaluation.plan,
            "save_to": None if save_to is None else output_path("save_to", save_to),
        }
        plan = FitPlan(**for_fields(FitPlan, given))
        fit_options = FitOptions(**for_fields(FitOptions, {**given, "evaluation": evaluation}))
        return FitRun(client, running.spec.max_restarts, plan, dataset, fit_options, lock, **files).run()


@dataclass
class FitRun:
    """One call of `fit`."""

    client: Client
    """The group whose model is trained."""
    max_restarts: int
    """Largest number of restarts."""
    plan: FitPlan
    """The ranks' part of the run."""
    data: DatasetHandle
    """The data that the ranks read."""
    options: FitOptions
    """The driver's options."""
    lock: RunLock
    """The lock that reports whether the run is to end early."""
    save: Callable[..., object]
    """Saves the model, as `ShardedModelGroup.save` does."""
    restart: Callable[[], RestartReport]
    """Restarts the group."""
    load: Callable[[str], Call]
    """Begins the load of a save, as `ShardedModelGroup.load` does."""

    def __post_init__(self) -> None:
        self._stop = StopSignal(self.client, is_wanted=self.options.save_on_signal)
        self._interrupts = NotedInterrupts(self.client)
        self._gauges = RayGauges(self.client.name)
        self._callbacks: list[Callback] = [self.lock.note, self._gauges, *self.options.callbacks]
        # Whoever stops the driver by a signal may have stopped the ranks as well.
        self._restarts = Restarts("fit", self.client, self.max_restarts, self.restart, lambda: not self._stop.came)
        self._started = time.monotonic()
        self._beginning: Position | None = None
        """Position at which the run began, or which it resumed; `None` before the ranks have opened the data."""
        self._position: Position
        self._generators: list[Mapping[str, Any]] = []
        self._total: int | None = None
        self._history: dict[str, list[float]] = {}
        self._num_rows = self._num_tokens = 0
        self._wait_s = self._save_s = 0.0
        self._step_s = _CALL_S
        self._beginning_is_saved = True
        self._saved_step: int | None = None
        """Step of the last save, which may still be written; `None` if the next save is due in any case."""
        self._paths: set[str] = set()
        self._skipped: list[int] = []
        self._warned: set[str] = set()
        evaluation = self.options.evaluation
        self._evaluations = Evaluations(self.client, evaluation)
        self._datasets = [self.data] if evaluation is None else [self.data, evaluation.data]
        self._last: FitStep | None = None

    def run(self) -> FitReport:
        """Run all steps, and return the report."""
        with self._stop:
            report = self._run()
        if self._stop.came:
            self._tell_end("SIGTERM", "the program ends with status 0")
            raise SystemExit(0)
        return report

    def _tell_end(self, cause: str, then: str) -> None:
        saved = f", saved in {self._save_path}" if self._saved_step == self._position.num_steps else ""
        tell(f"fit: {cause} ended the run after step {self._position.num_steps}{saved}; {then}")

    def _run(self) -> FitReport:
        try:
            resume = self.options.resume
            self._begin(resume=self._load_latest() if resume == "latest" else resume)
            self._save_beginning()
            done = self._position.num_steps
            with progress_bar(self.options.progress, "fit", "steps", self._total, done) as bar:
                self._restarts.run(lambda: self._steps(bar), lambda done: self._continue(done, bar))
        except BaseException as error:
            self._end(error)
            raise
        else:
            self._end(None)
        finally:
            if self._beginning is not None:
                self.lock.last_report = self._report()
        assert self.lock.last_report is not None, "the run has begun"
        return self.lock.last_report

    def _report(self) -> FitReport:
        """Return the report of the run so far."""
        self._align_history()
        committed = [None, *(path for path in self.client.connection.snapshot.saves if path in self._paths)]
        return FitReport(
            num_steps=self._position.num_steps,
            first_step=self._first_step,
            history={name: tuple(values) for name, values in self._history.items()},
            num_rows=self._num_rows,
            num_tokens=self._num_tokens,
            seconds=time.monotonic() - self._started,
            wait_s=self._wait_s,
            save_s=self._save_s,
            num_restarts=self._restarts.number,
            saved=committed[-1],
            skipped=tuple(self._skipped),
            evaluations=self._evaluations.done,
            best=self._evaluations.best,
            stopped=self._evaluations.stopped,
            earlier_loss=self._beginning.loss if self._beginning is not None else None,
        )

    @property
    def _first_step(self) -> int:
        assert self._beginning is not None, "_begin comes first"
        return self._beginning.num_steps

    def _load_latest(self) -> bool:
        """Load the newest save in `save_to`, unless the ranks hold it; return False if there is none."""
        latest: tuple[str, bool] | None = self.client.submit_same("latest_save", self.options.save_to).result()
        if latest is None:
            return False
        path, is_held = latest
        if not is_held:
            self.load(path).result()
        return True

    def _begin(self, *, resume: bool) -> None:
        """Make the ranks open the data, and get their position in the run."""
        if resume:
            self.client.pending.wait(self.plan.data.stall_s)  # one of them may be the save of this step
        with pinned_for(self._datasets, self.client):
            arguments = (self.plan, self._beginning, resume, self.options.save_to, self.options.async_save)
            start: FitStart = self.client.submit_same("fit_begin", *arguments).result()
            self._position, self._total = start.position, start.total_steps
            self._evaluations.begin(start.position)
            if start.has_save:
                self._saved_step = start.position.num_steps
            if start.warning is not None:
                warn(start.warning)
        if self._beginning is None:
            self._beginning, self._beginning_is_saved = start.position, start.is_saved
            if self.max_restarts:
                self._generators = self.client.submit_same("generators", collect=collect_all).result()
        elif replace(self._position, evaluations=()) == replace(self._beginning, evaluations=()):
            # The generator states of the beginning may be in no file, and a rank that replaced a lost one has its own.
            own = [(state,) for state in self._generators]
            call_s = self.client.timeouts.call_s
            self.client.submit_each("restore_generators", own, deadline_s=call_s).result()

    def _save_beginning(self) -> None:
        """Save the beginning of the run unless files hold it: with `max_restarts`, a restart may go back to it.

        Raises:
            ValueError: The beginning is not saved, and there is no `save_to`.
        """
        if not self.max_restarts or self._beginning_is_saved:
            return
        if self.options.save_to is None:
            raise ValueError(
                f"max_restarts={self.max_restarts}, but the group was trained, or got weights by copy_to, since it "
                "was loaded or saved: a restart would lose that. Save the group first, with its optimizer, or pass "
                "save_to="
            )
        self._save(in_background=False)
        self._beginning_is_saved = True

    def _end(self, error: BaseException | None) -> None:
        """Make the ranks, if any, release the data, and close the callbacks.

        Args:
            error: The error that ended the run; errors that are raised here become notes on it.
        """
        if error is not None and self._paths and CheckpointError in (type(error), type(error.__cause__)):
            # A full disk fails every save of the run in progress: they become notes here, and later calls do not raise.
            for other in self.client.pending.take_failed(self._paths, self.plan.data.stall_s):
                error.add_note(f"raysharding: another save of the run failed as well: {other}")
        closes = [close for callback in self._callbacks if (close := getattr(callback, "close", None)) is not None]
        errors = [] if error is None else [error]
        for close in (self._release, *closes):
            try:
                close()
            except Exception as raised:  # noqa: BLE001 - the other callbacks must be closed as well
                errors.append(raised)
        for later in errors[1:]:
            errors[0].add_note(f"raysharding: then {type(later).__name__}: {later}")
        if error is None and errors:
            raise errors[0]

    def _release(self) -> None:
        if self.client.state in (GroupState.READY, GroupState.BUSY):
            replies: list[FitSteps | None] = []
            with suppress(GroupError):  # if the group breaks at this moment, the next call reports it
                replies = self.client.submit_same("fit_end", collect=collect_all, is_last=True).result()
            for data in self._datasets:
                data.unpin(self.client)
            steps = [reply for reply in replies if reply is not None]
            if self._beginning is not None and steps:  # else `fit_begin` raised, after some ranks had made their run
                self._note_unreported(steps)

    def _note_unreported(self, replies: Sequence[FitSteps]) -> None:
        """Record and report the steps of a call before the one that raised; a resumed run continues after them.

        Args:
            replies: Steps of the last call, of each rank.
        """
        number = replies[0].position.num_steps - self._position.num_steps
        self._position = replies[0].position
        # The error may have been of some ranks alone: then the others have taken more steps.
        if number and all(reply.position == self._position for reply in replies):
            unreported = [replace(reply, steps=reply.steps[-number:]) for reply in replies]
            for step in self._note(unreported, number * self._step_s):
                self._call_back(step)

    def _continue(self, done: RestartReport, bar: ProgressBar) -> None:
        """Wait for the group's background saves after a restart, and continue from the ranks' position."""
        try:
            self.client.pending.wait(self.plan.data.stall_s)
        except (GroupError, CheckpointError) as lost:
            tell(f"fit: {lost}")
        self._saved_step = None
        assert self._beginning_is_saved, "_save_beginning comes first: the restart may have loaded the beginning"
        self._begin(resume=True)
        self._align_history()
        self._skipped = [number for number in self._skipped if number <= self._position.num_steps]
        tell(f"fit: continues after step {self._position.num_steps} (reloaded {done.checkpoint}: {done.why})")
        bar.update(self._position.num_steps - bar.n)

    def _align_history(self) -> None:
        """Make the history as long as the run: steps that were not reported to the driver are NaN."""
        kept = self._position.num_steps - self._first_step
        for values in self._history.values():
            del values[kept:]
            values.extend([math.nan] * (kept - len(values)))

    def _steps(self, bar: ProgressBar) -> None:
        """Run the steps up to the end of the run, and save.

        Raises:
            CallCancelledError: `interrupt` was called.
            KeyboardInterrupt: After Ctrl-C, with all that belongs to the steps that were taken. Its `__cause__` is the
                error that came in these, such as that of a save.
        """
        with self._interrupts:
            try:
                self._run_steps(bar)
            except Exception as error:
                if self._interrupts.came:  # a program that catches the interrupt must hear of a save that failed
                    self._saved_step = None
                    self._tell_end("Ctrl-C", f"then came {type(error).__name__}: {error}")
                raise
            if self._interrupts.came:
                self._tell_end("Ctrl-C", "resume=True continues from there")

    def _run_steps(self, bar: ProgressBar) -> None:
        # Before a resume or restart, an error may have come between the last step and its evaluation or save.
        is_over = self._after_steps([], bar, is_over=False)
        while not is_over:
            step = self._position.num_steps
            self.lock.check_interrupted(f"interrupt() ended fit after step {step}; resume=True continues from there")
            begun = time.monotonic()
            replies: list[FitSteps] = self.client.submit_same(
                "fit_steps", self._num_next(), collect=collect_all
            ).result()
            seconds = time.monotonic() - begun
            is_over, self._position = replies[0].is_over, replies[0].position
            steps = self._note(replies, seconds) if replies[0].steps else []
            is_over = self._after_steps(steps, bar, is_over=is_over)
        self.client.pending.wait(self.plan.data.stall_s)

    def _after_steps(self, steps: Sequence[FitStep], bar: ProgressBar, *, is_over: bool) -> bool:
        """Evaluate, report and save after steps, as is due; return True if the run ends."""
        self._tell_steps(steps, bar, is_end=is_over or self._position.num_steps == self._total)
        is_interrupted = self._interrupts.came
        is_over = is_over or self._evaluations.stopped is not None or self._stop.came
        is_end = is_over or (is_interrupted and self.options.save_on_signal)
        if self.options.save_to is not None and self._is_due(is_over=is_end):
            self._save(in_background=self.options.async_save)
        return is_over or is_interrupted

    def _num_next(self) -> int:
        """Return the number of steps that the ranks take in the next call."""
        number = min(_MAX_STEPS, math.ceil(_CALL_S / max(self._step_s, 1e-6)))
        intervals = [every for every in (*self.options.callback_intervals, self.options.save_every) if every]
        ends = [*(steps_to(self._position, every) for every in intervals), self._evaluations.steps_left(self._position)]
        return min([number, *(end for end in ends if end is not None)])

    def _note(self, replies: Sequence[FitSteps], seconds: float) -> list[FitStep]:
        """Record the results of steps, and return them for the bar and the callbacks."""
        steps = list(zip(*(reply.steps for reply in replies), strict=True))
        first = self._position.num_steps - len(steps)
        self._step_s = seconds / len(steps)
        rows, tokens = _sums(step for ranks in steps for step in ranks)
        self._num_rows, self._num_tokens = self._num_rows + rows, self._num_tokens + tokens
        self._wait_s += max(sum(step.wait_s for step in reply.steps) for reply in replies)
        self._gauges.set("wait_s", self._wait_s)
        self._gauges.set("save_s", self._save_s)
        tell_dropped((reply.dropped for reply in replies), "the data", self._warned)
        noted = []
        for number, ranks in enumerate(steps, first + 1):
            for name, value in ranks[0].metrics.items():
                self._history.setdefault(name, []).append(value)
            own_rows, own_tokens = _sums(ranks)
            rates = rows / seconds, tokens / seconds
            self._warn_of(number, ranks[0])
            is_skipped = bool(ranks[0].skipped)
            noted.append(FitStep(number, ranks[0].epoch, ranks[0].metrics, own_rows, own_tokens, *rates, is_skipped))
        return noted

    def _tell_steps(self, steps: Sequence[FitStep], bar: ProgressBar, *, is_end: bool) -> None:
        """Evaluate if that is due, and report steps to the bar and the callbacks.

        The end of an iterable may be found after its last step was reported; the step is then reported again, with its
        evaluation.
        """
        for step in steps[:-1]:
            self._tell_step(step, bar)
        last = self._last = steps[-1] if steps else self._last
        if self._evaluations.is_due(self._position, is_end=is_end):
            values = self._evaluations.evaluate(self._position, self._save_path)
            self._saved_step = None  # a save of this step, if there is one, lacks the evaluation
            # Before a resume or restart steps may have been taken that were not reported here.
            if last is not None and last.num_steps == self._position.num_steps:
                self._tell_step(replace(last, metrics={**last.metrics, **values}), bar)
        elif steps:
            self._tell_step(steps[-1], bar)

    def _tell_step(self, step: FitStep, bar: ProgressBar) -> None:
        self._last = step
        rate = f"{step.tokens_per_s:,.0f} tokens/s" if step.num_tokens else f"{step.rows_per_s:,.1f} rows/s"
        bar.set_postfix_str(f"loss {step.metrics['loss']:.4g}, {rate}", refresh=False)
        bar.update(step.num_steps - bar.n)
        self._call_back(step)

    def _call_back(self, step: FitStep) -> None:
        for callback in self._callbacks:
            if not step.num_steps % (getattr(callback, "every", None) or 1):
                callback(step)

    def _warn_of(self, number: int, step: StepMetrics) -> None:
        """Warn once that steps are skipped, and once that the loss is not finite."""
        loss = step.metrics["loss"]
        if step.skipped:
            self._skipped.append(number)
            what = f"step {number} was skipped, as others like it will be (see on_empty=): {step.skipped}"
        elif not math.isfinite(loss):
            what = f"the loss is {loss} from step {number} on"
        else:
            return
        if (kind := "skipped" if step.skipped else "loss") not in self._warned:
            self._warned.add(kind)
            warn(f"fit: {what}")

    def _is_due(self, *, is_over: bool) -> bool:
        every, done = self.options.save_every, self._position.num_steps
        if done == self._saved_step or (done == 0 and self._beginning_is_saved):
            return False
        is_asked = every is not None and done > 0 and not done % every
        return is_over or is_asked or self._evaluations.is_best(self._save_path)

    @property
    def _save_path(self) -> str:
        return join_path(str(self.options.save_to), f"step-{self._position.num_steps}")

    def _save(self, *, in_background: bool) -> None:
        begun = time.monotonic()
        options, number, path = self.options, self._position.num_steps, self._save_path
        # Where the loss or the gradient is NaN, the weights may be, too: good saves are not removed for them.
        metrics = {} if self._last is None else self._last.metrics
        is_finite = all(math.isfinite(metrics.get(name, 0.0)) for name in ("loss", "grad_norm"))
        keep_last = options.keep_last if is_finite else None
        # An existing save is of this run, else rank 0 had refused it: a run that went back repeats the same steps.
        self.save(path, overwrite=True, keep_last=keep_last, async_save=in_background)
        self._saved_step = number
        self._paths.add(path)
        self._save_s += time.monotonic() - begun
        self._gauges.set("save_s", self._save_s)


def _sums(steps: Iterable[StepMetrics]) -> tuple[int, int]:
    kept = list(steps)
    return sum(step.num_rows for step in kept), sum(step.num_tokens for step in kept)
