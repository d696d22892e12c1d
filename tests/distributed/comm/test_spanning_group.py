"""A group over the ranks of two groups: a rank that is lost while gloo connects them."""

from __future__ import annotations

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
from tests.distributed.checks import on_ranks


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


@on_ranks(3)
def test_a_rank_that_is_lost_while_gloo_connects_is_waited_for_until_stop_or_the_deadline() -> None:
    rank = dist.get_rank()
    server, address = serve_store("127.0.0.1", timeout_s=30) if rank == 0 else (None, None)
    found = [address]
    dist.broadcast_object_list(found)
    assert found[0] is not None
    for stop_s, limit_s, why in ((0.5, 20.0, "has stopped this copy"), (60.0, 2.0, "did not (answer in time|come)")):
        span = SpanningGroup(found[0], f"copy/{stop_s}", rank, (1, 2))
        own: Any = span
        timer = threading.Timer(stop_s, span.stop)
        if rank == 2:
            own._meet = lambda own=own: give_address(own._store, rank, 3)
            why = "lost"
        else:
            timer.start()
        span.until = time.monotonic() + limit_s
        with pytest.raises(RuntimeError, match=why):
            span.join("127.0.0.1")
        timer.cancel()
        assert time.monotonic() - span.until < 4 - limit_s, "gloo waits five times its timeout"
        dist.barrier()  # rank 0 serves the store until the others have ended
    del server
