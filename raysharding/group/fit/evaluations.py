"""`Evaluations`: the evaluations between a run's steps; which is the best, and whether they end the run."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from raysharding.arguments import check_int, for_fields
from raysharding.data import Position
from raysharding.distributed.training import DataPlan, EvaluationPlan, Metric
from raysharding.group.calls import Call, Client, collect_all
from raysharding.group.cluster import tell
from raysharding.group.fit.datasets import DatasetHandle, group_dataset
from raysharding.group.fit.early_stop import EarlyStop, direction
from raysharding.group.fit.report import BestSave
from raysharding.group.launch import RunningGroup


def tell_dropped(by_rank: Iterable[Sequence[str]], source: str, announced: set[str], what: str = "fit") -> None:
    """Say once which columns of the data the ranks drop in a `fit` or `predict`; `announced` keeps the sources."""
    names = sorted({name for dropped in by_rank for name in dropped})
    if names and source not in announced:
        announced.add(source)
        tell(f"{what}: the model takes no {', '.join(names)}: dropped from {source} (collate_fn= gets all columns)")


def steps_to(place: Position, every: int | None) -> int | None:
    """Return the number of steps from a position to the next multiple of `every`.

    Args:
        place: The position.
        every: Number of steps; `None` for the end of each epoch.

    Returns:
        The number; `None` if the length of an epoch is not known.
    """
    if every is not None:
        return every - place.num_steps % every
    if place.num_rows is None:
        return None
    in_epoch = -(-place.num_rows // place.batch_size)
    return in_epoch - place.step % in_epoch


@dataclass(frozen=True)
class EvalOptions:
    """Options of the evaluations of a run."""

    data: DatasetHandle
    """The data that the ranks evaluate on."""
    plan: EvaluationPlan
    """The ranks' part of an evaluation."""
    every: int | None
    """Number of steps between two evaluations; `None`: at the end of each epoch."""
    keep_best: str | None
    """Metric of the evaluation whose save is kept; `None` for none."""
    stop: EarlyStop | None
    """Ends the run; `None`: all steps are taken."""

    def __post_init__(self) -> None:
        """Refuse invalid options.

        Raises:
            ValueError: `every` is not a positive int, or `keep_best` or `stop` name no metric.
        """
        if self.every is not None:
            check_int("eval_every", self.every)
        known = ["loss", *self.plan.metrics]
        stop = None if self.stop is None else self.stop.metric
        for option, metric in (("keep_best", self.keep_best), ("stop", stop)):
            if metric is not None and direction(metric)[0].removeprefix("eval_") not in known:
                raise ValueError(f"{option}={metric!r} is no metric of the evaluation, which has {', '.join(known)}")


def eval_options(data: DatasetHandle | None, train: DataPlan, options: Mapping[str, Any]) -> EvalOptions | None:
    """Make the options of evaluations that read their data as the run does; `None` without data.

    Args:
        data: The data to evaluate.
        train: The run's own data.
        options: The arguments of `fit`.

    Raises:
        ValueError: An option is invalid, or given without data.
    """
    if data is None:
        for name in ("eval_every", "metrics", "keep_best", "stop"):
            if options[name] is not None:
                raise ValueError(f"{name}={options[name]!r}, but nothing is evaluated: give eval_data=")
        return None
    plan = replace(train, source=data.source, epochs=1, max_steps=None, shuffle=False)
    evaluation = EvaluationPlan(plan, options["loss"], metrics=_checked(options["metrics"]))
    return EvalOptions(data, evaluation, options["eval_every"], options["keep_best"], options["stop"])


def _checked(metrics: Mapping[str, Any] | None) -> dict[str, Metric]:
    """Return a copy of `metrics=`.

    Raises:
        ValueError: A name is one that the values have without metrics, or a metric is no function and no pair of two.
    """
    for name, metric in (metrics or {}).items():
        if name in ("loss", "num_rows"):
            raise ValueError(f"metrics[{name!r}]: the evaluation has a {name} of its own; give the metric another name")
        is_pair = isinstance(metric, tuple) and len(metric) == 2 and all(map(callable, metric))
        if not is_pair and not callable(metric):
            what = "give a function that returns (sum, count), or a pair (values, compute) of functions"
            raise ValueError(f"metrics[{name!r}]={metric!r}: {what}")
    return dict(metrics or {})


def submit_evaluate(running: RunningGroup, options: Mapping[str, Any]) -> Call:
    """Submit an evaluation, by the arguments of `ShardedModelGroup.evaluate`."""
    client, dataset = running.client, group_dataset(running, options["data"], options)
    stall_s = client.timeouts.load_stall_s
    data_plan = DataPlan(source=dataset.source, stall_s=stall_s, **for_fields(DataPlan, options))
    fields = for_fields(EvaluationPlan, options) | {"data": data_plan, "metrics": _checked(options["metrics"])}
    plan = EvaluationPlan(**fields)
    dataset.pin(client)
    call = client.submit_same("evaluate", plan, takes_steps=True)
    call.when_done(lambda _: dataset.unpin(client))
    return call


class Evaluations:
    """Evaluations of one call of `fit`."""

    def __init__(self, client: Client, options: EvalOptions | None) -> None:
        """Begin without an evaluation.

        Args:
            client: The group.
            options: The options; `None`: there is no evaluation.
        """
        self._client = client
        self._options = options
        self._of_run: list[Mapping[str, Any]] = []
        self.done: dict[int, dict[str, float]] = {}
        """Step → metrics, of the evaluations in this `fit`."""
        self._announced: set[str] = set()

    def begin(self, place: Position) -> None:
        """Continue at a position, whose evaluations count."""
        self._of_run = list(place.evaluations)
        self.done = {step: values for step, values in self.done.items() if step <= place.num_steps}

    def steps_left(self, place: Position) -> int | None:
        """Return the number of steps to the next evaluation; `None` if it is not known."""
        return None if self._options is None else steps_to(place, self._options.every)

    def is_due(self, place: Position, *, is_end: bool) -> bool:
        """Return True if an evaluation follows the run's last step, and the run does not have it yet.

        Args:
            place: Position after that step.
            is_end: True if no steps are left.
        """
        is_made = any(one["step"] == place.num_steps for one in self._of_run)
        if self._options is None or is_made or not place.num_steps:
            return False
        if is_end:
            return True
        if self._options.every is not None:
            return place.num_steps % self._options.every == 0
        return place.num_rows is not None and place.step * place.batch_size >= place.num_rows

    def evaluate(self, place: Position, path: str) -> dict[str, float]:
        """Evaluate, and make the ranks note the result for the run's saves.

        Args:
            place: Position of the run.
            path: Path of the run's save at this step, if one is made.

        Returns:
            The metrics, by names that begin with `eval_`.
        """
        assert self._options is not None, "is_due comes first"
        values = self._client.submit_same("evaluate", None, takes_steps=True).result()  # `None`: that of the `FitPlan`
        metrics = {f"eval_{name}": value for name, value in values.items() if name != "num_rows"}
        finite = {name: value for name, value in metrics.items() if math.isfinite(value)}
        noted: dict[str, Any] = {"step": place.num_steps, "metrics": finite}
        (name, sign), best = self._best_by, self.best
        if name in finite and (best is None or sign * finite[name] > sign * best.value):
            noted |= {"best": name, "path": path}
        replies = self._client.submit_same("note_evaluation", noted, collect=collect_all).result()
        tell_dropped(replies, "eval_data", self._announced)
        self._of_run.append(noted)
        self.done[place.num_steps] = metrics
        return metrics

    @property
    def _best_by(self) -> tuple[str, int]:
        return direction((self._options and self._options.keep_best) or "")

    @property
    def best(self) -> BestSave | None:
        """The save of the best evaluation of the run so far; `None` without `keep_best`."""
        name = self._best_by[0]
        found = next((one for one in reversed(self._of_run) if one.get("best") == name), None)
        return None if found is None else BestSave(found["path"], found["step"], found["metrics"][name])

    def is_best(self, path: str) -> bool:
        """Return True if the save at a path is that of the best evaluation so far, which is kept."""
        return self.best is not None and self.best.path == path

    @property
    def stopped(self) -> str | None:
        """Reason for which the evaluations end the run; `None` if they do not."""
        stop = None if self._options is None else self._options.stop
        if stop is None:
            return None
        name = direction(stop.metric)[0]
        is_over = stop.is_over(one["metrics"].get(name) for one in self._of_run)
        return f"{name} has not improved in {stop.patience} evaluations" if is_over else None
