"""`DistributedDataLoader`: reads each rank's rows of the batches of one process ahead; equally many per rank."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from hashlib import sha256
from typing import Any, TypeAlias

import torch
import torch.distributed as dist

from raysharding.arguments import check_int
from raysharding.batch import Collate, RankBatch
from raysharding.data import (
    TEXT_SUFFIXES,
    BlockSource,
    DataPath,
    KnownColumns,
    Order,
    ParquetFiles,
    Position,
    Prefetch,
    RowFiles,
    Rows,
    StepBatch,
    TextFiles,
    check_whole_items,
    epoch_batches,
    list_all_files,
    rank_batch,
)
from raysharding.distributed.comm import (
    agreeing,
    current_group,
    from_rank_0,
    get_rank,
    get_world_size,
    metadata_device,
    wait_for,
)
from raysharding.distributed.fully_shard import move_inputs
from raysharding.distributed.training.passes import Passes, are_alike, code_of, passes_over
from raysharding.errors import DataError
from raysharding.models import InputBounds

_Item: TypeAlias = StepBatch | list[RankBatch] | None
"""Item of the reader thread: rows, or parts that are collated; `None` for skipped rows."""


@dataclass(frozen=True)
class DataPlan:
    """Data of a run, and how to read it. Picklable; the same on every rank."""

    source: Rows | DataPath
    """Source of the rows."""
    batch_size: int
    """Rows of a step, over all ranks; a multiple of `rows_per_item`."""
    epochs: int = 1
    """Number of passes over the data."""
    max_steps: int | None = None
    """Steps after which the run ends; `None` for no limit."""
    shuffle: bool = False
    """True for a random order of the rows."""
    seed: int = 0
    """Seed of the random order."""
    collate_fn: Collate | None = None
    """Makes a batch of rows; `None` for `default_collate`."""
    prefetch: int = 2
    """Batches to read ahead; without `collate_fn` at least two, one of which is held for the next step."""
    stall_s: float = 120.0
    """Longest wait for a batch, in seconds."""
    run: str = ""
    """Name of a new run; a resumed run keeps its name."""
    rows_per_item: int = 1
    """Number of consecutive rows of the data that belong together, and stay on one rank."""

    def __post_init__(self) -> None:
        """Check the options."""
        for name in ("batch_size", "epochs", "prefetch", "rows_per_item"):
            check_int(name, getattr(self, name))
        if self.batch_size % self.rows_per_item:
            fits = -(-self.batch_size // self.rows_per_item) * self.rows_per_item
            raise ValueError(
                f"batch_size={self.batch_size} is no multiple of rows_per_item={self.rows_per_item}: give whole items, "
                f"such as batch_size={fits}"
            )
        check_int("seed", self.seed, least=0)
        if self.max_steps is not None:
            check_int("max_steps", self.max_steps)


@dataclass(frozen=True)
class _Taken:
    """Item of the reader thread for a step."""

    parts: list[RankBatch] | None
    """This rank's rows, in parts; `None` at the end of the epoch, or on an error."""
    error: Exception | None = None
    """Error in place of the batch."""


class DistributedDataLoader:
    """Data loader of a run. Every rank makes one with the same plan, and takes the same steps.

    Note: how ranks agree that each has a batch.
        A rank without a batch, because data is unreadable or an iterable ended early, must not leave the others waiting
        in the forward. A step therefore begins with an all-reduce, unless it ran asynchronously during the step before:
        if the next batch of every rank was ready then, no rank waits. A user's `collate_fn` runs between the steps (see
        `_items`), so its outcome is not known ahead.
    """

    def __init__(
        self,
        plan: DataPlan,
        device: torch.device,
        position: Position | None = None,
        bounds: InputBounds | None = None,
        known: Collection[str] | None = None,
        num_parts: int = 1,
    ) -> None:
        """Open the data; collective.

        Args:
            plan: The data and how to read it.
            device: Device of the module.
            position: Position to resume at; `None` for the beginning.
            bounds: Valid ids of the model; another id would raise only on the rank that holds it.
            known: Columns of the rows that the model takes; others are dropped, unless the plan has a `collate_fn`.
                `None`: all but text.
            num_parts: Number of parts of each batch, which are collated one by one.

        Raises:
            DataError: On every rank, if the data is unreadable, has an incomplete item, or differs from the data of
                `position`.
        """
        self._plan = plan
        self._device = device
        self._bounds = bounds or InputBounds()
        self._columns = KnownColumns(known)
        # Without a collate function each column is the argument of its name.
        options = (None, None) if plan.collate_fn is not None else (list(self._bounds.num_ids), self._columns)
        self.source = open_source(plan.source, *options)
        """Source of the rows: files are open, and their blocks are known."""
        num_rows = int(self.source.block_rows.sum()) if isinstance(self.source, BlockSource) else None
        if num_rows is not None:
            check_whole_items(num_rows, plan.rows_per_item)
        layout = _layout(self.source) if plan.shuffle else ""
        order = plan.batch_size, plan.shuffle, plan.seed, num_rows, layout, plan.rows_per_item
        begun = Position(0, 0, 0, *order, plan.run)
        self.position = begun if position is None else _checked(position, begun)
        collate = plan.collate_fn or self._columns
        self._rank, self._world_size = get_rank(), get_world_size()  # the reader thread has no current group
        self._rank_batch = partial(rank_batch, collate, self._rank, rows_per_item=plan.rows_per_item)
        self._num_parts = num_parts
        self._ahead: Prefetch[_Item] | None = None
        # One more batch is held between the steps.
        self._depth = plan.prefetch if plan.collate_fn is not None else max(1, plan.prefetch - 1)
        self._held: _Taken | None = None
        self._vote: _Vote | None = None

    @property
    def total_steps(self) -> int | None:
        """Return the steps of the whole run, including those before `position`; `None` for an iterable."""
        if self.position.num_rows is None:
            return self._plan.max_steps
        # The steps before the position may be of a run with other epochs: count only the remaining steps.
        in_epoch = -(-self.position.num_rows // self._plan.batch_size)
        left = (self._plan.epochs - self.position.epoch) * in_epoch - self.position.step
        total = self.position.num_steps + max(left, 0)
        return total if self._plan.max_steps is None else min(total, self._plan.max_steps)

    @property
    def dropped(self) -> tuple[str, ...]:
        """Columns that this rank has dropped so far. Rank 0 drops those of files, for all ranks."""
        return self._columns.dropped

    def close(self) -> None:
        """Stop reading ahead. Not collective: a pending vote completes unobserved."""
        self._held = self._vote = None
        if self._ahead is not None:
            self._ahead.close()
            self._ahead = None

    def _is_over(self) -> bool:
        is_enough = self._plan.max_steps is not None and self.position.num_steps >= self._plan.max_steps
        return is_enough or self.position.epoch >= self._plan.epochs

    def next(self) -> Passes | None:
        """Return the passes over this rank's next batch, on its device; `None` at the end. Collective: all ranks agree.

        The position does not change until `advance`.

        Raises:
            DataError: On every rank: a rank could not make its batch.
        """
        # Also at the end of the run, so that no vote is pending.
        alike = None if self._vote is None else self._vote.are_alike()
        self._vote = None
        while not self._is_over():
            taken, self._held = self._held or self._taken(wait=True), None
            assert taken is not None
            error = None if taken.error is None else self._data_error(taken.error)
            alike = are_alike(taken.parts, error) if alike is None else alike
            if alike is not None:
                assert taken.parts is not None
                passes = passes_over(taken.parts, alike)
                move = partial(move_inputs, device=self._device)
                passes = [[one.replaced(move) for one in part] for part in passes]
                self._look_ahead()
                return passes
            self.close()
            if not self.position.step:
                raise DataError("data has no rows")
            self.position = replace(self.position, epoch=self.position.epoch + 1, step=0)
        self.close()
        return None

    def advance(self, loss: float = math.nan) -> None:
        """Move the position past the batch.

        Args:
            loss: Loss of the batch; NaN without one.
        """
        where = self.position
        last = loss if math.isfinite(loss) else where.loss
        self.position = replace(where, step=where.step + 1, num_steps=where.num_steps + 1, loss=last)

    def row_numbers(self, counts: Sequence[int]) -> list[int]:
        """Return the numbers in the data of this rank's rows in the batch of `next`. For errors: walks its lanes.

        Args:
            counts: Number of rows of each rank.
        """
        where, rank = self.position, self._rank
        if not isinstance(self.source, BlockSource) or not where.shuffle:
            begin = where.step * where.batch_size + sum(counts[:rank])
            return list(range(begin, begin + counts[rank]))
        order = Order(self.source.block_rows, where.batch_size, **self._order_options())
        return order.shuffled_rows(where.step, rank, self._world_size)

    def _order_options(self) -> dict[str, Any]:
        return {name: getattr(self.position, name) for name in ("shuffle", "seed", "epoch", "rows_per_item")}

    def _taken(self, *, wait: bool) -> _Taken | None:
        """Take the next batch of the epoch; `None` if it is not ready and `wait` is False."""
        try:
            if self._ahead is None:
                self._ahead = Prefetch(self._items(), self._depth)
            item: _Item = None
            try:
                while item is None:  # `None` marks skipped rows: the thread makes progress
                    if not (wait or self._ahead.is_ready()):
                        return None
                    item = self._ahead.take(self._plan.stall_s)
            except StopIteration:
                return _Taken(None)
            parts = self._parts_of(item) if isinstance(item, StepBatch) else item
            for part in parts:
                self._bounds.check(part, self._rank, "data")
        except Exception as raised:  # noqa: BLE001 - the other ranks wait for the outcome
            return _Taken(None, raised)
        return _Taken(parts)

    def _parts_of(self, batch: StepBatch) -> list[RankBatch]:
        whole = self._rank_batch(batch.rows, batch.counts)
        return [part.collated() for part in whole.parts(self._num_parts)]

    def _look_ahead(self) -> None:
        """Start the vote on whether the next batch is ready; collective and asynchronous."""
        if self._plan.collate_fn is not None:
            return
        self._held = self._taken(wait=False)
        self._vote = _Vote(None if self._held is None else self._held.parts)

    def _data_error(self, raised: Exception) -> DataError:
        """Return the error that all ranks raise if one cannot make its batch."""
        if isinstance(raised, DataError):
            return raised
        error = DataError(
            f"the batch of epoch {self.position.epoch}, step {self.position.step} could not be made: "
            f"{type(raised).__name__}: {raised}"
        )
        error.__cause__ = raised
        return error

    def _items(self) -> Iterator[_Item]:
        """Yield the items of the reader thread.

        A user's collate function may draw from the random generators that the model uses. It runs between the steps, so
        that the order of draws is always the same.
        """
        dealt = self.source, self.position.batch_size, self._rank, self._world_size
        for batch in epoch_batches(*dealt, first_step=self.position.step, **self._order_options()):
            if batch is None or self._plan.collate_fn is not None:
                yield batch
            else:
                yield self._parts_of(batch)


def open_source(source: Rows | DataPath, whole: Sequence[str] | None, known: KnownColumns | None) -> Rows:
    """Open the source; collective.

    Rank 0 lists the files for all ranks, whose listings could differ while files are written.

    Args:
        source: The source.
        whole: Names of columns that must hold integers if they exist. `None`: columns may be of any type.
        known: Leaves out the columns that the model does not take; `None`: none are left out.

    Raises:
        DataError: On every rank: the data is unreadable.
    """
    if not isinstance(source, DataPath):
        with agreeing():  # a rank may be unable to load a dataset by its name
            if isinstance(source, BlockSource):
                source.block_rows  # noqa: B018
        return source
    found = from_rank_0(partial(_open, source, whole, known))
    files = _format_of(found["files"]).from_dict(found)
    with agreeing():  # the others would wait in the first step for a rank that cannot read the files
        files.check_seen()
    return files


def _open(source: DataPath, whole: Sequence[str] | None, known: KnownColumns | None) -> dict[str, Any]:
    files = list_all_files(source)
    return _format_of(files).open(source, files, whole, known).as_dict()


def _format_of(files: Sequence[str]) -> type[RowFiles]:
    return TextFiles if files[0].lower().endswith(TEXT_SUFFIXES) else ParquetFiles


def _layout(source: Rows) -> str:
    """Return a digest of the block sizes, on which the order of rows depends."""
    return sha256(source.block_rows.tobytes()).hexdigest()[:16] if isinstance(source, BlockSource) else ""


def _checked(position: Position, begun: Position) -> Position:
    """Raise if the data differs from that of the position, so that step numbers mean other rows."""
    for name in ("batch_size", "shuffle", "seed", "num_rows", "layout", "rows_per_item"):
        was, now = getattr(position, name), getattr(begun, name)
        if was != now:
            raise DataError(
                f"the run that is to be resumed had {name}={was!r}, and this one has {name}={now!r}, so its step "
                f"{position.num_steps} means other rows: pass the same, or resume=False to begin anew"
            )
    return position


class _Vote:
    """Asynchronous vote on whether every rank has its next batch. Every rank makes one, or none."""

    def __init__(self, parts: list[RankBatch] | None) -> None:
        code = code_of(parts or ())
        mine = [parts is not None, code, -code]
        self._lowest = torch.tensor(mine, dtype=torch.int64, device=metadata_device())
        self._work: Any = dist.all_reduce(self._lowest, op=dist.ReduceOp.MIN, group=current_group(), async_op=True)

    def are_alike(self) -> bool | None:
        """Return True if all ranks have a batch of the same arguments, False if these differ, else `None`."""
        wait_for(self._work)
        all_have_one, lowest, highest = self._lowest.tolist()
        return lowest == -highest if all_have_one else None
