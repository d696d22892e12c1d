"""`DistributedDataLoader`: each rank's own rows of the batches of one process, read ahead; as many on every rank."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from typing import Any

import torch
import torch.distributed as dist

from raysharding.batch import RankBatch
from raysharding.data import (
    BlockSource,
    Collate,
    Collator,
    ParquetFiles,
    ParquetPath,
    Position,
    Prefetch,
    Rows,
    StepBatch,
    default_collate,
    epoch_batches,
)
from raysharding.distributed.comm import agree, from_rank_0, metadata_device, wait_for
from raysharding.distributed.fully_shard import move_inputs
from raysharding.errors import DataError
from raysharding.models import InputBounds


@dataclass(frozen=True)
class DataPlan:
    """What data is taken, and how. Picklable; the same on every rank."""

    source: Rows | ParquetPath
    """Where the rows are."""
    batch_size: int
    """Rows of a step, all ranks together."""
    epochs: int = 1
    """How often the data is gone through."""
    max_steps: int | None = None
    """Steps after which the run ends, however much data is left; `None`: no such end."""
    shuffle: bool = False
    """Whether rows come in a random order; see `data.order`."""
    seed: int = 0
    """Of that order."""
    collate: Collate | None = None
    """Makes the model's arguments of rows; `None`: `default_collate`."""
    prefetch: int = 2
    """Batches that are read ahead; without `collate` two at least, of which one is held for the next step."""
    stall_s: float = 120.0
    """Longest wait for a batch, in seconds."""
    run: str = ""
    """Names a run that begins; one that goes on keeps its name."""

    def __post_init__(self) -> None:
        """Refuse what no run can do."""
        for name in ("batch_size", "epochs", "prefetch"):
            check_whole(name, getattr(self, name), least=1)
        check_whole("seed", self.seed, least=0)
        if self.max_steps is not None:
            check_whole("max_steps", self.max_steps, least=1)


def check_whole(name: str, value: Any, *, least: int) -> None:
    """Refuse what is no whole number.

    Raises:
        ValueError: It is not, or less than `least`.
    """
    if type(value) is not int or value < least:
        raise ValueError(f"{name}={value!r}: give a whole number, {least} or more")


@dataclass(frozen=True)
class _Taken:
    """What came off the thread for a step."""

    batch: RankBatch | None
    """This rank's rows; `None`: the epoch is over, or the next is the error."""
    error: Exception | None = None
    """Why there is none."""


class DistributedDataLoader:
    """A run over data. Every rank makes one, with the same plan, and takes the same steps.

    Note: how the ranks come to know that each of them has a batch.
        One that has none, because data cannot be read there or an iterable ended early, must not leave the others in
        the forward. So a step begins with an all-reduce, unless that was done while the step before was computed: a
        rank whose next batch lay ready then has said so, and where all have, nobody waits for anybody. A `collate` of
        the user's runs between the steps (see `_items`), and nobody knows before whether it will go well.
    """

    def __init__(
        self,
        plan: DataPlan,
        device: torch.device,
        position: Position | None = None,
        bounds: InputBounds | None = None,
    ) -> None:
        """Look at the data; collective.

        Args:
            plan: What to take.
            device: Where the module computes.
            position: Where to go on; `None`: at the beginning.
            bounds: Ids that the model has: one that it has not would raise on the rank that holds it alone.

        Raises:
            DataError: On every rank: the data cannot be read, or is not what the position was counted in.
        """
        self._plan = plan
        self._device = device
        self._bounds = bounds or InputBounds()
        # A collate function may make anything of a column; without one it is the argument of its name.
        self._source = _opened(plan.source, list(self._bounds.num_ids) if plan.collate is None else None)
        num_rows = int(self._source.block_rows.sum()) if isinstance(self._source, BlockSource) else None
        layout = _layout(self._source) if plan.shuffle else ""
        begun = Position(0, 0, 0, plan.batch_size, plan.shuffle, plan.seed, num_rows, layout, plan.run)
        self.position = begun if position is None else _checked(position, begun)
        self._collator = Collator(plan.collate or default_collate, dist.get_rank())
        self._ahead: Prefetch[StepBatch | RankBatch | None] | None = None
        # One more is held between the steps.
        self._depth = plan.prefetch if plan.collate is not None else max(1, plan.prefetch - 1)
        self._held: _Taken | None = None
        self._vote: _Vote | None = None

    @property
    def total_steps(self) -> int | None:
        """Steps of the whole run, those before `position` with them; `None` where the rows cannot be counted."""
        if self.position.num_rows is None:
            return self._plan.max_steps
        # What came before the position may have been a run with other epochs: only what is left is this one's.
        in_epoch = -(-self.position.num_rows // self._plan.batch_size)
        left = (self._plan.epochs - self.position.epoch) * in_epoch - self.position.step
        total = self.position.num_steps + max(left, 0)
        return total if self._plan.max_steps is None else min(total, self._plan.max_steps)

    def close(self) -> None:
        """Stop reading ahead. No collective: a vote that is under way ends without anybody who waits for it."""
        self._held = self._vote = None
        if self._ahead is not None:
            self._ahead.close()
            self._ahead = None

    def _is_over(self) -> bool:
        is_enough = self._plan.max_steps is not None and self.position.num_steps >= self._plan.max_steps
        return is_enough or self.position.epoch >= self._plan.epochs

    def next(self) -> RankBatch | None:
        """Return this rank's next batch, on its device; `None` at the end. Collective: no rank goes on alone.

        The position is that of before, until `advance`.

        Raises:
            DataError: On every rank: the batch could not be made on some rank.
        """
        # Also where the run is over, so that nothing of it is under way then.
        is_known = self._vote is not None and self._vote.is_unanimous()
        self._vote = None
        while not self._is_over():
            taken, self._held = self._held or self._taken(wait=True), None
            assert taken is not None
            error = None if taken.error is None else self._said(taken.error)
            if is_known or _all_have_one(taken.batch, error):
                assert taken.batch is not None
                batch = taken.batch.replaced(lambda value: move_inputs(value, self._device))
                self._look_ahead()
                return batch
            self.close()
            if not self.position.step:
                raise DataError("data has no rows")
            self.position = replace(self.position, epoch=self.position.epoch + 1, step=0)
        self.close()
        return None

    def advance(self) -> None:
        """The batch has been trained on."""
        where = self.position
        self.position = replace(where, step=where.step + 1, num_steps=where.num_steps + 1)

    def _taken(self, *, wait: bool) -> _Taken | None:
        """Take the next batch of the epoch; `None`: without `wait` there is none yet."""
        try:
            if self._ahead is None:
                self._ahead = Prefetch(self._items(), self._depth)
            try:
                item = self._item(self._ahead, wait=wait)
            except StopIteration:
                return _Taken(None)
            if item is None:
                return None
            batch = item if isinstance(item, RankBatch) else self._collator.batch(item.rows, item.counts)
            self._bounds.check(batch, dist.get_rank(), "data")
        except Exception as raised:  # noqa: BLE001 - the other ranks wait to hear of it
            return _Taken(None, raised)
        return _Taken(batch)

    def _item(self, ahead: Prefetch[StepBatch | RankBatch | None], *, wait: bool) -> StepBatch | RankBatch | None:
        while wait or ahead.is_ready():
            item = ahead.take(self._plan.stall_s)
            if item is not None:  # rows that are passed over: each of these is a sign of life
                return item
        return None

    def _look_ahead(self) -> None:
        """Begin to tell the others whether the next batch lies ready; collective, and does not wait for them."""
        if self._plan.collate is not None:
            return
        self._held = self._taken(wait=False)
        self._vote = _Vote(has_one=self._held is not None and self._held.batch is not None)

    def _said(self, raised: Exception) -> DataError:
        """What keeps a rank from its batch, as every rank is told."""
        if isinstance(raised, DataError):
            return raised
        error = DataError(
            f"the batch of epoch {self.position.epoch}, step {self.position.step} could not be made: "
            f"{type(raised).__name__}: {raised}"
        )
        error.__cause__ = raised
        return error

    def _items(self) -> Iterator[StepBatch | RankBatch | None]:
        """What the thread makes.

        A collate function of the user's may draw random numbers, from the generators that the model draws from, too:
        it runs between the steps, where it does so in the same order every time.
        """
        where = self.position
        batches = epoch_batches(
            self._source,
            where.batch_size,
            dist.get_rank(),
            dist.get_world_size(),
            shuffle=where.shuffle,
            seed=where.seed,
            epoch=where.epoch,
            first_step=where.step,
        )
        for batch in batches:
            if batch is None or self._plan.collate is not None:
                yield batch
            else:
                yield self._collator.batch(batch.rows, batch.counts)


def _opened(source: Rows | ParquetPath, whole: Sequence[str] | None) -> Rows:
    """Files are listed once, by rank 0: ranks that listed them while they are written would differ."""
    if not isinstance(source, ParquetPath):
        return source
    files = ParquetFiles.from_dict(from_rank_0(lambda: ParquetFiles.open(source, whole).as_dict()))
    error: Exception | None = None
    try:
        files.check_seen()
    except DataError as raised:
        error = raised
    # A rank that cannot read them must not leave the others in the first step.
    agree(error)
    return files


def _layout(source: Rows) -> str:
    """Digest of the sizes of blocks: rows that lie in others come in another order."""
    return sha256(source.block_rows.tobytes()).hexdigest()[:16] if isinstance(source, BlockSource) else ""


def _checked(position: Position, begun: Position) -> Position:
    """Refuse to go on in other data, where a step number means other rows."""
    for name in ("batch_size", "shuffle", "seed", "num_rows", "layout"):
        was, now = getattr(position, name), getattr(begun, name)
        if was != now:
            raise DataError(
                f"the run that is to be resumed had {name}={was!r}, and this one has {name}={now!r}, so its step "
                f"{position.num_steps} means other rows: pass the same, or resume=False to begin anew"
            )
    return position


class _Vote:
    """Whether every rank has its next batch, asked of all while they compute. All make one, or none does."""

    def __init__(self, *, has_one: bool) -> None:
        self._count = torch.tensor([has_one], dtype=torch.int32, device=metadata_device())
        self._work = dist.all_reduce(self._count, async_op=True)

    def is_unanimous(self) -> bool:
        """Whether all have; the answer came long ago, unless a rank did not."""
        assert self._work is not None
        wait_for(self._work)
        return int(self._count) == dist.get_world_size()


def _all_have_one(batch: RankBatch | None, error: Exception | None) -> bool:
    """Whether every rank has a batch; `False` where none has."""
    flags = torch.tensor([batch is not None, error is not None], dtype=torch.int32, device=metadata_device())
    # A rank without a batch that left here alone would leave the others in the forward.
    dist.all_reduce(flags)
    have, failed = flags.tolist()
    if failed:
        agree(error)
    if have not in (0, dist.get_world_size()):
        raise DataError(
            f"the data ended on {dist.get_world_size() - have} ranks while others have rows: an iterable must give the "
            "same rows, in the same order, on every rank"
        )
    return bool(have)
