"""Every section is read once, by a reader, and reaches each holder once; readers share what they do not hold."""

from __future__ import annotations

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from raysharding.distributed.fully_shard.layout import ShardMap
from raysharding.distributed.transfer.bucket_plan import REPLICATED, Bucket, Section
from raysharding.distributed.transfer.transport import Routes


@st.composite
def routes(draw: st.DrawFn) -> Routes:
    num_shards, num_replicas = draw(st.integers(1, 5)), draw(st.integers(1, 3))
    holders = tuple(tuple(range(shard, num_shards * num_replicas, num_shards)) for shard in range(num_shards))
    ranks = range(num_shards * num_replicas)
    others = draw(st.sets(st.sampled_from(ranks)))
    shared = {
        rank: frozenset(draw(st.sets(st.sampled_from(ranks))) - {rank})
        for rank in draw(st.sets(st.sampled_from(ranks)))
    }
    return Routes(
        ShardMap(holders, draw(st.sampled_from(ranks))), tuple(sorted({0, *others})), draw(st.integers(0, 9)), shared
    )


@settings(max_examples=200, deadline=None)
@given(routes(), st.integers(0, 12))
def test_a_section_is_read_once_and_reaches_each_holder_once(given_routes: Routes, index: int) -> None:
    shards = given_routes.shards
    for shard_index in (*range(shards.num_shards), REPLICATED):
        holders = set(range(shards.world_size)) if shard_index == REPLICATED else set(shards.holders[shard_index])
        path = given_routes.path(index, shard_index)
        readers = given_routes.readers if index < given_routes.num_ranged else (0,)
        assert path[0] in readers
        assert path[0] in holders or not holders.intersection(readers)
        assert holders <= set(path) <= holders | {path[0]}
        assert len(path) == len(set(path))
        served, chain = given_routes.served(index, shard_index), given_routes.chain(index, shard_index)
        assert chain[0] == path[0]
        assert sorted([*served, *chain]) == sorted(path)


@settings(max_examples=100, deadline=None)
@given(routes(), st.integers(0, 12), st.integers(1, 4096))
def test_sections_of_a_buffer_do_not_overlap(given_routes: Routes, index: int, num_bytes: int) -> None:
    shards = given_routes.shards
    indices = (*range(shards.num_shards), REPLICATED)
    sections = tuple(Section(item, 0, num_bytes + item, num_bytes + item, (), ()) for item in indices)
    bucket = Bucket(sections, 0, 0)
    for rank in range(shards.world_size):
        offsets = given_routes.offsets(index, bucket, rank)
        position = 0
        for item, offset in offsets.items():
            assert offset == position
            position += num_bytes + item
        assert len(given_routes.travelling(index, bucket, rank)) + len(given_routes.alone(index, bucket, rank)) == len(
            offsets
        )


def test_readers_share_the_shards_that_none_of_them_holds() -> None:
    given_routes = Routes(ShardMap(tuple((rank,) for rank in range(8)), 0), (0, 1), 1000)
    read = Counter(given_routes.path(index, shard)[0] for index in range(100) for shard in range(2, 8))
    assert read[0] == read[1] == 300


def test_replicas_that_both_read_share_the_reading() -> None:
    given_routes = Routes(ShardMap(((0, 2), (1, 3)), 0), (0, 1, 2, 3), 1000)
    read = Counter(given_routes.path(index, shard)[0] for index in range(100) for shard in range(2))
    assert read == {0: 50, 1: 50, 2: 50, 3: 50}
