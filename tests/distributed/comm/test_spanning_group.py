"""A group over the ranks of two groups: a rank that is lost while gloo connects them."""

from __future__ import annotations

import re
import threading
import time
from contextlib import suppress
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed import ProcessGroupGloo

from raysharding.distributed.comm import SpanningGroup, serve_store
from tests.clock import now
from tests.spawn import run_ranks


def give_address(store: dist.Store, rank: int, world_size: int) -> None:
    """Do what a rank does that is lost when it has given its address to the others; it takes their connections."""
    alone = dist.HashStore()

    def wait_alone() -> None:
        with suppress(RuntimeError):  # a time-out
            ProcessGroupGloo(alone, rank, world_size, timedelta(seconds=6))

    threading.Thread(target=wait_alone, daemon=True).start()
    until = now() + 5
    while not alone.list_keys():
        assert now() < until
        time.sleep(0.01)
    for key in alone.list_keys():
        store.set(f"gloo/{key}", alone.get(key))  # type: ignore[arg-type]  # bytes, as gloo gives
    raise RuntimeError("lost")


def meet_without_the_last(stop_s: float, limit_s: float) -> tuple[str, float]:
    """On every rank: join a group whose last rank is lost on the way; what that said, and how long it took."""
    rank = dist.get_rank()
    server, address = serve_store("127.0.0.1", timeout_s=30) if rank == 0 else (None, None)
    found = [address]
    dist.broadcast_object_list(found)
    assert found[0] is not None
    span = SpanningGroup(found[0], "copy/lost", rank, (1, 2))
    own: Any = span
    if rank == 2:
        own._meet = lambda: give_address(own._store, rank, 3)
    else:
        threading.Timer(stop_s, span.stop).start()
    begun = time.monotonic()
    span.until = begun + limit_s
    try:
        span.join("127.0.0.1")
    except RuntimeError as error:
        said = f"{type(error).__name__}: {error}"
    took = time.monotonic() - begun
    dist.barrier()  # rank 0 serves the store until the others have ended
    del server
    return said, took


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("stop_s", "limit_s", "why"), [(0.5, 20.0, "has stopped this copy"), (60.0, 2.0, "did not (answer in time|come)")]
)
def test_a_rank_that_is_lost_while_gloo_connects_is_waited_for_until_stop_or_the_deadline(
    stop_s: float, limit_s: float, why: str
) -> None:
    *waiting, (lost, _) = run_ranks(3, meet_without_the_last, stop_s, limit_s)
    assert lost == "RuntimeError: lost"
    for said, took in waiting:
        assert re.search(why, said), said
        assert took < 4, "gloo waits five times its timeout"
