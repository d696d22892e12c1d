"""Marks on arguments and results (`Split`, `Same`, `PerRank`, `Out`); rows are dealt to ranks, outputs are joined."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, is_dataclass, replace
from functools import partial
from operator import attrgetter
from typing import Any, Literal, NamedTuple, TypeAlias

import torch

from raysharding.arguments import check_int
from raysharding.tree import children, leaves, map_leaves, rebuild, rebuild_mapping

Collate: TypeAlias = Callable[[list[Any]], Any]
"""Takes a list of rows; returns a mapping of the model's keyword arguments, a tuple of positional arguments, or one
value. The model gets them as they are: no dim needs to be the number of rows."""


@dataclass(frozen=True, eq=False)
class Split:
    """Rows to distribute over the ranks in order: sizes differ by at most one item, the larger parts come first.

    An item is one row, or `rows_per_item` consecutive rows that belong together: a chosen and a rejected answer, or a
    query with its candidates. The rows of an item stay on one rank, and in one part of an accumulation.

    If the `Split` of a mapping with str keys, such as a tokenizer's `BatchEncoding`, is the only positional argument,
    the model gets the mapping's tensors as keyword arguments: `group.forward(Split(batch))`. If a model's forward takes
    a mapping itself, pass the mapping by name: `group.forward(x=Split(mapping))`.

    With `collate_fn`, `value` is a list of examples of any kind, which is divided as rows are: each rank makes the
    model's arguments of its own examples. Such a `Split` is the only positional argument, and no other one is beside
    it: `group.train_step(Split(examples, collate_fn=collate))`.
    """

    value: Any
    """A tensor or numpy array, or nested dicts, lists, tuples, dataclasses of these. Arrays reach ranks as tensors. A
    list of numbers, or of equally long lists of numbers, becomes the tensor that `torch.tensor` makes of it. With
    `collate_fn`, a list or tuple of examples that can be pickled."""
    dim: int = 0
    """The dim that holds the rows, in every tensor of `value`; negative counts from the end. Default 0."""
    rows_per_item: int = 1
    """Number of consecutive rows that belong together, the same in all Splits of a call. Default 1."""
    collate_fn: Collate | None = None
    """Called on each rank with the list of the rank's examples, once for each part of an accumulation. Its tensors may
    have any shape, such as the patches of images. Default: none, `value` holds tensors."""

    def __post_init__(self) -> None:
        """Make tensors of lists of numbers; raise ValueError if these differ in length, or an option is invalid."""
        _check_dim("Split", self.dim)
        check_int("rows_per_item", self.rows_per_item)
        if self.collate_fn is not None:
            _check_examples(self)
        elif not isinstance(self.value, torch.Tensor):
            object.__setattr__(self, "value", _with_tensors(self.value, "Split"))

    def num_rows(self, path: str = "Split") -> int:
        """Check every tensor and return the number of rows that each tensor has.

        Args:
            path: Path of this `Split` in the call's arguments, for errors.

        Raises:
            ValueError: There is no tensor, a leaf is not a tensor, a tensor lacks `dim`, or row counts differ. The
                error names the path.
        """
        if self.collate_fn is not None:
            return len(self.value)
        counts = {where: _count_rows(where, leaf, self.dim) for where, leaf in leaves(self.value, path)}
        if not counts:
            raise ValueError(f"{path}: holds no tensor; give a tensor, or nested dicts, lists or tuples of tensors")
        _check_equal("the tensors of one Split need the same number of rows", counts, f"; {_NO_ROWS}")
        return next(iter(counts.values()))

    def dims(self) -> set[int]:
        """Return the dims that hold rows, counted from the front: several if `dim` is negative and `ndim` varies."""
        return {0} if self.collate_fn is not None else {self.dim % leaf.ndim for _, leaf in leaves(self.value)}

    def rows(self, start: int, num_rows: int) -> Split:
        """Return copies of rows `start … start + num_rows`: sending a view would send its whole storage."""
        if self.collate_fn is not None:
            return replace(self, value=list(self.value[start : start + num_rows]))
        return replace(self, value=map_leaves(lambda _, leaf: _take(leaf, self.dim, start, num_rows), self.value))

    def resized(self, num_rows: int) -> Split:
        """Return the first `num_rows` rows, whole items, or the first item repeated if there are fewer rows."""
        if self.num_rows() >= num_rows:
            return self.rows(0, num_rows)
        first, times = self.rows(0, self.rows_per_item), num_rows // self.rows_per_item
        if self.collate_fn is not None:
            return replace(first, value=first.value * times)
        return replace(first, value=map_leaves(lambda _, leaf: torch.cat([leaf] * times, dim=self.dim), first.value))


@dataclass(frozen=True, eq=False)
class Same:
    """A value without rows: every rank gets all of the value.

    Any other value outside a `Split` is also sent to every rank. But a tensor or numpy array beside a `Split` that
    looks like rows is rejected, because each rank would combine the tensor's first rows with its own rows of the
    `Split`. A tensor looks like rows if its size in the `Split`'s dim is the number of rows, 2 or more, and either it
    has two or more dims, or it has one dim and the name of a batch's column: its keyword, or its key in a mapping, is
    or ends in `_mask`, `_label`, `_labels`, `_target`, `_targets`, `_ids` or `_positions`.
    """

    value: Any
    """A tensor or numpy array, or any object that contains some."""


@dataclass(frozen=True, eq=False)
class PerRank(Sequence[Any]):
    """One value for each rank, by rank: in an argument, each rank's input; in a result, each rank's output."""

    values: tuple[Any, ...]
    """The values by rank. In a result, the value of a rank that had no rows is `None`."""

    def __init__(self, values: Sequence[Any]) -> None:
        object.__setattr__(self, "values", tuple(values))

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, rank: Any) -> Any:
        return self.values[rank]

    def __repr__(self) -> str:
        return f"PerRank({list(self.values)!r})"


_MARKS = (Split, Same, PerRank)
_COLUMN = re.compile(r"(^|_)(mask|labels?|targets?|ids|positions)$")
_NAME = re.compile(r"[^\W\d]\w*")
_NO_ROWS = "where images are no rows, give Split(examples, collate_fn=...), a list of examples that each rank collates"
_GENERATION_LISTS = ("bad_words_ids", "force_words_ids", "forced_decoder_ids")
_KINDS = ("gather", "rank0", "per_rank", "refs", "none")
_GIVE_OUT = "give Out.gather(), Out.rank0(), Out.per_rank(), Out.refs() or Out.none()"


@dataclass(frozen=True)
class Out:
    """The outputs that a call returns. Create one with the class methods and pass it as `out=`."""

    kind: Literal["gather", "rank0", "per_rank", "refs", "none"]
    """Kind of result: one of the five that the class methods create."""
    dim: int | None = None
    """For `gather`: the dim of the outputs that holds rows; negative counts from each output's end. `None`: the dim of
    the call's Splits."""

    def __post_init__(self) -> None:
        """Raise ValueError if `kind` is unknown or `dim` is not an integer."""
        if self.kind not in _KINDS:
            raise ValueError(f"Out({self.kind!r}): {_GIVE_OUT}")
        if self.dim is not None:
            _check_dim("Out.gather", self.dim)

    @classmethod
    def gather(cls, dim: int | None = None) -> Out:
        """Return one output for the whole batch, rows in order. The default for a call with a `Split`.

        Args:
            dim: The dim of the outputs that holds rows. Default: the dim of the call's Splits.
        """
        return cls("gather", dim)

    @classmethod
    def rank0(cls) -> Out:
        """Return rank 0's output only. The default for a call without a `Split`."""
        return cls("rank0")

    @classmethod
    def per_rank(cls) -> Out:
        """Return every rank's own output, as `PerRank`; `None` for a rank that had no rows."""
        return cls("per_rank")

    @classmethod
    def refs(cls) -> Out:
        """Return a reference to every rank's output, as `PerRank`; the outputs stay in the object store.

        They end with the group: `ray.get` them, or pass them on, before its `shutdown`.

        `None` for a rank that had no rows.
        """
        return cls("refs")

    @classmethod
    def none(cls) -> Out:
        """Return nothing: the outputs never leave the ranks."""
        return cls("none")


@dataclass(frozen=True, eq=False)
class RankBatch:
    """One rank's part of a call's arguments. Picklable. A replicated value is the same object in every rank's batch."""

    wrapped_args: tuple[Any, ...] = ()
    """Positional arguments; split values stay wrapped in `Split`, which tells the rank which dims hold rows."""
    wrapped_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments; split values stay wrapped in `Split`."""
    num_rows: int | None = None
    """Number of this rank's rows. 0: the rank has a dummy item, a copy of item 0. `None`: the call has no `Split`."""
    rows: tuple[int, ...] = ()
    """Every rank's `num_rows`, by rank; empty if the call has no `Split`."""
    dim: int = 0
    """The dim of the outputs that holds rows: the Splits' dim if all Splits name the same, else 0."""
    fetch_s: float | None = None
    """Longest wait for the value of an `ObjectRef`, in seconds; `None`: no rank's arguments have one."""
    rows_per_item: int = 1
    """Number of consecutive rows that belong together."""
    is_replicated: bool = False
    """True if the call has neither `Split` nor `PerRank`: every rank computes the same."""
    dummy_rows: int | None = None
    """Number of rows of a dummy that is a copy of another rank's rows; `None`: a dummy is one item."""

    @property
    def args(self) -> tuple[Any, ...]:
        """Positional arguments as the model takes them."""
        return tuple(_map_marks(attrgetter("value"), value, Split) for value in self.wrapped_args)

    @property
    def kwargs(self) -> dict[str, Any]:
        """Keyword arguments as the model takes them."""
        return {key: _map_marks(attrgetter("value"), value, Split) for key, value in self.wrapped_kwargs.items()}

    @property
    def is_dummy(self) -> bool:
        """True if this rank has no rows of its own, only a dummy item with which it joins the others' collectives."""
        return self.num_rows == 0

    @property
    def num_held(self) -> int | None:
        """Number of rows of the values, those of a dummy included; `None` if the call has no `Split`."""
        return None if self.num_rows is None else self.num_rows or self.dummy_rows or self.rows_per_item

    @property
    def examples(self) -> Split | None:
        """The `Split` of this rank's examples, before `collated`; `None` if the values are the model's arguments."""
        first = self.wrapped_args[0] if self.wrapped_args else None
        return first if isinstance(first, Split) and first.collate_fn is not None else None

    def collated(self) -> RankBatch:
        """Return the same call with the arguments that `collate_fn` makes of this rank's examples.

        Raises:
            ValueError: `collate_fn` returned no tensor, or an argument that the call has as well.
        """
        if self.examples is None or self.examples.collate_fn is None:
            return self
        made = self.examples.collate_fn(self.examples.value)
        args: tuple[Any, ...] = ()
        kwargs: dict[str, Any] = {}
        if isinstance(made, Mapping):
            kwargs = {str(name): as_tensors(str(name), value) for name, value in made.items()}
        else:
            args = tuple(as_tensors("", value) for value in (made if isinstance(made, tuple | list) else (made,)))
        if not any(isinstance(leaf, torch.Tensor) for _, leaf in leaves((args, kwargs))):
            raise ValueError(f"collate returned a {type(made).__name__} without a tensor: nothing for the model")
        _check_names(kwargs, self.wrapped_kwargs, "by collate")
        return replace(self, wrapped_args=args, wrapped_kwargs={**kwargs, **self.wrapped_kwargs})

    def split_dims(self) -> set[int]:
        """Return the dims of the call's Splits, as they were given."""
        wrapped = (self.wrapped_args, dict(self.wrapped_kwargs))
        return {leaf.dim for _, leaf in leaves(wrapped, is_leaf=_is_mark) if isinstance(leaf, Split)}

    def parts(self, num_parts: int) -> list[RankBatch]:
        """Split the rows of every rank into parts, each a call of its own, whose sizes differ by at most one item.

        Args:
            num_parts: Number of parts, 1 or more; the result has fewer if no rank has that many items.

        Raises:
            ValueError: There are no rows to split, or `num_parts` is not positive.
        """
        check_num_parts(num_parts, self.num_rows)
        if num_parts == 1 or self.num_rows is None:
            return [self]
        cut = [split_rows(rows, num_parts, self.rows_per_item) for rows in self.rows]
        own, start = split_rows(self.num_rows, num_parts, self.rows_per_item), 0
        parts = []
        for index, taken in enumerate(own):
            rows = tuple(one[index] for one in cut)
            if any(rows):
                begin, num_held = start if taken else 0, taken or self.rows_per_item
                part = self._with_splits(partial(Split.rows, start=begin, num_rows=num_held))
                parts.append(replace(part, num_rows=taken, rows=rows))
            start += taken
        return parts

    def resized(self, num_rows: int) -> RankBatch:
        """Return the same call on this rank's first `num_rows` rows, whole items, repeated if there are fewer."""
        batch = self._with_splits(lambda split: split.resized(num_rows))
        return replace(batch, num_rows=num_rows, rows=(num_rows,) * len(self.rows))

    def _with_splits(self, change: Callable[[Split], Split]) -> RankBatch:
        return self.replaced(lambda value: _map_marks(change, value, Split))

    def replaced(self, change: Callable[[Any], Any]) -> RankBatch:
        """Return the same call with `change(value)` in place of each argument; a `Split` must remain a `Split`."""
        return replace(
            self,
            wrapped_args=tuple(change(value) for value in self.wrapped_args),
            wrapped_kwargs={key: change(value) for key, value in self.wrapped_kwargs.items()},
        )


def check_num_parts(num_parts: int, num_rows: int | None) -> None:
    """Check that a call's rows can be taken in `num_parts` parts.

    Args:
        num_parts: Number of parts.
        num_rows: Number of rows; `None` for a call without a `Split`.

    Raises:
        ValueError: `num_parts` is not positive, or over 1 for a call without a `Split`.
    """
    if num_parts < 1:
        raise ValueError(f"gradient_accumulation_steps={num_parts}: give 1 or more")
    if num_parts > 1 and num_rows is None:
        raise ValueError(
            f"gradient_accumulation_steps={num_parts} splits the rows of a batch, and this call has no Split: "
            "give Split(rows), or call forward_backward for each part"
        )


def check_out(out: Out | None) -> None:
    """Check a call's `out=`.

    Raises:
        ValueError: `out` is neither an `Out` nor `None`.
    """
    if out is not None and not isinstance(out, Out):
        raise ValueError(f"out={out!r} is a {type(out).__name__}: {_GIVE_OUT}")


def split_rows(num_rows: int, world_size: int, rows_per_item: int = 1) -> tuple[int, ...]:
    """Return each rank's number of rows, whole items: they differ by at most one item, the larger come first."""
    share, rest = divmod(num_rows // rows_per_item, world_size)
    return tuple(rows_per_item * (share + (rank < rest)) for rank in range(world_size))


def incomplete_item(num_rows: int, rows_per_item: int) -> str | None:
    """Return what is wrong with rows whose last item is not complete, and the cure; `None` if all are whole items."""
    rest = num_rows % rows_per_item
    cure = f"leave out the last {rest}, or add {rows_per_item - rest}"
    return f"{num_rows} rows do not divide by rows_per_item={rows_per_item}: {cure}" if rest else None


def by_name(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Sequence[Any], Mapping[str, Any]]:
    """Return a model's arguments; an only positional `Split` of a mapping becomes keyword arguments.

    Args:
        args: Positional arguments of the call.
        kwargs: Keyword arguments of the call, which may be given beside that `Split`.

    Raises:
        ValueError: A name is both in the mapping and in `kwargs`.
    """
    split = args[0] if len(args) == 1 else None
    named = split.value if isinstance(split, Split) and isinstance(split.value, Mapping) else {}
    if split is None or not named or not all(isinstance(name, str) for name in named):
        return args, kwargs
    _check_names(named, kwargs, "in the Split")
    return (), {**{name: replace(split, value=value) for name, value in named.items()}, **kwargs}


def _check_names(names: Iterable[str], kwargs: Mapping[str, Any], where: str) -> None:
    for name in names:
        if name in kwargs:
            raise ValueError(f"{name}: given twice, {where} and as a keyword argument; leave one of them out")


def as_tensors(name: str, value: Any) -> Any:
    """Return a model's argument with tensors in place of numpy arrays, at any depth, and of lists in a batch's column.

    Args:
        name: Name of the argument. A list of numbers becomes a tensor if the name is that of a batch's column (see
            `Same`), as in `input_ids=[[1, 2]]`; models and `generate` take other lists as they are.
        value: The argument. A `Split` is returned unchanged, the values of `Same` and `PerRank` are converted.

    Raises:
        ValueError: The lists of a column differ in length.
    """
    if isinstance(value, Same):
        return Same(as_tensors(name, value.value))
    if isinstance(value, PerRank):
        return PerRank([as_tensors(name, own) for own in value])
    if isinstance(value, list) and _COLUMN.search(name) and name not in _GENERATION_LISTS and _is_numbers(value):
        return _tensor(value, name)

    def convert(_: str, leaf: Any) -> Any:
        return torch.as_tensor(leaf.copy()) if _becomes_tensor(leaf) else leaf

    return map_leaves(convert, value, is_leaf=_is_mark)


def whole_rows(args: Sequence[Any], kwargs: Mapping[str, Any], world_size: int, positions: Sequence[str]) -> str | None:
    """Return path and shape of a tensor that looks like rows for every rank, in a call without marks.

    Args:
        args: Positional arguments of the call.
        kwargs: Keyword arguments of the call.
        world_size: Number of ranks.
        positions: Names of the positional arguments, as far as known.

    Returns:
        `None` if an argument has a mark (`Split`, `Same`, `PerRank`), or if no tensor has a row for each of two or more
        ranks.
    """
    every = _leaves(args, kwargs, positions)
    if world_size < 2 or any(isinstance(one.leaf, _MARKS) for one in every):
        return None
    for one in every:
        is_dense = isinstance(one.leaf, torch.Tensor) and not one.leaf.is_nested and one.leaf.ndim > 0
        if is_dense and len(one.leaf) >= world_size and _row_dim(one, (0,), len(one.leaf)) is not None:
            return f"{one.path} of shape {tuple(one.leaf.shape)}"
    return None


def deal(
    args: Sequence[Any], kwargs: Mapping[str, Any], world_size: int, *, positions: Sequence[str] = ()
) -> list[RankBatch]:
    """Divide a call's arguments among the ranks. Called on the driver; sends nothing.

    `Split`, `Same` and `PerRank` may be nested in dicts, lists, tuples and dataclasses. Every other value goes to all
    ranks as the same object.

    Args:
        args: Positional arguments of the call.
        kwargs: Keyword arguments of the call.
        world_size: Number of ranks.
        positions: Names of the positional arguments, as far as known.

    Returns:
        One batch for each rank. Split rows are copies, so sending a batch sends its own rows only.

    Raises:
        ValueError: Splits have unequal row counts or no rows, or differ in `rows_per_item`, by which their rows must
            divide; a Split leaf is not a tensor, a tensor outside every `Split` looks like rows and is no `Same`, or a
            `PerRank` has the wrong length. The error names the argument and the values found.
    """
    every = _leaves(args, kwargs, positions)
    splits = {one.path: one.leaf for one in every if isinstance(one.leaf, Split)}
    for one in every:
        _check_mark(one.path, one.leaf, world_size)
    counts = {path: split.num_rows(path) for path, split in splits.items()}
    if any(split.collate_fn for split in splits.values()) and (list(splits) != ["args[0]"] or len(args) > 1):
        raise ValueError(
            f"{', '.join(splits)}: a Split with collate_fn= is the only Split and the only positional argument of a "
            "call: let collate_fn return what else has rows"
        )
    per_item = _rows_per_item(splits, counts)
    rows = split_rows(next(iter(counts.values())), world_size, per_item) if counts else ()
    _check_whole(every, [split.dim for split in splits.values()], sum(rows))
    is_replicated = not any(isinstance(one.leaf, Split | PerRank) for one in every)
    dims = {dim for split in splits.values() for dim in split.dims()}
    dim = dims.pop() if len(dims) == 1 else 0
    whole = RankBatch(
        tuple(args), kwargs, rows=rows, dim=dim, rows_per_item=per_item, is_replicated=is_replicated
    ).replaced(lambda value: _map_marks(attrgetter("value"), value, Same))

    def part_of(rank: int) -> RankBatch:
        start = sum(rows[:rank]) if rows and rows[rank] else 0
        taken = rows[rank] or per_item if rows else 0

        def part(mark: Split | PerRank) -> Any:
            return mark.rows(start, taken) if isinstance(mark, Split) else mark[rank]

        batch = whole.replaced(lambda value: _map_marks(part, value, Split, PerRank))
        return replace(batch, num_rows=rows[rank] if rows else None)

    return [part_of(rank) for rank in range(world_size)]


class _Leaf(NamedTuple):
    """A mark, or another leaf of a call's arguments."""

    path: str
    """Its path in the arguments, such as `args[0]['input_ids']`."""
    name: str
    """The last name in the path; of a positional argument that of the parameter, if known."""
    leaf: Any


def _leaves(args: Sequence[Any], kwargs: Mapping[str, Any], positions: Sequence[str]) -> list[_Leaf]:
    """Return the marks and other leaves of a call's arguments."""
    given = [(f"args[{index}]", value) for index, value in enumerate(args)] + list(kwargs.items())
    names = {f"args[{index}]": name for index, name in enumerate(positions)}
    return [
        _Leaf(root + below, (_NAME.findall(below) or [names.get(root, root)])[-1], leaf)
        for root, value in given
        for below, leaf in leaves(value, is_leaf=_is_mark)
    ]


def _is_mark(value: Any) -> bool:
    return isinstance(value, _MARKS)


def _map_marks(change: Callable[[Any], Any], value: Any, *kinds: type) -> Any:
    """Return a value with `change(mark)` in place of its marks; the same object, to be sent once, if it has none."""
    return map_leaves(lambda _, leaf: change(leaf) if isinstance(leaf, kinds) else leaf, value, is_leaf=_is_mark)


def _check_mark(path: str, mark: Any, world_size: int) -> None:
    """Raise ValueError for a mark inside another mark, and for a `PerRank` of the wrong length."""
    if not isinstance(mark, _MARKS) or (isinstance(mark, Split) and mark.collate_fn is not None):
        return
    inside = mark.values if isinstance(mark, PerRank) else mark.value
    for where, leaf in leaves(inside, path, _is_mark):
        if isinstance(leaf, _MARKS):
            one, other = type(leaf).__name__, type(mark).__name__
            raise ValueError(f"{where}: a {one} inside a {other}; each says how its value is distributed: remove one")
    if isinstance(mark, PerRank) and len(mark) != world_size:
        raise ValueError(f"{path}: PerRank holds {len(mark)} values, but the group has {world_size} ranks")


def _check_whole(every: Sequence[_Leaf], dims: Sequence[int], num_rows: int) -> None:
    """Raise ValueError for a value outside every `Split` that looks like rows, as `Same` defines it."""
    for one in every:
        dim = _row_dim(one, dims, num_rows)
        if dim is not None:
            path = one.path if one.name in one.path else f"{one.path} ({one.name})"
            more = f", dim={dim}" if dim else ""
            raise ValueError(
                f"{path}: shape {tuple(one.leaf.shape)} has size {num_rows} in dim {dim}, the number of rows of the "
                "call's Splits, but is in no Split: every rank would get the whole value, and combine its first rows "
                f"with the rank's own rows of the Splits. Give Split(...{more}) for rows, Same(...) to send all of it "
                "to every rank"
            )


def _row_dim(one: _Leaf, dims: Sequence[int], num_rows: int) -> int | None:
    """Return the dim in which a leaf looks like rows; `None` if there is none."""
    leaf = one.leaf
    is_dense = _is_array(leaf) or (isinstance(leaf, torch.Tensor) and not leaf.is_nested)
    if not is_dense or num_rows < 2:
        return None
    if leaf.ndim == 1:
        return 0 if _COLUMN.search(one.name) and len(leaf) == num_rows else None
    return next((dim for dim in dims if _has_dim(leaf, dim) and leaf.shape[dim] == num_rows), None)


def _check_equal(what: str, numbers: Mapping[str, int], cure: str) -> None:
    """Raise ValueError if the numbers, by path, differ."""
    if len(set(numbers.values())) > 1:
        listed = ", ".join(f"{path} has {number}" for path, number in numbers.items())
        raise ValueError(f"{what}, but {listed}{cure}")


def _rows_per_item(splits: Mapping[str, Split], counts: Mapping[str, int]) -> int:
    """Return the `rows_per_item` of all Splits; raise ValueError if they differ, or it does not divide the rows."""
    _check_equal("all Splits of one call need the same number of rows", counts, f"; {_NO_ROWS}")
    if counts and not any(counts.values()):
        raise ValueError(f"{', '.join(counts)}: 0 rows, so nothing to compute; skip the call for an empty batch")
    found = {path: split.rows_per_item for path, split in splits.items()}
    per_item = max(found.values(), default=1)
    cure = f": give each of them rows_per_item={per_item}"
    _check_equal("all Splits of one call need the same rows_per_item", found, cure)
    for path, num_rows in counts.items():
        if problem := incomplete_item(num_rows, per_item):
            raise ValueError(f"{path}: {problem}")
    return per_item


def _check_examples(split: Split) -> None:
    if not isinstance(split.value, list | tuple) or not callable(split.collate_fn) or split.dim:
        what = f"Split(a {type(split.value).__name__}, dim={split.dim}, collate_fn={split.collate_fn!r})"
        raise ValueError(f"{what}: give a list of examples, collate_fn= a function of such a list, and no dim=")


def _check_dim(what: str, dim: Any) -> None:
    if not isinstance(dim, int) or isinstance(dim, bool):
        raise ValueError(f"{what}(..., dim={dim!r}): a {type(dim).__name__}; give the dim as a whole number, such as 0")


def _with_tensors(value: Any, path: str) -> Any:
    """Return a value with tensors in place of its lists of numbers; the same object if it has none."""

    def is_column(value: Any) -> bool:
        return isinstance(value, list) and bool(value) and _is_numbers(value)

    return map_leaves(lambda where, leaf: _tensor(leaf, where) if is_column(leaf) else leaf, value, path, is_column)


def _is_numbers(value: Any) -> bool:
    """Return True for a number, and for a list that holds, at any depth, numbers only."""
    if isinstance(value, list):
        return all(map(_is_numbers, value))
    return isinstance(value, int | float) or (_is_array(value) and value.ndim == 0 and value.dtype.kind in "biufc")


def _tensor(value: list[Any], path: str) -> torch.Tensor:
    try:
        return torch.tensor(value)
    except (ValueError, TypeError) as error:
        cure = 'pad them to one length, for a tokenizer by padding=True, return_tensors="pt"'
        raise ValueError(f"{path}: lists of different lengths make no tensor: {cure}") from error


def _is_array(leaf: Any) -> bool:
    """Return True if a leaf is a numpy array; does not import numpy."""
    return type(leaf).__module__ == "numpy" and hasattr(leaf, "ndim") and hasattr(leaf, "dtype")


def _becomes_tensor(leaf: Any) -> bool:
    # Not a scalar: `generate(temperature=)` takes np.float64, which is a float, but no tensor.
    return _is_array(leaf) and leaf.ndim > 0 and leaf.dtype.kind in "biufc"


def _count_rows(path: str, leaf: Any, dim: int) -> int:
    if type(leaf).__name__ == "ObjectRef":
        raise ValueError(
            f"{path}: the driver has no rows of an ObjectRef to split; give Split(ray.get(ref)), PerRank([ref, ...]) "
            "with each rank's rows, or the ref itself, whose value all ranks get"
        )
    if not (isinstance(leaf, torch.Tensor) or _is_array(leaf)):
        raise ValueError(
            f"{path}: only tensors, numpy arrays and lists of numbers can be split, not {type(leaf).__name__}; pass "
            "anything else outside the Split"
        )
    if isinstance(leaf, torch.Tensor) and leaf.layout != torch.strided:
        raise ValueError(f"{path}: a {leaf.layout} tensor cannot be split; call .to_dense() first")
    if _is_array(leaf) and leaf.dtype.kind not in "biufc":
        raise ValueError(f"{path}: a numpy array of {leaf.dtype} has no tensor dtype; split numbers only")
    if not _has_dim(leaf, dim):
        where = f"{path}: shape {tuple(leaf.shape)} has no dim {dim} to split"
        raise ValueError(f"{where}; give another dim, or pass this value outside the Split")
    return int(leaf.shape[dim])


def _take(leaf: Any, dim: int, start: int, num_rows: int) -> torch.Tensor:
    if isinstance(leaf, torch.Tensor):
        return leaf.detach().narrow(dim, start, num_rows).to("cpu", copy=True).contiguous()
    index = (slice(None),) * (dim % leaf.ndim) + (slice(start, start + num_rows),)
    # A copy first: torch rejects negative strides, and warns about read-only arrays.
    return torch.as_tensor(leaf[index].copy())


# --- outputs ----------------------------------------------------------------------------------------------------------


class Tokens(list[tuple[int, int]]):
    """The tokens of a step of `generate`: (row of the call, token id), at most one a row, in the order of rows."""


@dataclass(frozen=True, eq=False)
class RankOutput:
    """One rank's output of a forward, on the CPU, with the facts about its leaves that only the ranks can determine."""

    value: Any
    """The output, or `None` if the caller did not request this rank's output or the rank had only a dummy row."""
    reduced: tuple[str, ...] = ()
    """Paths of leaves that already hold the value of the whole batch, equal on every rank: the loss."""
    local: tuple[str, ...] = ()
    """Paths of leaves whose shape looks like rows but does not scale with them (CLIP's rows × rows logits)."""
    num_sequences: int = 1
    """Number of adjacent entries that leaves have for each row."""


def select_output(out: Out | None, outputs: Sequence[RankOutput], rows: Sequence[int], dim: int) -> Any:
    """Make a call's result from every rank's output. Called on the driver, never for `Out.refs()`.

    Args:
        out: What the caller requested. `None`: gather if the call had a `Split`, else rank 0.
        outputs: Outputs by rank.
        rows: `RankBatch.rows`: each rank's number of rows; empty if the call had no `Split`.
        dim: `RankBatch.dim`.
    """
    kind = out.kind if out is not None else ("gather" if rows else "rank0")
    if kind == "none":
        return None
    if kind == "per_rank":
        # A rank without rows ran a dummy row, whose output is not a result.
        return PerRank([None if rows and not rows[rank] else output.value for rank, output in enumerate(outputs)])
    if kind == "rank0":
        return outputs[0].value
    assert kind == "gather", kind
    return gather_outputs(outputs, rows, out.dim if out is not None and out.dim is not None else dim)


def gather_outputs(outputs: Sequence[RankOutput], rows: Sequence[int], dim: int = 0) -> Any:
    """Join the ranks' outputs into one output of the same type. Called on the driver.

    Tensors that have as many rows in `dim` as their rank and agree in all other dims are concatenated in row order. A
    loss already covers the whole batch. A leaf that is `None` on every rank stays `None`. Any other leaf becomes a
    `PerRank`, with `None` for the ranks that had no rows. If only one rank had rows, its output is the result.

    Args:
        outputs: Outputs by rank.
        rows: Each rank's number of rows. Empty: rank 0's output is the result.
        dim: The dim that holds rows; negative counts from each leaf's end.

    Returns:
        The joined output; concatenation takes the tensors' size in memory once more.
    """
    live = [rank for rank, num_rows in enumerate(rows) if num_rows]
    if len(live) <= 1:
        return outputs[0].value
    reduced, local = outputs[0].reduced, {path for output in outputs for path in output.local}
    live_rows = [rows[rank] * outputs[rank].num_sequences for rank in live]

    def join(path: str, values: list[Any]) -> Any:
        """Join one subtree; `values` holds each live rank's copy of the subtree."""
        if path in reduced:
            return values[0]
        same_type = all(type(value) is type(values[0]) for value in values)
        if same_type and (type(values[0]) is dict or (isinstance(values[0], Mapping) and is_dataclass(values[0]))):
            # A model output lacks the key of what is `None`: a rank without an image has no states of images.
            keys = dict.fromkeys(key for value in values for key in value)
            return rebuild_mapping(
                values[0], {key: join(f"{path}[{key!r}]", [value.get(key) for value in values]) for key in keys}
            )
        nodes = [children(value) for value in values]
        names = [None if node is None else [name for name, _ in node] for node in nodes]
        if same_type and nodes[0] is not None and all(found == names[0] for found in names):
            columns = zip(*(node or [] for node in nodes), strict=True)
            return rebuild(values[0], [join(path + column[0][0], [item for _, item in column]) for column in columns])
        if all(value is None for value in values):
            return None
        if path not in local and _are_rows(values, live_rows, dim):
            return torch.cat(values, dim=dim)
        by_rank = dict(zip(live, values, strict=True))
        return PerRank([by_rank.get(rank) for rank in range(len(rows))])

    return join("", [outputs[rank].value for rank in live])


def _are_rows(values: Sequence[Any], rows: Sequence[int], dim: int) -> bool:
    """Return True if the ranks' values are tensors with `rows` in `dim` that agree in everything else."""
    if not all(isinstance(value, torch.Tensor) and _has_dim(value, dim) for value in values):
        return False
    others = {
        (value.dtype, *value.shape[: dim % value.ndim], None, *value.shape[dim % value.ndim + 1 :]) for value in values
    }
    return len(others) == 1 and [value.shape[dim] for value in values] == list(rows)


def _has_dim(leaf: torch.Tensor, dim: int) -> bool:
    return -leaf.ndim <= dim < leaf.ndim
