"""`PredictRun`: the driver's part of a `predict`: the number of forwards per call, restarts, progress, the result."""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import ray

from raysharding.arguments import check_names, for_fields
from raysharding.batch import Out, deal
from raysharding.data import cast_table, join_tables, schema_from_text, unify_schemas
from raysharding.distributed.training import PredictPlan
from raysharding.errors import GroupError, OutputTooLargeError
from raysharding.group.calls import Client, ProgressBar, collect_all, collect_returns, output_path, progress_bar
from raysharding.group.cluster import tell
from raysharding.group.fit.datasets import DatasetHandle, group_dataset, pinned_for, refuse_iterable
from raysharding.group.fit.evaluations import tell_dropped
from raysharding.group.fit.restarts import Restarts
from raysharding.group.fit.run_lock import RunLock
from raysharding.group.launch import RestartReport, RunningGroup
from raysharding.group.messages import GroupState
from raysharding.worker import PredictStart, PredictSteps

_CALL_S = 1.0
_MAX_STEPS = 1000


@dataclass(frozen=True)
class PredictReport:
    """Report of a `predict` with `output`. `str(report)` is for people."""

    output: str
    """Directory or URI of the Parquet files; in the order of their names they hold the rows in the data's order."""
    num_rows: int
    """Rows of the data, each of which has its result in a file."""
    num_found: int
    """Rows whose results an earlier run had left in files that were complete."""
    num_files: int
    """Number of files."""
    seconds: float
    """Time that `predict` took."""
    num_restarts: int
    """Number of restarts of the group, including restarts that failed because another rank was lost."""
    weights_version: int
    """Version of the weights, since the last restart; see `Call.weights_version`."""

    @property
    def rows_per_s(self) -> float:
        """Rows per second of the time that `predict` took, without those that were found."""
        return (self.num_rows - self.num_found) / self.seconds if self.seconds > 0 else 0.0

    def __str__(self) -> str:
        found = f" ({self.num_found:,} found)" if self.num_found else ""
        restarts = f", {self.num_restarts} restarts" if self.num_restarts else ""
        rate = f"{self.seconds:.1f} s, {self.rows_per_s:,.1f} rows/s{restarts}"
        return f"{self.num_rows:,} rows{found} in {self.num_files:,} files in {self.output}: {rate}"


def run_predict(
    running: RunningGroup, lock: RunLock, options: Mapping[str, Any], restart: Callable[[], RestartReport]
) -> Any:
    """Compute columns, by the arguments of `ShardedModelGroup.predict`.

    Args:
        running: The group.
        lock: Held while the run lasts.
        options: The arguments.
        restart: Restarts the group.
    """
    client, keys, columns, output = running.client, options["keys"], options["columns"], options["output"]
    if options["sort_by"] not in (None, "length"):
        raise ValueError(f"sort_by={options['sort_by']!r}: give 'length', or omit it")
    check_names("keys", keys)
    check_names("columns", columns)
    with lock.running(client, "predict"):
        read = None if columns is None else list(dict.fromkeys((*columns, *keys)))
        dataset = group_dataset(running, options["data"], {**options, "columns": read})
        refuse_iterable(dataset.source)
        given = {**options, "keys": tuple(keys), "output": None if output is None else output_path("output", output)}
        plan = PredictPlan(
            source=dataset.source,
            by_length=options["sort_by"] is not None,
            stall_s=client.timeouts.load_stall_s,
            run=secrets.token_hex(8),
            **for_fields(PredictPlan, given),
        )
        limit = running.spec.max_restarts
        return PredictRun(client, limit, plan, dataset, options["progress"], lock, restart).run()


@dataclass
class PredictRun:
    """One call of `predict`."""

    client: Client
    """The group that computes."""
    max_restarts: int
    """Largest number of restarts."""
    plan: PredictPlan
    """The ranks' part of the run."""
    data: DatasetHandle
    """The data that the ranks read."""
    progress: bool | None
    """True to show a bar; `None`: in a terminal or notebook, and lines elsewhere."""
    lock: RunLock
    """Reports whether the run is to end early."""
    restart: Callable[[], RestartReport]
    """Restarts the group."""

    def __post_init__(self) -> None:
        self._restarts = Restarts("predict", self.client, self.max_restarts, self.restart)
        self._started = time.monotonic()
        self._is_over = False
        self._num_done = self._weights_version = 0
        self._step_s = _CALL_S
        self._tables: dict[int, tuple[ray.ObjectRef, Any]] = {}
        """First row of a part → its table, in the object store, and the pyarrow schema of it."""
        self._num_bytes = 0
        self._schema: Any = None
        """The types that hold the values of all tables."""
        self._announced: set[str] = set()

    def run(self) -> Any:
        """Run all forwards, and return what `ShardedModelGroup.predict` returns."""
        try:
            start = self._begin()
            if self.max_restarts and not start.is_saved:
                raise ValueError(
                    f"max_restarts={self.max_restarts}, but the group was trained, or got weights by copy_to, since "
                    "it was loaded or saved: after a restart, the rows that are left would be computed with other "
                    "weights. Save the group first"
                )
            with progress_bar(self.progress, "predict", "rows", start.num_rows, start.num_done) as bar:
                self._restarts.run(lambda: self._steps(bar), lambda done: self._continue(done, bar))
        finally:
            self._release()
        if self.plan.output is None:
            return self._joined()
        seconds, number = time.monotonic() - self._started, self._restarts.number
        counts = start.num_rows, start.num_done, start.num_parts
        return PredictReport(self.plan.output, *counts, seconds, number, self._weights_version)

    def _begin(self) -> PredictStart:
        """Make the ranks open the data and the output."""
        plan = replace(self.plan, taken=tuple(self._tables))
        with pinned_for([self.data], self.client):
            call = self.client.submit_same("predict_begin", plan)
            start: PredictStart = call.result()
        self._is_over, self._num_done, self._weights_version = start.is_over, start.num_done, call.weights_version or 0
        self.plan = replace(self.plan, num_parts=start.num_parts)
        return start

    def _continue(self, done: RestartReport, bar: ProgressBar) -> None:
        """Continue with the parts that are not complete."""
        start = self._begin()
        tell(
            f"predict: continues with {start.num_done:,} of {start.num_rows:,} rows (reloaded {done.checkpoint}: "
            f"{done.why})"
        )
        bar.update(start.num_done - bar.n)  # back to the rows of complete parts

    def _steps(self, bar: ProgressBar) -> None:
        """Run the forwards that are left.

        Raises:
            CallCancelledError: `interrupt` was called.
        """
        while not self._is_over:
            later = "; resume=True continues with the others" if self.plan.output else ""
            self.lock.check_interrupted(f"interrupt() ended predict after {self._num_done:,} rows{later}")
            begun = time.monotonic()
            number = min(_MAX_STEPS, math.ceil(_CALL_S / max(self._step_s, 1e-6)))
            replies: list[PredictSteps] = self.client.submit_same("predict_steps", number, collect=collect_all).result()
            self._step_s = (time.monotonic() - begun) / max(1, replies[0].num_steps)
            self._take(replies)
            tell_dropped((reply.dropped for reply in replies), "the data", self._announced, "predict")
            num_rows = sum(reply.num_rows for reply in replies)
            self._num_done += num_rows
            bar.update(num_rows)
            self._is_over = replies[0].is_over

    def _take(self, replies: Sequence[PredictSteps]) -> None:
        """Make the ranks put finished tables into the object store; this driver owns them, and they outlive the ranks.

        Raises:
            OutputTooLargeError: The table of a part is larger than `max_output_bytes`.
            DataError: No type holds the values of a column in all tables.
        """
        if not any(reply.finished for reply in replies):
            return
        batches, collect = deal((), {}, len(replies)), collect_returns(Out.refs(), ())
        try:
            refs = self.client.submit_batches("predict_take", batches, collect=collect).result()
        except OutputTooLargeError as error:
            cure = "give output=, a smaller rows_per_file, or a fn that returns less"
            sizes = {"num_bytes": error.num_bytes, "max_output_bytes": error.max_output_bytes}
            what = f"predict: a part of the rows has {error.num_bytes} bytes of results, over max_output_bytes"
            raise OutputTooLargeError(f"{what}={error.max_output_bytes}: {cure}", **sizes) from error
        for reply, ref in zip(replies, refs, strict=True):
            for first, num_bytes, text in reply.finished:
                schema = schema_from_text(text)
                self._tables[first] = ref, schema
                self._num_bytes += num_bytes
                self._schema = unify_schemas([self._schema or schema, schema], self.plan.maker)

    def _joined(self) -> Any:
        """Return a table of all rows, or a dataset if it would be larger than `max_output_bytes`."""
        tables = [self._tables[first] for first in sorted(self._tables)]
        if self._num_bytes > self.client.max_output_bytes:
            from ray.data import from_arrow_refs

            return from_arrow_refs(
                [ref if own.equals(self._schema) else _cast.remote(ref, self._schema) for ref, own in tables]
            )
        try:
            whole = join_tables(ray.get([ref for ref, _ in tables], timeout=self.client.timeouts.call_s))
            return whole.replace_schema_metadata({"weights_version": str(self._weights_version)})
        except ray.exceptions.RayError as error:
            what = "results in the object store are lost, with the node that held them"
            raise GroupError(f"predict: {what}: give output=, which a node cannot lose ({error})") from error

    def _release(self) -> None:
        if self.client.state in (GroupState.READY, GroupState.BUSY):
            with suppress(GroupError):  # if the group breaks at this moment, the next call reports it
                self.client.submit_same("predict_end", is_last=True).result()
            self.data.unpin(self.client)


@ray.remote(num_cpus=0)
def _cast(table: Any, schema: Any) -> Any:
    return cast_table(table, schema)
