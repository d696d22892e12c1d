"""`FitRun`: the driver's part of a run over data: how many steps at a time, saves, restarts, and what is told.

The ranks take some steps on each call, as many as begin within half a second, so that the way to the driver and back
costs a run with quick steps nothing; no call goes over a step that is to be saved.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Protocol, Self

from tqdm.auto import tqdm

from raysharding.checkpoint.storage import join_path
from raysharding.data import Position
from raysharding.distributed.training import FitPlan, StepMetrics
from raysharding.errors import CallCancelledError, CheckpointError, GroupError, GroupTakenOverError, RendezvousError
from raysharding.group.calls import Call, Collect, collect_all, collect_rank0, is_shown
from raysharding.group.cluster import tell
from raysharding.group.fit.callbacks import RayGauges
from raysharding.group.fit.datasets import DatasetHandle
from raysharding.group.fit.lock import FitLock
from raysharding.group.fit.report import FitReport, FitStep
from raysharding.group.recovery import RestartReport
from raysharding.group.supervision import Client, GroupState
from raysharding.worker import FitStart, FitSteps


class StepBar:
    """Steps of a run, with loss, rate and the time that is left."""

    def __init__(self, total: int | None, done: int, option: bool | None) -> None:
        """Show the bar.

        Args:
            total: Steps in all; `None` where nobody knows.
            done: Steps taken before.
            option: `True`: a bar; `False`: none; `None`: a bar in a terminal or notebook.
        """
        self._bar = tqdm(desc="fit", unit="step", total=total, initial=done, disable=not is_shown(option))

    def step(self, step: FitStep) -> None:
        """Go on by a step."""
        rate = f"{step.tokens_per_s:,.0f} tokens/s" if step.num_tokens else f"{step.rows_per_s:,.1f} rows/s"
        self._bar.set_postfix_str(f"loss {step.metrics['loss']:.4g}, {rate}", refresh=False)
        self._bar.update(1)

    def go_back(self, done: int) -> None:
        """A restart has lost some steps."""
        self._bar.update(done - self._bar.n)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()


_CALL_S = 0.5
_MAX_STEPS = 200

Callback = Callable[[FitStep], object]
"""Called on the driver after each step; one that has `close` is closed at the end."""


@dataclass(frozen=True)
class FitOptions:
    """What the driver does beside the steps."""

    save_to: str | None
    """Directory of the saves; `None`: none."""
    save_every: int | None
    """Steps between two saves; `None`: one at the end."""
    keep_last: int | None
    """Saves that are kept; `None`: all."""
    async_save: bool
    """Whether saves are written in the background."""
    resume: bool
    """Whether to go on where the last run stands."""
    callbacks: Sequence[Callback]
    """Told of each step."""
    progress: bool | None
    """Whether to show a bar; `None`: where somebody looks."""

    def __post_init__(self) -> None:
        """Refuse what no run can do."""
        for name in ("save_every", "keep_last"):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < 1):
                raise ValueError(f"{name}={value!r}: give a whole number, 1 or more")
            if value is not None and self.save_to is None:
                raise ValueError(f"{name}={value}, but nothing is saved: say where by save_to=")


class FitGroup(Protocol):
    """What a run asks of its group."""

    @property
    def name(self) -> str:
        """As in messages."""

    @property
    def state(self) -> GroupState:
        """Whether it may go on."""

    @property
    def saves(self) -> tuple[str, ...]:
        """Paths of the committed saves, oldest first."""

    @property
    def save(self) -> Callable[..., Any]:
        """Save the model."""

    def wait_for_save(self, stall_s: float | None = None) -> None:
        """Wait for the save in the background."""


class FitRun:
    """One call of `fit`."""

    def __init__(
        self,
        group: FitGroup,
        client: Callable[[], Client],
        plan: FitPlan,
        data: DatasetHandle,
        options: FitOptions,
        fits: FitLock,
        restart: Callable[[], RestartReport],
        max_restarts: int,
    ) -> None:
        """Begin nothing yet.

        Args:
            group: Whose model.
            client: Gives the way to its ranks, which a restart changes.
            plan: What the ranks do.
            data: What they read.
            options: What the driver does.
            fits: Says when the run is to end early.
            restart: Makes the group whole.
            max_restarts: How often the group is restarted.
        """
        self._group = group
        self._client = client
        self._plan = plan
        self._data = data
        self._options = options
        self._fits = fits
        self._restart_group = restart
        self._callbacks: list[Callback] = [RayGauges(group.name), *options.callbacks]
        self._max_restarts = max_restarts
        self._begun: Position | None = None
        self._generators: list[Mapping[str, Any]] = []
        self._position: Position | None = None
        self._total: int | None = None
        self._history: dict[str, list[float]] = {}
        self._num_rows = self._num_tokens = self._num_restarts = 0
        self._wait_s = self._save_s = 0.0
        self._step_s = _CALL_S
        self._begun_in_files = True
        self._asked: int | None = None
        self._paths: set[str] = set()
        self._skipped: list[int] = []
        self._warned: set[bool] = set()

    def run(self) -> FitReport:
        """Take all steps; see `ShardedModelGroup.fit`."""
        started = time.monotonic()
        try:
            self._begin(resume=self._options.resume)
            self._secure_the_beginning()
            with StepBar(self._total, self._place.num_steps, self._options.progress) as bar:
                self._steps_and_restarts(bar)
        except BaseException as error:
            self._end(error)
            raise
        self._end(None)
        committed = [path for path in self._group.saves if path in self._paths]
        return FitReport(
            num_steps=self._place.num_steps,
            first_step=self._first_step,
            history={name: tuple(values) for name, values in self._history.items()},
            num_rows=self._num_rows,
            num_tokens=self._num_tokens,
            seconds=time.monotonic() - started,
            wait_s=self._wait_s,
            save_s=self._save_s,
            num_restarts=self._num_restarts,
            saved=committed[-1] if committed else None,
            skipped=tuple(self._skipped),
        )

    @property
    def _place(self) -> Position:
        assert self._position is not None, "_begin comes first"
        return self._position

    @property
    def _first_step(self) -> int:
        assert self._begun is not None, "_begin comes first"
        return self._begun.num_steps

    def _begin(self, *, resume: bool) -> None:
        """Have the ranks look at the data, and find where they stand."""
        silent: GroupError | None = None
        try:
            self._data.pin(self._client().members)
        except GroupError as error:
            silent = error  # of a rank that is gone the next call tells more, once the supervision knows of it
        asked = (self._plan, self._begun, resume, self._options.save_to, self._options.async_save)
        start: FitStart = self._submit("fit_begin", *asked).result()
        self._position, self._total = start.position, start.total_steps
        if silent is not None:
            raise silent
        if self._begun is None:
            self._begun, self._begun_in_files = start.position, start.is_saved
            if self._max_restarts:
                self._generators = self._submit("generators", collect=collect_all).result()
        elif self._position == self._begun:
            # No file need hold what they were then, and a rank that has taken a lost one's place has its own.
            own = [(state,) for state in self._generators]
            client = self._client()
            client.submit_each("restore_generators", own, deadline_s=client.timeouts.call_s).result()

    def _secure_the_beginning(self) -> None:
        """Where restarts are wanted, the run's beginning must be in files, to go back to."""
        if not self._max_restarts or self._begun_in_files:
            return
        if self._options.save_to is None:
            raise ValueError(
                f"max_restarts={self._max_restarts}, and the group was trained since it was loaded or saved: a restart "
                "would lose that. Save it first, with its optimizer, or pass save_to="
            )
        self._save(in_background=False)
        self._begun_in_files = True

    def _submit(self, method: str, *args: Any, collect: Collect = collect_rank0, is_last: bool = False) -> Call:
        """Submit a command to the ranks, as they are now."""
        return self._client().submit_same(method, *args, collect=collect, is_last=is_last)

    def _end(self, error: BaseException | None) -> None:
        """Have the ranks let go of the data, where there are any, and close the callbacks.

        Args:
            error: What ended the run; what goes wrong here is noted on it.
        """
        if isinstance(error, CheckpointError) and self._paths:
            # One full disk fails every save that the run has begun: told with this error, and not by later calls.
            for other in self._client().pending.take_failed(self._paths, self._plan.data.stall_s):
                error.add_note(f"raysharding: and then, of another save of the run: {other}")
        closes = [close for callback in self._callbacks if (close := getattr(callback, "close", None)) is not None]
        first: Exception | None = None
        for let_go in (self._let_go, *closes):
            try:
                let_go()
            except Exception as raised:  # noqa: BLE001 - the others are to be closed, too
                if error is None and first is None:
                    first = raised
                else:
                    (error or first or raised).add_note(f"raysharding: then {type(raised).__name__}: {raised}")
        if first is not None:
            raise first

    def _let_go(self) -> None:
        if self._group.state in (GroupState.READY, GroupState.BUSY):
            with suppress(GroupError):  # of a group that breaks in this moment the next call tells
                self._submit("fit_end", is_last=True).result()
            self._data.unpin(self._client().members)

    def _steps_and_restarts(self, bar: StepBar) -> None:
        lost: GroupError | RendezvousError | None = None
        while True:
            try:
                if lost is not None:
                    with _after(lost):
                        self._go_back(self._restart(lost))
                    bar.go_back(self._place.num_steps)
                self._steps(bar)
                return
            except (GroupTakenOverError, CallCancelledError):
                raise  # another driver's ranks are whole; who interrupts wants no restart
            except (GroupError, RendezvousError) as error:
                if self._group.state is not GroupState.BROKEN or self._num_restarts >= self._max_restarts:
                    raise
                lost = error

    def _restart(self, error: Exception) -> RestartReport:
        """Make the group whole."""
        self._num_restarts += 1
        cause = str(error).partition("\n")[0]
        tell(f"fit: {cause}; restart {self._num_restarts} of {self._max_restarts}")
        done = self._restart_group()
        try:
            self._client().pending.wait(self._plan.data.stall_s)
        except (GroupError, CheckpointError) as lost:
            tell(f"fit: {lost}")
        return done

    def _go_back(self, done: RestartReport) -> None:
        """Go on from where the ranks stand after a restart."""
        self._asked = None
        assert self._begun_in_files, "_secure_the_beginning comes first: what was loaded may be that"
        self._begin(resume=True)
        kept = self._place.num_steps - self._first_step
        for values in self._history.values():
            del values[kept:]
            # Ranks that were kept may have taken steps of which the driver was not told.
            values.extend([math.nan] * (kept - len(values)))
        self._skipped = [number for number in self._skipped if number <= self._place.num_steps]
        tell(f"fit: goes on after step {self._place.num_steps} ({done.how}: {done.why})")

    def _steps(self, bar: StepBar) -> None:
        """Take steps to the end of the run, and save."""
        is_over = False
        while not is_over:
            self._fits.check_interrupted(self._place.num_steps)
            asked = time.monotonic()
            replies: list[FitSteps] = self._submit("fit_steps", self._num_next(), collect=collect_all).result()
            seconds = time.monotonic() - asked
            is_over, self._position = replies[0].is_over, replies[0].position
            if replies[0].steps:
                self._step_s = seconds / len(replies[0].steps)
                self._note(replies, seconds, bar)
            if self._options.save_to is not None and self._is_due(is_over=is_over):
                self._save(in_background=self._options.async_save)
        self._group.wait_for_save()

    def _num_next(self) -> int:
        """How many steps the ranks take before the driver hears of them."""
        number = min(_MAX_STEPS, math.ceil(_CALL_S / max(self._step_s, 1e-6)))
        every = self._options.save_every
        return number if every is None else min(number, every - self._place.num_steps % every)

    def _note(self, replies: Sequence[FitSteps], seconds: float, bar: StepBar) -> None:
        """Keep what the steps said, and tell it."""
        steps = list(zip(*(reply.steps for reply in replies), strict=True))
        first = self._place.num_steps - len(steps)
        rows, tokens = _sums(step for ranks in steps for step in ranks)
        self._num_rows, self._num_tokens = self._num_rows + rows, self._num_tokens + tokens
        self._wait_s += max(sum(step.wait_s for step in reply.steps) for reply in replies)
        for number, ranks in enumerate(steps, first + 1):
            for name, value in ranks[0].metrics.items():
                self._history.setdefault(name, []).append(value)
            own_rows, own_tokens = _sums(ranks)
            rates = rows / seconds, tokens / seconds
            self._warn_of(number, ranks[0])
            is_skipped = bool(ranks[0].skipped)
            told = FitStep(number, ranks[0].epoch, ranks[0].metrics, own_rows, own_tokens, *rates, is_skipped)
            bar.step(told)
            for callback in self._callbacks:
                callback(told)

    def _warn_of(self, number: int, step: StepMetrics) -> None:
        """Say once that steps are skipped, and once that the loss is not finite."""
        loss = step.metrics["loss"]
        if step.skipped:
            self._skipped.append(number)
            what = f"step {number} was skipped, as others like it will be (see on_empty=): {step.skipped}"
        elif not math.isfinite(loss):
            what = f"the loss is {loss} from step {number} on"
        else:
            return
        if (kind := bool(step.skipped)) not in self._warned:
            self._warned.add(kind)
            warnings.warn(f"fit: {what}", UserWarning, stacklevel=2)

    def _is_due(self, *, is_over: bool) -> bool:
        every, done = self._options.save_every, self._place.num_steps
        is_new = done not in (self._asked, self._first_step)
        return is_new and (is_over or (every is not None and not done % every))

    def _save(self, *, in_background: bool) -> None:
        begun = time.monotonic()
        options, number = self._options, self._place.num_steps
        path = join_path(str(options.save_to), f"step-{number}")
        # What is there is of this run, or rank 0 had refused it: one that has gone back comes to the same steps again.
        self._group.save(path, overwrite=True, keep_last=options.keep_last, async_save=in_background)
        self._asked = number
        self._paths.add(path)
        self._save_s += time.monotonic() - begun


@contextmanager
def _after(lost: Exception) -> Iterator[None]:
    """Say on what goes wrong in a restart what it was for."""
    try:
        yield
    except Exception as error:
        error.add_note(f"raysharding: fit was restarting after: {str(lost).partition(chr(10))[0]}")
        raise


def _sums(steps: Iterable[StepMetrics]) -> tuple[int, int]:
    found = list(steps)
    return sum(step.num_rows for step in found), sum(step.num_tokens for step in found)
