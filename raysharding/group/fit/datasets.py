"""Data as a user gives it to `fit`, made a source that every rank reads for itself."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass
from typing import Any

import ray

from raysharding.checkpoint.storage import normal_path
from raysharding.data import ParquetPath, Rows, check_whole, kind_of, rows_of
from raysharding.errors import DataError, GroupError
from raysharding.group.actors import DatasetBlocks
from raysharding.group.ranks import Member
from raysharding.group.supervision import probe_all

_PIN_S = 30.0


@dataclass(frozen=True)
class DatasetHandle:
    """What ranks read, and what has to live on the driver meanwhile."""

    source: Rows | ParquetPath
    """For the ranks."""
    refs: tuple[ray.ObjectRef, ...] = ()
    """Blocks that the ranks have to hold."""

    def pin(self, members: Sequence[Member]) -> None:
        """Have the ranks hold the blocks, before they read the first.

        Raises:
            GroupError: A rank does not answer.
        """
        if not isinstance(self.source, DatasetBlocks):
            return
        silent = probe_all(members, "pin", self.source.key, self.refs, within_s=_PIN_S).silent
        if silent:
            rank, why = next(iter(silent.items()))
            raise GroupError(f"rank {rank} cannot be given the dataset: {why}")

    def unpin(self, members: Sequence[Member]) -> None:
        """Have the ranks let go of them; who is gone has. Does not wait."""
        # Once Ray is shut down they are gone, and what would be asked of them would start another one.
        if isinstance(self.source, DatasetBlocks) and ray.is_initialized():
            for member in members:
                member.actor.pin.remote(self.source.key, None)


def dataset_handle(
    data: Any, columns: Sequence[str] | None, timeout_s: float, whole: Collection[str] = ()
) -> DatasetHandle:
    """Make a source of `data`; see `ShardedModelGroup.fit`.

    Args:
        data: As the user gave it.
        columns: Likewise.
        timeout_s: How long a Ray dataset may take to be computed.
        whole: Columns of a Ray dataset that must hold whole numbers, where there are such columns. (Parquet files are
            looked at where they are, by rank 0.)

    Raises:
        ValueError: No data, or `columns` for what has none.
        TypeError: Not data.
        DataError: The dataset cannot be computed, or has a column of floats that must be whole.
    """
    chosen = None if columns is None else tuple(columns)
    if isinstance(data, str | os.PathLike):
        return DatasetHandle(ParquetPath(normal_path(os.fspath(data)), chosen))
    if "ray.data" in sys.modules and isinstance(data, sys.modules["ray.data"].Dataset):
        return _blocks(data, chosen, timeout_s, whole)
    if chosen is not None:
        raise ValueError(f"columns={columns!r}: only Parquet files and Ray datasets have columns to choose from")
    return DatasetHandle(rows_of(data))


def _blocks(dataset: Any, columns: tuple[str, ...] | None, timeout_s: float, whole: Collection[str]) -> DatasetHandle:
    computing: Future[tuple[Mapping[str, str], tuple[ray.ObjectRef, ...], tuple[int, ...]]] = Future()

    def compute() -> None:
        try:
            computing.set_result(_computed(dataset))
        except BaseException as error:  # noqa: BLE001 - it is raised below
            computing.set_exception(error)

    threading.Thread(target=compute, name="raysharding-dataset", daemon=True).start()
    try:
        kinds, refs, rows = computing.result(timeout_s)
    except FutureTimeoutError:
        free = ray.available_resources().get("CPU", 0)
        raise DataError(
            f"the Ray dataset is not computed after {timeout_s:g} s; the cluster has {free:g} CPUs free of "
            f"{ray.cluster_resources().get('CPU', 0):g}: its tasks need one at least, beside the group's ranks. "
            "Compute it first (dataset.materialize()), or give the ranks fewer: Placement(cpus_per_rank=)"
        ) from None
    except ray.exceptions.RayError as error:
        raise DataError(f"the Ray dataset cannot be computed: {error}") from error
    missing = [name for name in columns or () if name not in kinds]
    if missing:
        raise DataError(f"the Ray dataset has no column {', '.join(map(repr, missing))}: it has {list(kinds)}")
    check_whole(kinds, [name for name in whole if columns is None or name in columns])
    if not any(rows):
        raise DataError("the Ray dataset has no rows")
    return DatasetHandle(DatasetBlocks(os.urandom(8).hex(), rows, columns), refs)


def _computed(dataset: Any) -> tuple[Mapping[str, str], tuple[ray.ObjectRef, ...], tuple[int, ...]]:
    """Columns and what they hold, blocks in the dataset's own order, and their rows."""
    options = dataset.context.execution_options
    kept = options.preserve_order
    options.preserve_order = True  # else blocks come as their tasks end: in another order each time
    try:
        schema = dataset.schema()
        refs = tuple(dataset.to_arrow_refs())
    finally:
        options.preserve_order = kept
    kinds = {name: kind_of(kind) for name, kind in zip(schema.names, schema.types, strict=True)}
    return kinds, refs, tuple(ray.get([_num_rows.remote(ref) for ref in refs]))


@ray.remote(num_cpus=0)
def _num_rows(table: Any) -> int:
    return int(table.num_rows)
