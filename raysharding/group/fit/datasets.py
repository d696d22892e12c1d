"""Turns the data that a user passes to `fit` into a source that every rank reads for itself."""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any

import ray

from raysharding.arguments import check_names
from raysharding.checkpoint.storage import normal_path
from raysharding.data import (
    DataPath,
    Rows,
    Stream,
    check_whole,
    common_schema,
    hub_name,
    is_path,
    kind_of,
    mixed_types,
    rows_of,
    schema_as_text,
)
from raysharding.errors import DataError, GroupError
from raysharding.group.calls import Call, Client
from raysharding.group.launch import RunningGroup
from raysharding.group.rank import DatasetBlocks

_PIN_S = 30.0


@dataclass(frozen=True)
class DatasetHandle:
    """A data source for the ranks, and the references that the driver must keep while they read it."""

    source: Rows | DataPath
    """The source that the ranks read."""
    refs: tuple[ray.ObjectRef, ...] = ()
    """References to the blocks that the ranks must hold."""

    def pin(self, client: Client) -> None:
        """Make the ranks hold the blocks, before they read the first one.

        Raises:
            GroupError: A rank does not answer.
        """
        if not isinstance(self.source, DatasetBlocks):
            return
        silent = client.connection.probe("pin", self.source.key, self.refs, within_s=_PIN_S).silent
        if silent:
            rank, why = next(iter(silent.items()))
            raise GroupError(f"the dataset cannot be sent to rank {rank}: {why}")

    def unpin(self, client: Client) -> None:
        """Make the ranks release the blocks; a dead rank holds none. Does not wait."""
        if isinstance(self.source, DatasetBlocks):
            client.connection.tell_ranks("pin", self.source.key, None)


@contextmanager
def pinned_for(datasets: Sequence[DatasetHandle], client: Client) -> Iterator[None]:
    """Pin datasets for the first call of the ranks that reads them, which is the body of the context.

    Raises:
        GroupError: A rank does not answer. Raised after the body: if a rank is gone, the body's call raises a better
            error.
    """
    silent: GroupError | None = None
    try:
        for data in datasets:
            data.pin(client)
    except GroupError as error:
        silent = error
    yield
    if silent is not None:
        raise silent


def group_dataset(running: RunningGroup, data: Any, options: Mapping[str, Any]) -> DatasetHandle:
    """Make a source of `data` for a group's ranks, by the arguments of `fit`, `evaluate` or `predict`."""
    # A collate function may transform a column; without one, a column is the model argument of the same name.
    whole = running.loaded.bounds.num_ids if options["collate_fn"] is None else ()
    return dataset_handle(data, options["columns"], running.client.timeouts.load_stall_s, whole)


def dataset_handle(
    data: Any, columns: Sequence[str] | None, timeout_s: float, whole: Collection[str] = ()
) -> DatasetHandle:
    """Make a source of the data that a user gives to `fit`, `evaluate` or `predict`.

    Args:
        data: The user's data.
        columns: The user's choice of columns.
        timeout_s: Longest time in which a Ray dataset must be computed.
        whole: Columns of a Ray dataset that must hold integers, if the dataset has such columns. (Rank 0 checks
            Parquet files, at their location.)

    Raises:
        ValueError: There is no data, or `columns` is given for data without columns, or is a text.
        TypeError: `data` is not data.
        DataError: The dataset cannot be computed, or has a column of floats that must hold integers.
    """
    check_names("columns", columns)
    chosen = None if columns is None else tuple(columns)
    named = hub_name(data) if isinstance(data, str) else None
    if named is not None and find_spec("datasets") is None:
        raise ValueError(
            f"data={data!r} is not there, and to load it as a dataset of the Hugging Face hub, `datasets` is missing: "
            "pip install 'raysharding[datasets]'; a path that only the ranks see must be absolute"
        )
    if isinstance(data, str | os.PathLike) and named is None:
        return DatasetHandle(DataPath(normal_path(os.fspath(data)), chosen))
    if isinstance(data, list | tuple) and data and all(map(is_path, data)):
        first, *others = (normal_path(os.fspath(path)) for path in data)
        return DatasetHandle(DataPath(first, chosen, tuple(others)))
    if "ray.data" in sys.modules and isinstance(data, sys.modules["ray.data"].Dataset):
        return _blocks(data, chosen, timeout_s, whole)
    if chosen is not None:
        raise ValueError(f"columns={columns!r}: only columns of files and Ray datasets can be chosen; omit it")
    return DatasetHandle(rows_of(data if named is None else named))


def refuse_iterable(source: Rows | DataPath) -> None:
    """Raise ValueError for rows without numbers, which `predict` could neither cut into parts nor continue."""
    if isinstance(source, Stream):
        raise ValueError(
            f"data is an iterable ({type(source.rows).__name__}), and predict needs rows with numbers: give a list, an "
            "object with len and [number], or a file"
        )


def _blocks(dataset: Any, columns: tuple[str, ...] | None, timeout_s: float, whole: Collection[str]) -> DatasetHandle:
    try:
        refs, found = Call.in_thread("dataset", partial(_computed, dataset)).result(timeout_s)
    except TimeoutError:
        free = ray.available_resources().get("CPU", 0)
        raise DataError(
            f"the Ray dataset is not computed after {timeout_s:g} s; the cluster has {free:g} CPUs free of "
            f"{ray.cluster_resources().get('CPU', 0):g}: the dataset's tasks need at least one beside the group's "
            "ranks. Compute it first (dataset.materialize()), or give the ranks fewer: Placement(cpus_per_rank=)"
        ) from None
    except ray.exceptions.RayError as error:
        raise DataError(f"the Ray dataset cannot be computed: {error}") from error
    rows, schemas = tuple(number for number, _ in found), [schema for _, schema in found]
    schema = common_schema((f"block {index}", one) for index, one in enumerate(schemas))
    known = [*(one for schema in schemas for one in schema), *(one for one in schema if not mixed_types(one))]
    kinds = {one.name: kind_of(one.type) for one in known}
    missing = [name for name in columns or () if name not in kinds]
    if missing:
        raise DataError(f"the Ray dataset has no column {', '.join(map(repr, missing))}: it has {list(kinds)}")
    check_whole(kinds, [name for name in whole if columns is None or name in columns])
    if not any(rows):
        raise DataError("the Ray dataset has no rows")
    return DatasetHandle(DatasetBlocks(os.urandom(8).hex(), rows, columns, schema_as_text(schema)), refs)


def _computed(dataset: Any) -> tuple[tuple[ray.ObjectRef, ...], Sequence[tuple[int, Any]]]:
    """Return the blocks in the dataset's own order, and the number of rows and the schema of each."""
    options = dataset.context.execution_options
    kept = options.preserve_order
    options.preserve_order = True  # otherwise blocks come in the order in which their tasks end
    try:
        refs = tuple(dataset.to_arrow_refs())
    finally:
        options.preserve_order = kept
    return refs, ray.get([_facts.remote(ref) for ref in refs])


@ray.remote(num_cpus=0)
def _facts(table: Any) -> tuple[int, Any]:
    return int(table.num_rows), table.schema
