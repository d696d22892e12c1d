"""CRC-32 in pieces: what zlib says of the whole, from pieces of any cut, order and number of ranks."""

from __future__ import annotations

import json
import random
import sys
import threading
import zlib
from collections.abc import Iterator
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from raysharding.checkpoint.format import Checksums
from raysharding.checkpoint.format.checksum import crc32_combine

DATA = random.Random(0).randbytes(100_000)
VIEW = memoryview(DATA)


def added(*ranges: tuple[int, int], data: memoryview = VIEW) -> Checksums:
    """One rank's checksums after it read these ranges of a tensor `t`."""
    checksums = Checksums()
    for start, end in ranges:
        checksums.add("t", start, data[start:end])
    return checksums


def merged(*ranks: Checksums) -> Checksums:
    """All ranks' pieces, by way of JSON."""
    together = Checksums()
    for rank in ranks:
        together.merge(json.loads(json.dumps(rank.pieces())))
    return together


@settings(deadline=None)
@given(st.binary(max_size=300), st.binary(max_size=300))
def test_combining_gives_what_zlib_gives_for_the_whole(first: bytes, second: bytes) -> None:
    assert crc32_combine(zlib.crc32(first), zlib.crc32(second), len(second)) == zlib.crc32(first + second)


def test_lengths_that_no_memory_holds_combine_too() -> None:
    whole = zeros(1 << 40)
    assert crc32_combine(zeros((1 << 40) - 5), zlib.crc32(bytes(5)), 5) == whole
    assert crc32_combine(zlib.crc32(bytes(5)), zeros((1 << 40) - 5), (1 << 40) - 5) == whole


def zeros(length: int) -> int:
    """CRC-32 of so many zeros, from single ones."""
    crc, power, one = 0, 1, zlib.crc32(b"\0")
    while power <= length:
        if length & power:
            crc = crc32_combine(crc, one, power)
        one, power = crc32_combine(one, one, power), 2 * power
    return crc


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_any_cut_in_any_order_over_any_ranks(draw: st.DataObject) -> None:
    size = draw.draw(st.integers(0, len(DATA)))
    cuts = [0, *sorted(draw.draw(st.sets(st.integers(0, size), max_size=20))), size]
    pieces = draw.draw(st.permutations(list(pairwise(cuts))))
    num_ranks = draw.draw(st.integers(1, 3))
    ranks = [added(*pieces[rank::num_ranks]) for rank in range(num_ranks)]
    together = merged(*ranks)
    assert together.value("t", size) == zlib.crc32(VIEW[:size])
    assert together.problem("t", size) == ""
    assert together.value("t", size + 1) is None


def test_pieces_in_a_row_are_one_piece() -> None:
    in_order = added(*((start, start + 100) for start in range(0, 10_000, 100)))
    assert in_order.pieces() == {"t": [[0, 10_000, zlib.crc32(VIEW[:10_000])]]}
    expected = [[start, stop, zlib.crc32(VIEW[start:stop])] for start, stop in ((0, 7), (7, 9), (20, 30))]
    assert added((0, 5), (7, 9), (5, 7), (20, 30)).pieces()["t"] == expected


def test_memory_of_every_kind_and_several_views_in_turn() -> None:
    checksums = Checksums()
    tensor = torch.frombuffer(bytearray(DATA), dtype=torch.uint8)
    checksums.add("t", 0, [VIEW[:10], tensor[10:50], VIEW[50:50], VIEW[50:60]])
    checksums.add("t", 60, tensor[60:])
    checksums.add("wide", 0, memoryview(bytearray(DATA)).cast("i"))
    checksums.add("t", 3, [])
    assert checksums.value("t", len(DATA)) == checksums.value("wide", len(DATA)) == zlib.crc32(DATA)
    assert checksums.value("empty", 0) == 0
    assert "t" in checksums.pieces()
    assert "empty" not in checksums.pieces()


@pytest.mark.parametrize(
    ("ranges", "problem"),
    [
        ([], "bytes [0, 100) were not read"),
        ([(0, 90)], "bytes [90, 100) were not read"),
        ([(10, 100)], "bytes [0, 10) were not read"),
        ([(60, 100), (0, 40)], "bytes [40, 60) were not read"),
        ([(0, 120)], "120 bytes were read, but it has 100"),
        ([(0, 60), (40, 100)], "bytes [40, 60) were read twice, in pieces that overlap"),
        ([(0, 100), (0, 30)], "bytes [0, 30) were read twice, in pieces that overlap"),
    ],
)
def test_pieces_that_do_not_cover_the_tensor_say_which_bytes(ranges: list[tuple[int, int]], problem: str) -> None:
    checksums = added(*ranges)
    assert checksums.value("t", 100) is None
    assert checksums.problem("t", 100) == problem
    assert merged(checksums).problem("t", 100) == problem


def test_what_several_ranks_read_must_be_the_same() -> None:
    first, second = added((0, 50)), added((50, 100))
    whole = added((0, 100))
    assert merged(first, second, whole, first, whole).value("t", 100) == zlib.crc32(VIEW[:100])
    changed = bytearray(DATA)
    changed[70] ^= 1
    other = merged(first, second, added((50, 100), data=memoryview(changed)))
    assert other.value("t", 100) is None
    assert other.problem("t", 100) == "bytes [0, 100) were read twice and differ"


@pytest.fixture
def restless() -> Iterator[None]:
    """Let threads take turns after every few bytecodes."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


@pytest.mark.usefixtures("restless")
def test_threads_that_add_at_once() -> None:
    checksums = Checksums()
    names = [f"tensor.{index}" for index in range(3)]

    def work(first: int) -> None:
        for start in range(first * 50, len(DATA), 200):
            for name in names:
                checksums.add(name, start, VIEW[start : start + 50])

    threads = [threading.Thread(target=work, args=(first,)) for first in range(4)]
    for thread in threads:
        thread.start()
    for _ in range(100):
        checksums.pieces()  # sees whole pieces, whatever is being added
    for thread in threads:
        thread.join()
    assert {checksums.value(name, len(DATA)) for name in names} == {zlib.crc32(DATA)}
