"""The order of rows, exact after a resume at every world size, and fingerprints of rows and functions."""

from __future__ import annotations

import datetime
import json
import os
import subprocess
import sys
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import PIL.Image
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from raysharding.data import (
    BlockSource,
    Reader,
    SequenceRows,
    Stream,
    epoch_batches,
    fingerprint,
    rows_fingerprint,
    rows_of,
)
from raysharding.data.order import WINDOW_ROWS, Order
from raysharding.errors import DataError


@dataclass
class Blocks(BlockSource):
    """Rows are their own numbers; notes which blocks are read."""

    sizes: list[int]
    opened: set[int] = field(default_factory=set)

    @property
    def block_rows(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        return np.array(self.sizes, dtype=np.int64)

    def read(self, block: int) -> Reader:
        self.opened.add(block)
        first = sum(self.sizes[:block])
        return Numbers(list(range(first, first + self.sizes[block])))


class Numbers(Reader):
    def __init__(self, rows: list[int]) -> None:
        self.rows = rows

    def take(self, num_rows: int) -> list[int]:
        assert num_rows <= len(self.rows), "more than the block has"
        taken, self.rows = self.rows[:num_rows], self.rows[num_rows:]
        return taken

    def skip(self, num_rows: int) -> None:
        self.take(num_rows)


def batches_of(source: Any, batch_size: int, world_size: int, **options: Any) -> list[list[int]]:
    """The whole batches of an epoch, put together from what each rank takes."""
    shares = [
        [one for one in epoch_batches(source, batch_size, rank, world_size, **options) if one is not None]
        for rank in range(world_size)
    ]
    assert len({len(share) for share in shares}) == 1, "ranks take different numbers of steps"
    whole = []
    for ranks in zip(*shares, strict=True):
        assert len({(one.step, one.counts) for one in ranks}) == 1
        for rank, one in enumerate(ranks):
            assert len(one.rows) == (one.counts[rank] or options.get("rows_per_item", 1))
        whole.append([row for rank, one in enumerate(ranks) if one.counts[rank] for row in one.rows])
    return whole


ORDERS = {"rows_per_item": st.integers(1, 5), "shuffle": st.booleans(), "seed": st.integers(0, 3)}
ORDERS["epoch"] = st.integers(0, 2)
SIZES = st.lists(st.integers(0, 40), min_size=1, max_size=12)


@settings(deadline=None, max_examples=300)
@given(SIZES, st.integers(1, 8), st.integers(1, 7), st.fixed_dictionaries(ORDERS), st.data())
def test_every_row_once_and_each_item_in_one_step_on_one_rank(
    sizes: list[int], items: int, world_size: int, options: dict[str, Any], data: st.DataObject
) -> None:
    """Wherever blocks end: the batches are those of one process, at every world size and after a resume."""
    rows_per_item, shuffle = options["rows_per_item"], options["shuffle"]
    sizes.append(-sum(sizes) % rows_per_item or rows_per_item)
    batch_size = items * rows_per_item
    alone = batches_of(Blocks(sizes), batch_size, 1, **options)
    rows = [row for batch in alone for row in batch]
    assert (sorted(rows) if shuffle else rows) == list(range(sum(sizes)))
    assert all(len(batch) == batch_size for batch in alone[:-1])
    assert batches_of(Blocks(sizes), batch_size, world_size, **options) == alone
    first = data.draw(st.integers(0, len(alone)))
    assert batches_of(Blocks(sizes), batch_size, world_size, first_step=first, **options) == alone[first:]
    for rank in range(world_size):
        for one in epoch_batches(Blocks(sizes), batch_size, rank, world_size, **options):
            assert one is not None
            starts = one.rows[::rows_per_item]
            assert one.rows == [start + row for start in starts for row in range(rows_per_item)]
            assert not any(start % rows_per_item for start in starts)
            if not shuffle or sum(one.counts) == batch_size:  # lanes end in the last step, wherever they are
                assert max(one.counts) - min(one.counts) <= rows_per_item


def test_pairs_of_a_list_are_shuffled_as_pairs() -> None:
    (batch,) = batches_of(SequenceRows(list(range(400))), 400, 3, shuffle=True, rows_per_item=2)
    firsts = batch[::2]
    assert batch[1::2] == [row + 1 for row in firsts]
    assert sorted(firsts) == list(range(0, 400, 2))
    assert sum(abs(a - b) == 2 for a, b in pairwise(firsts)) < 20


def test_rows_of_a_batch_are_dealt_as_a_split_is() -> None:
    shares = [[one.counts for one in epoch_batches(Blocks([8]), 5, rank, 3) if one] for rank in range(3)]
    assert shares == [[(2, 2, 1), (1, 1, 1)]] * 3


def test_seed_and_epoch_make_other_orders() -> None:
    def order(**options: int) -> list[list[int]]:
        return batches_of(SequenceRows(list(range(100))), 10, 2, shuffle=True, **options)

    assert order(seed=1) == order(seed=1)
    assert len({str(order(seed=seed, epoch=epoch)) for seed in range(2) for epoch in range(3)}) == 6


def test_single_rows_are_shuffled_as_a_whole() -> None:
    """Of 2,000 rows in a random order, neighbours are neighbours again by chance only, and go to any step."""
    taken = [row for batch in batches_of(SequenceRows(list(range(2000))), 20, 1, shuffle=True) for row in batch]
    assert sum(abs(a - b) == 1 for a, b in pairwise(taken)) < 20
    assert abs(np.corrcoef(np.arange(2000), taken)[0, 1]) < 0.1


def test_a_batch_of_a_large_block_holds_rows_of_all_its_parts() -> None:
    size = 4 * WINDOW_ROWS
    batch = batches_of(Blocks([size]), 16, 1, shuffle=True)[0]
    assert len({row * 16 // size for row in batch}) >= 8


@pytest.mark.parametrize("world_size", [2, 4])
def test_a_rank_reads_its_own_stretch_of_blocks(world_size: int) -> None:
    """Shuffled: each block is read by one rank, but for those at the seams."""
    sources = [Blocks([16] * 64) for _ in range(world_size)]
    for rank, source in enumerate(sources):
        assert list(epoch_batches(source, 16, rank, world_size, shuffle=True, seed=3))
    assert sum(len(source.opened) for source in sources) <= 64 + 2 * world_size
    assert max(len(source.opened) for source in sources) <= 64 // world_size + 2


def test_a_resume_reads_nothing_that_came_before() -> None:
    source = Blocks([10] * 20)
    batches = epoch_batches(source, 10, 0, 1, first_step=18)
    assert [one.rows[0] for one in batches if one] == [180, 190]
    assert source.opened == {18, 19}


def test_an_iterable_is_run_through_by_every_rank() -> None:
    assert batches_of(Stream(lambda: iter(range(8))), 3, 2) == [[0, 1, 2], [3, 4, 5], [6, 7]]
    assert batches_of(Stream(range(8)), 3, 3, first_step=1) == [[3, 4, 5], [6, 7]]
    pairs: dict[str, Any] = {"rows_per_item": 2}
    assert batches_of(Stream(range(8)), 6, 2, **pairs) == [[0, 1, 2, 3, 4, 5], [6, 7]]
    assert [one.counts for one in epoch_batches(Stream(range(8)), 6, 1, 2, **pairs) if one] == [(4, 2), (2, 0)]
    with pytest.raises(DataError, match="data: 7 rows do not divide by rows_per_item=2: leave out the last 1, or add"):
        batches_of(Stream(range(7)), 6, 2, **pairs)
    with pytest.raises(ValueError, match="shuffle it yourself"):
        list(epoch_batches(Stream(range(8)), 3, 0, 1, shuffle=True))


def test_the_windows_of_a_lane_are_bounded() -> None:
    order = Order([10 * WINDOW_ROWS], 2, shuffle=True, seed=0, epoch=0)
    windows = list(order.lane_windows(0, 0))
    assert max(window.stop - window.start for window, _ in windows) == WINDOW_ROWS
    assert sum(len(places) for _, places in windows) == order.lane_items(0)


PROGRAM = """
import sys
from functools import partial
import torch
from raysharding.data import fingerprint

SCALE = {scale}

def helper(x, known=frozenset(["a", "b", "c"])):
    return fn if x in {{"a", "b", "c", {const!r}}} else SCALE

LABELS = {labels}
mean = {unrelated}

def inner(x):
    return x + {inner}

def fn(outputs, batch, {default}):
    '''Return columns.'''
    helper(batch)
    late = lambda one: inner(one) + len(LABELS)
    return {{"value": [one {op} inner(SCALE) for one in outputs.mean(late)]}}

def unset():
    return never
    never = 1

class Call:
    def __init__(self):
        self.k = {k}
    def __call__(self, x):
        return x

closed = [fn, {{"b": torch.arange(3.0)}}, 2.5, Call()]
linear = torch.nn.Linear(2, 2, bias=False)
torch.nn.init.constant_(linear.weight, {weight})
print(fingerprint([fn, partial(fn, 1, k=2), Call(), Call().__call__, lambda: (closed, linear), torch.{builtin}, unset]))
"""
FIRST: dict[str, Any] = {"scale": 1, "const": "d", "default": "k=1", "op": "+", "k": 3}
FIRST |= {"labels": ["a"], "inner": 1, "weight": 0.5, "builtin": "relu", "unrelated": 1.0}


EACH = "import json, sys; [exec(one, {'__name__': 'program'}) for one in json.load(sys.stdin)]"


def run(seed: str, *changes: dict[str, Any]) -> list[str]:
    """Return the fingerprint of the program with each of these changes, all found in one process."""
    programs = json.dumps([PROGRAM.format(**FIRST | change) for change in changes])
    environment = os.environ | {"PYTHONHASHSEED": seed}
    command = [sys.executable, "-c", EACH]
    return subprocess.check_output(command, env=environment, input=programs, text=True, timeout=100).split()


def test_functions_count_by_what_decides_their_result() -> None:
    others: dict[str, Any] = {"scale": 2, "const": "e", "default": "k=2", "op": "-", "k": 4}
    others |= {"labels": ["b"], "inner": 2, "weight": 1.0, "builtin": "sigmoid"}
    first, unrelated, *changed = run("1", {}, {"unrelated": 2.0}, *({name: one} for name, one in others.items()))
    assert run("2", {}) == [first]
    assert unrelated == first, "an attribute is no global of its name"
    assert {name: one for name, one in zip(others, changed, strict=True) if one == first} == {}


def test_values_count_and_their_places() -> None:
    def rows() -> list[dict[str, Any]]:
        at = datetime.date(2026, 1, 1)
        return [{"id": index, "x": torch.full((2,), float(index)), "at": at} for index in range(9)]

    first = rows_fingerprint(source(rows()))
    assert rows_fingerprint(source(rows())) == first
    swapped = rows()
    swapped[3], swapped[4] = swapped[4], swapped[3]
    later = rows()
    later[5]["at"] = datetime.date(2026, 1, 2)
    for other in (swapped, later, rows()[:-1]):
        assert rows_fingerprint(source(other)) != first
    columns: dict[str, Any] = {"x": np.arange(6).reshape(3, 2), "y": torch.ones(3, dtype=torch.bfloat16)}
    values = (columns["x"], columns["x"].copy(), columns["x"][::-1])
    assert len({rows_fingerprint(source(columns | {"x": x})) for x in values}) == 2


def test_a_datasets_rows_are_sampled_over_its_length() -> None:
    numbers = datasets.Dataset.from_dict({"x": list(range(1000))})
    first = rows_fingerprint(source(numbers))
    assert rows_fingerprint(source(datasets.Dataset.from_dict({"x": list(range(1000))}))) == first
    assert rows_fingerprint(source(numbers.select(range(999, -1, -1)))) != first
    assert rows_fingerprint(source(numbers.shuffle(seed=1))) != first


def source(data: Any) -> Any:
    return rows_of(data)


def test_objects_count_by_their_repr_or_type() -> None:
    assert fingerprint([object()]) == fingerprint([object()])
    images = [PIL.Image.new("RGB", (2, 2), color) for color in ("red", "blue")]
    assert fingerprint(images) != fingerprint(images[::-1])
    assert fingerprint([torch.eye(2).to_sparse()]) == fingerprint([torch.eye(2).to_sparse()])
    assert fingerprint([{"a": 1, "b": 2}]) == fingerprint([{"b": 2, "a": 1}])
    assert fingerprint([Path("a")]) != fingerprint([Path("b")])
    assert fingerprint([partial(print, 1)]) != fingerprint([partial(print, 2)])
