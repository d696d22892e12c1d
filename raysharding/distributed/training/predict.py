"""`Prediction`: a forward or `generate` over data, each rank on its own parts of the rows; columns for every row."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import nn

from raysharding.arguments import check_int
from raysharding.batch import Collate, RankBatch
from raysharding.data import (
    BlockSource,
    DataPath,
    KnownColumns,
    Part,
    PartBatch,
    PartFiles,
    PartTable,
    PartWriter,
    Prefetch,
    Rows,
    as_json,
    as_table,
    cast_table,
    cut_parts,
    fingerprint,
    in_order,
    key_types,
    num_forwards,
    part_batches,
    rank_batch,
    rows_fingerprint,
    same_columns,
    schema_as_text,
    schema_from_text,
    unify_schemas,
)
from raysharding.distributed.comm import agreeing, all_gather_json, from_rank_0, get_rank, get_world_size
from raysharding.distributed.fully_shard import (
    check_execution_order,
    is_kept_gathered,
    module_mode,
    move_inputs,
    recovering,
    unwrapped,
    weights_fingerprint,
)
from raysharding.distributed.training.data_loader import open_source
from raysharding.distributed.training.forward import call_on_outputs
from raysharding.distributed.training.generate import check_generation, generate, without_padding
from raysharding.distributed.training.losses import call_model, known_arguments
from raysharding.distributed.training.passes import agreed_passes, own_pass
from raysharding.distributed.training.predict_columns import check_columns, check_types, key_columns, last_logits
from raysharding.errors import DataError
from raysharding.models import InputBounds

Columns: TypeAlias = Callable[[Any, Any], Mapping[str, Any]]
"""`fn(outputs, batch)`: takes the model's output, or the ids of `generate`, and the batch; returns columns, each with
one value per row: a tensor or array whose first dim is the row, a pyarrow array, or a list."""

_PART_BATCHES = 64
_MAX_PARTS = 1000


@dataclass(frozen=True)
class PredictPlan:
    """Options of a `predict`. Picklable; the same on every rank."""

    source: Rows | DataPath
    """Source of the rows."""
    batch_size: int
    """Rows of a forward, over all ranks; each rank takes its share, rounded up, of rows of its own."""
    fn: Columns | None = None
    """Makes the columns; `None` for `logits` of the last position, or `generated`."""
    generate_kwargs: Mapping[str, Any] | None = None
    """Arguments of `generate`; `None` for a forward."""
    keys: tuple[str, ...] = ()
    """Columns of the data that the result has as well."""
    by_length: bool = False
    """True to bring rows of like length together."""
    collate_fn: Collate | None = None
    """Makes a batch of rows; `None` for `default_collate`. Runs on a thread."""
    prefetch: int = 2
    """Batches to read ahead."""
    rows_per_file: int | None = None
    """Largest number of rows of a part; `None`: 64 batches, or a thousandth of the rows."""
    output: str | None = None
    """Directory or URI of the files; `None`: the ranks hold the tables until they are taken."""
    resume: bool = False
    """True to continue the run that is in `output`, if there is one."""
    summon_full_params: bool | None = None
    """See `Sharding.summon_full_params`."""
    stall_s: float = 120.0
    """Longest wait for a batch, in seconds."""
    run: str = ""
    """Name of the run, which it keeps through restarts."""
    num_parts: int | None = None
    """Number of parts, where a restart continues a run without `output`."""
    taken: tuple[int, ...] = field(default=(), repr=False)
    """First rows of the parts that the driver has, in a run without `output`."""

    def __post_init__(self) -> None:
        """Check the options."""
        for name in ("batch_size", "prefetch"):
            check_int(name, getattr(self, name))
        if self.rows_per_file is not None:
            check_int("rows_per_file", self.rows_per_file)
        if self.fn is not None and not callable(self.fn):
            raise ValueError(f"fn={self.fn!r}: give a function of the model's output and the batch")
        if self.generate_kwargs is not None:
            check_generation(dict(self.generate_kwargs))
        if self.resume and self.output is None:
            raise ValueError("resume=True continues the files of an earlier run: give their directory, output=")
        if self.fn is None and (made := "logits" if self.generate_kwargs is None else "generated") in self.keys:
            what = f"keys={list(self.keys)}: without fn=, the result's column {made!r} is the model's"
            raise ValueError(f"{what}: omit it, or give fn=, which returns the model's values under another name")

    @property
    def fn_name(self) -> str:
        """Name of `fn`, for errors and for the record of the run."""
        return "" if self.fn is None else str(getattr(self.fn, "__qualname__", type(self.fn).__name__))

    @property
    def maker(self) -> str:
        """What makes the columns, for errors."""
        return "the model" if self.fn is None else f"fn={self.fn_name}"

    def named(self, column: str) -> str:
        """Return what errors call a column."""
        whose = "the data (keys=)" if column in self.keys else self.maker
        return f"the column {column!r} of {whose}"


class Prediction:
    """A `predict`. Every rank makes one with the same plan, and takes the same steps.

    Note: ranks without rows.
        Each rank computes parts of its own, and the forward of a sharded model is collective. All ranks take as many
        forwards as the longest of the parts that they compute side by side; a rank that has no rows left takes part
        with a dummy row, whose output is dropped.
    """

    def __init__(
        self,
        plan: PredictPlan,
        device: torch.device,
        bounds: InputBounds | None = None,
        module: nn.Module | None = None,
    ) -> None:
        """Open the data, and find the parts that are to be computed; collective.

        Args:
            plan: The run.
            device: Device of the module.
            bounds: Valid ids of the model.
            module: The root module, by whose forward columns are dropped; `None`: only text is.

        Raises:
            DataError: On every rank: the data cannot be read, or `output` holds something else.
        """
        self._plan, self._device, self._bounds = plan, device, bounds or InputBounds()
        known = None if module is None else known_arguments(module, [])
        self._columns = KnownColumns(known)
        self._read = KnownColumns(known, also=plan.keys)
        options = (None, None) if plan.collate_fn is not None else (list(self._bounds.num_ids), self._read)
        source = open_source(plan.source, *options)
        assert isinstance(source, BlockSource), "the driver refuses iterables"
        self._source = source
        self.num_rows = int(source.block_rows.sum())
        if not self.num_rows:
            raise DataError("data has no rows")
        self._rank, self._world_size = get_rank(), get_world_size()
        self._share = -(-plan.batch_size // self._world_size)
        self._files = None if plan.output is None else PartFiles(plan.output)
        self._schema: Any = None
        self._key_types = self._types_of_keys()
        self.parts, self._todo = self._find_parts(module)
        self._left = num_forwards(self._todo, self._share, self._world_size)
        self._items: Prefetch[tuple[PartBatch, RankBatch]] | None = None
        self._writer: PartTable | PartWriter | None = None
        self._window: list[tuple[Any, Any]] = []
        self._taken: PartBatch | None = None
        self._error: Exception | None = None
        self.finished: list[tuple[Part, Any]] = []
        """Parts that were finished since the list was emptied, with their tables if there is no `output`."""

    @property
    def num_done(self) -> int:
        """Rows of the parts that were complete at the beginning."""
        return self.num_rows - sum(part.num_rows for part in self._todo)

    @property
    def is_over(self) -> bool:
        """True if no forward is left."""
        return self._left == 0

    @property
    def dropped(self) -> tuple[str, ...]:
        """Columns that this rank has dropped so far, since the model does not take them."""
        names = (*self._read.dropped, *self._columns.dropped)
        return tuple(dict.fromkeys(name for name in names if name not in self._plan.keys))

    def steps(self, module: nn.Module, num_steps: int) -> tuple[int, int]:
        """Process batches; collective. Without `output`, ends with the parts that the ranks compute side by side.

        Args:
            module: The sharded root module; its modes are restored.
            num_steps: Number of forwards, unless the run ends before.

        Returns:
            The number of forwards, and of this rank's rows in them.

        Raises:
            DataError: On every rank: a rank could not read, make or write rows; the error names them.
            Exception: Any error of the model; if all ranks raise the same, later calls are correct. With gathered
                parameters, on every rank at the end of the call, as from `agree`.
        """
        num_rows, left, module = 0, self._left, unwrapped(module)
        is_apart = self._plan.generate_kwargs is None and is_kept_gathered(module)
        with recovering(module):  # on all ranks, after the error of one
            for _ in range(min(num_steps, left)):
                batch = self._step(module, is_apart=is_apart)
                if batch is None:
                    break
                num_rows += batch.counts[self._rank]
                self._left -= 1
                if batch.ends_wave and self._files is None:
                    break
            # Every rank calls this, whatever became of its last batch: the others would wait in the next forward.
            with agreeing():
                self._raise_kept()
        if self.is_over and self._files is not None:
            from_rank_0(partial(self._files.check_complete, self.parts))
        return left - self._left, num_rows

    def close(self) -> None:
        """Stop reading ahead, and remove the file of a part that is not complete. Not collective."""
        if self._items is not None:
            self._items.close()
            self._items = None
        if self._writer is not None:
            self._writer.abort()
            self._writer = None

    def _find_parts(self, module: nn.Module | None) -> tuple[list[Part], list[Part]]:
        """Return all parts, and those to compute; collective."""
        plan, world_size, files = self._plan, self._world_size, self._files
        per_part = plan.rows_per_file or max(_PART_BATCHES * self._share, -(-self.num_rows // _MAX_PARTS))
        # Equally many for each rank, so that none waits for another at the end.
        num_parts = min(self.num_rows, world_size * -(-self.num_rows // (world_size * per_part)))
        if files is None:
            parts = cut_parts(self.num_rows, plan.num_parts or num_parts)
            return parts, [part for part in parts if part.start not in plan.taken]

        weights = "" if module is None else weights_fingerprint(unwrapped(module))

        def begin() -> dict[str, Any]:
            record = files.begin(self._record(num_parts, weights), resume=plan.resume)
            parts = cut_parts(self.num_rows, record["num_parts"])
            done, schema = files.find(parts)
            return {
                "num_parts": record["num_parts"],
                "done": [part.start for part in done],
                "schema": None if schema is None else schema_as_text(schema),
            }

        found = from_rank_0(begin)
        self._schema = schema_from_text(found["schema"]) if found["schema"] else None
        parts = cut_parts(self.num_rows, found["num_parts"])
        done = set(found["done"])
        return parts, [part for part in parts if part.start not in done]

    def _record(self, num_parts: int, weights: str) -> dict[str, Any]:
        """Return what the run computes; a run that goes on must compute the same."""
        plan = self._plan
        return {
            "run": plan.run,
            "num_parts": num_parts,
            "num_rows": self.num_rows,
            "fn": plan.fn_name,
            "keys": list(plan.keys),
            "generate_kwargs": as_json(plan.generate_kwargs),
            "code": fingerprint([plan.fn, plan.collate_fn]),
            "data": rows_fingerprint(self._source),
            "weights": weights,
        }

    def _step(self, module: nn.Module, *, is_apart: bool) -> PartBatch | None:
        """Process one batch; collective, unless the ranks run apart and the columns are known.

        Args:
            module: The root module.
            is_apart: True if no rank waits for another in a forward.

        Returns:
            The rows; `None` if this rank has an error, and waits in `steps` for the others, which may go on.
        """
        is_first = self._schema is None
        if is_apart and not is_first:
            table = self._or_kept(lambda: self._processed(module, self._next()))
            if self._error is not None:
                return None
        else:
            # Every rank calls this, whatever became of its last batch: the others would wait in the forward.
            (passes,) = agreed_passes(self._next)
            process = partial(self._processed, module, passes)
            table = self._or_kept(process) if is_apart else process()
        if is_first:
            self._schema = self._agreed_schema(table)
        taken = self._taken
        assert taken is not None, "_next has set it"
        if table is not None:
            self._or_kept(lambda: self._write(taken, self._fitted(table)))
        return taken

    def _processed(self, module: nn.Module, passes: Sequence[RankBatch]) -> Any:
        """Return the table of the last rows that were taken; `None` for a dummy row, or after an error in it."""
        passes = [one.replaced(lambda value: move_inputs(value, self._device)) for one in passes]
        taken, own, output = self._taken, own_pass(passes), None
        for one in passes:
            made = self._run(module, one)
            output = made if one is own else output
        if taken is None or taken.part is None:
            return None
        return self._or_kept(lambda: self._table(module, taken, own, output))

    def _or_kept(self, make: Callable[[], Any]) -> Any:
        """Return `make()`; after an error `None`, and the ranks raise the error when they agree the next time."""
        if self._error is not None:
            return None
        try:
            return make()
        except Exception as error:  # noqa: BLE001 - see above
            self._error = error
            return None

    def _raise_kept(self) -> None:
        if self._error is not None:
            raise self._error

    def _next(self) -> list[RankBatch]:
        """Take this rank's next rows, and return the batch of them."""
        self._raise_kept()
        if self._items is None:
            self._items = Prefetch(self._batches(), self._plan.prefetch)
        try:
            self._taken, batch = self._items.take(self._plan.stall_s)
            self._bounds.check(batch, self._rank, "data")
        except DataError:
            raise
        except Exception as error:
            raise DataError(f"rows could not be read: {type(error).__name__}: {error}") from error
        return [batch]

    def _batches(self) -> Iterator[tuple[PartBatch, RankBatch]]:
        """Yield the items of the reader thread."""
        where = (self._todo, self._share, self._rank, self._world_size)
        collate = self._plan.collate_fn or self._collate
        keys = {name: self._key_types.get(name) for name in self._plan.keys}
        for taken in part_batches(self._source, *where, by_length=self._plan.by_length, keys=keys):
            try:
                batch = rank_batch(collate, self._rank, taken.rows, taken.counts).collated()
            except DataError:
                raise
            except Exception as error:
                what = f"the batch could not be made: {type(error).__name__}: {error}"
                raise DataError(f"{what} ({_place(taken)})") from error
            yield taken, batch

    def _collate(self, rows: list[Any]) -> Any:
        """Make a batch of the columns that the model takes. If it takes any name, keys are for the result alone."""
        if self._columns.names is None and self._plan.keys:
            rows = [
                {name: value for name, value in row.items() if name not in self._plan.keys}
                if isinstance(row, Mapping)
                else row
                for row in rows
            ]
        return self._columns(rows)

    def _run(self, module: nn.Module, batch: RankBatch) -> Any:
        """Return the output of the model, or the ids of `generate`, for this rank's rows; collective.

        Several sequences of a row are in a dim of their own: columns have one value per row.
        """
        if self._plan.generate_kwargs is not None:
            kwargs = {**batch.wrapped_kwargs, **self._plan.generate_kwargs}
            if kwargs.get("seed") is not None:  # each forward draws other samples
                kwargs["seed"] += self._left * self._world_size
            whole = replace(batch, wrapped_kwargs=kwargs)
            made = generate(module, whole, keep=not batch.is_dummy)
            is_several = made.num_sequences > 1 and isinstance(made.value, torch.Tensor)
            return made.value.unflatten(0, (-1, made.num_sequences)) if is_several else made.value
        with torch.no_grad(), module_mode(module, training=False):
            output = call_model(module, batch.args, batch.kwargs)
        check_execution_order(module)
        return output

    def _table(self, module: nn.Module, taken: PartBatch, batch: RankBatch, output: Any) -> Any:
        """Return the columns of a batch as a table."""
        plan = self._plan
        types = self._key_types
        if plan.fn is not None:
            columns = self._columns_of_fn(module, plan.fn, output, batch, taken)
        elif plan.generate_kwargs is not None:
            kwargs, ids = {**batch.kwargs, **plan.generate_kwargs}, getattr(output, "sequences", output)
            columns = {"generated": without_padding(module, ids, kwargs)}
            types = {**types, "generated": as_table({"generated": ids[:0]}, {}).schema.field("generated").type}
        else:
            columns = {"logits": last_logits(output, batch.kwargs.get("attention_mask"))}
        keys = (
            key_columns(taken.rows, plan.keys) if taken.keys is None else {name: taken.keys[name] for name in plan.keys}
        )
        return as_table({**keys, **columns}, types, plan.named)

    def _columns_of_fn(
        self, module: nn.Module, fn: Columns, output: Any, batch: RankBatch, taken: PartBatch
    ) -> Mapping[str, Any]:
        try:
            columns: Mapping[str, Any] = call_on_outputs(fn, output, batch, module)
        except DataError as error:
            raise DataError(f"{error} ({_place(taken)})") from error.__cause__
        check_columns(self._plan.fn_name, columns, len(taken.rows), self._plan.keys)
        return columns

    def _types_of_keys(self) -> Mapping[str, Any]:
        """Return key → its pyarrow type, as far as the data has types; collective."""
        # Rank 0 reads for all, and all fail with it: a rank that failed alone would leave the others in a forward.
        found = from_rank_0(lambda: schema_as_text(key_types(self._source, self._plan.keys)))
        return {one.name: one.type for one in schema_from_text(found)}

    def _agreed_schema(self, table: Any) -> Any:
        """Return the columns and types of the first batches of all ranks; collective, in the first step."""
        # Every rank calls this, without rows or after an error too: the others would wait in the all-gather.
        found = all_gather_json("" if table is None else schema_as_text(table.schema))
        schemas = [schema_from_text(one) for one in found if one]
        if not schemas:
            return None
        # All ranks see the same schemas, and return the same, whatever a rank's own batch did: `_step` goes by it.
        try:
            schema = unify_schemas(schemas, self._plan.maker)
            if self._files is not None:
                check_types(schema, self._key_types, self._plan.keys, self._plan.named)
        except DataError as error:
            self._error = self._error or error
            return None
        return schema

    def _fitted(self, table: Any) -> Any:
        """Return the table of a batch with the types of the file; without files, with its own."""
        if self._files is not None:
            return cast_table(table, self._schema, self._plan.named)
        table = same_columns(table, self._schema)
        self._schema = unify_schemas([self._schema, table.schema], self._plan.maker)
        return table

    def _write(self, taken: PartBatch, table: Any) -> None:
        """Add the rows of a batch to the file or table of their part, in the order of the data."""
        part, files = taken.part, self._files
        assert part is not None, "the rank has rows"
        if self._writer is None:
            self._writer = PartTable() if files is None else PartWriter(files.path_of(part), self._schema)
        if self._plan.by_length:
            self._window.append((taken.places, table))
            if not taken.ends_window:
                return
            places = [place for own, _ in self._window for place in own]
            table = in_order([one for _, one in self._window], places)
            self._window = []
        self._writer.write(table)
        if taken.ends_part:
            writer, self._writer = self._writer, None
            writer.finish()
            if isinstance(writer, PartTable):
                self.finished.append((part, cast_table(writer.table, self._schema, self._plan.named)))


def _place(taken: PartBatch) -> str:
    part = taken.part
    return "a dummy row" if part is None else f"among rows {part.start} to {part.start + part.num_rows - 1}"
