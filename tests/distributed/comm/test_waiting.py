"""A rank that waits for another is seen to wait, wherever it does: in a collective, or where it reads the result."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

from raysharding.distributed.comm import (
    all_gather_ints,
    all_gather_json,
    broadcast_json,
    to_host,
    wait_for,
    waits_for_others,
)
from raysharding.distributed.comm.device import current_device
from tests.distributed.checks import on_ranks
from tests.grid import needs_sim
from tests.spawn import device_type, run_ranks


def wait_for_work() -> None:
    """Wait for an asynchronous collective."""
    work = dist.all_reduce(torch.ones(1, device=current_device(device_type())), async_op=True)
    assert work is not None
    wait_for(work)


def total() -> None:
    """Sum up what the ranks have read of a loss, on the device, and wait for it."""
    table = torch.ones(2, 3, dtype=torch.float64, device=current_device(device_type()))
    dist.all_reduce(table)
    to_host(table)


WAITS: tuple[Callable[[], Any], ...] = (
    partial(all_gather_ints, [1]),
    partial(all_gather_json, "x"),
    partial(broadcast_json, "x", source=1),
    total,
)
LATE_S = 0.5


@on_ranks(2)
def test_a_rank_that_waits_is_seen_to() -> None:
    is_seen_to_wait((*WAITS, wait_for_work))


@pytest.mark.timeout(60)
@needs_sim
def test_a_rank_that_waits_without_gloo_is_seen_to() -> None:
    run_ranks(2, is_seen_to_wait, WAITS, device="sim", gloo=False)


def is_seen_to_wait(waits: Sequence[Callable[[], Any]]) -> None:
    """Rank 1 comes late to each; a thread looks at what rank 0 does meanwhile."""
    for number, wait in enumerate(waits):
        wait()  # ranks connect in the first
        if dist.get_rank() == 1:
            time.sleep(LATE_S)
            wait()
            continue
        seen: list[bool] = []
        thread = threading.Thread(target=look, args=(threading.get_ident(), seen))
        thread.start()
        wait()
        thread.join()
        share = sum(seen) / len(seen)
        assert share > 0.8, f"wait {number} was seen in {share:.0%} of {len(seen)} looks"


def look(waiting: int, seen: list[bool]) -> None:
    """Look at a thread while it must be waiting."""
    until = time.monotonic() + LATE_S / 2
    time.sleep(0.1)
    while time.monotonic() < until:
        seen.append(waits_for_others(sys._current_frames()[waiting]))
        time.sleep(0.01)
