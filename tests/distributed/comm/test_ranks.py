"""What ranks do before and beside a model: they meet, exchange JSON, wait for each other, and are lost."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
from torch.distributed import ProcessGroupGloo

from raysharding.config import Sharding
from raysharding.distributed.comm import (
    SpanningGroup,
    all_gather_ints,
    all_gather_json,
    broadcast_json,
    check_device_type,
    serve_store,
    set_current_device,
    to_host,
    wait_for,
    waits_for_others,
)
from raysharding.distributed.comm.device import current_device
from raysharding.distributed.comm.device_mesh import init_mesh
from tests.clock import now
from tests.distributed.checks import on_ranks
from tests.grid import needs_sim, world_sizes
from tests.spawn import device_type, run_ranks


def listening(pid: int) -> set[tuple[str, int]]:
    """Where a process listens on one address: not Ray, which listens on all."""
    found = psutil.Process(pid).net_connections("tcp")
    ends = {(one.laddr.ip, one.laddr.port) for one in found if one.status == psutil.CONN_LISTEN}
    return {end for end in ends if end[0] not in ("::", "0.0.0.0")}


def gets_in(end: tuple[str, int]) -> bool:
    try:
        socket.create_connection(end, 0.5).close()
    except TimeoutError:
        return False
    return True


@on_ranks(4)
def test_a_mesh_lets_nobody_in_when_its_ranks_have_met() -> None:
    before = listening(os.getpid())
    mesh = init_mesh(device_type(), Sharding(replicate_size=2))
    new = listening(os.getpid()) - before
    dist.barrier()
    assert new
    assert not [end for end in new if gets_in(end)]
    total = torch.ones(1)
    dist.all_reduce(total, group=mesh.get_group("replicate"))
    assert total.item() == 2.0


LENGTHS = (0, 1, 4096, 70_000)


@on_ranks(3)
def test_values_of_every_length_arrive() -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    for length in LENGTHS:
        for others in (length, 3):  # of one length, and of different ones
            expected = [[one, "é" * (length if one == 1 else others)] for one in range(world_size)]
            assert all_gather_json(expected[rank]) == expected
        assert broadcast_json({"text": "x" * length} if rank == 0 else "ignored") == {"text": "x" * length}
    largest = (1 << 63) - 1
    assert all_gather_ints([rank, -largest, largest]) == [[one, -largest, largest] for one in range(world_size)]


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


def test_a_device_type_without_collectives_is_refused_with_the_known_ones() -> None:
    known = r"device='tpu': use one of 'cpu', 'cuda', .*, for which torch has collectives here"
    with pytest.raises(ValueError, match=known):
        check_device_type("tpu")


def test_a_device_that_torch_does_not_see_is_refused() -> None:
    count = torch.cuda.device_count()
    said = f"cuda:{count} is not there for torch {torch.__version__}, which sees {count} devices of type cuda"
    with pytest.raises(RuntimeError, match=re.escape(said)):
        set_current_device(torch.device("cuda", count))


def test_segments_grow_unless_the_user_has_set_the_allocator() -> None:
    """torch reads the variable at the allocator's first use, which is after its import."""
    code = (
        "import os, torch; from raysharding.distributed.comm import use_expandable_segments\n"
        "before = dict(os.environ); use_expandable_segments(torch.device('cpu')); assert os.environ == before\n"
        "use_expandable_segments(torch.device('cuda:0')); print(torch._C._accelerator_getAllocatorSettings())"
    )
    kept = {name: value for name, value in os.environ.items() if "ALLOC" not in name}
    for variables, expected in (
        ({}, "expandable_segments:True"),
        ({"PYTORCH_ALLOC_CONF": "max_split_size_mb:64"}, "max_split_size_mb:64"),
        ({"TORCH_NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK": "1"}, ""),
    ):
        command, environment = [sys.executable, "-c", code], kept | variables
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
        assert done.stdout.strip() == expected, done.stderr


ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.timeout(120)
@pytest.mark.parametrize("world_size", world_sizes(2, full=(1, 3)))
def test_example_under_torchrun(world_size: int, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world_size)]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(
        [*command, str(ROOT / "examples" / "torchrun_train.py"), str(tmp_path)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=100,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "<All keys matched successfully>" in done.stdout
    assert "the same: True" in done.stdout
    assert "ray was imported: False" in done.stdout
