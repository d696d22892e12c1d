"""Row 29 and load: what is made and closed again and again leaves nothing, and a long queue has bounded memory."""

from __future__ import annotations

import contextlib
import gc
import os
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
import torch

from raysharding import ShardedModelGroup, Split
from raysharding.units import KIB, MIB
from tests.conftest import make_group, placement_groups, rank_processes
from tests.controllers import controller_pids

ROWS = torch.randn(4, 8)


def held() -> dict[str, int]:
    """What this driver and its cluster hold that a group could leave behind."""
    gc.collect()
    connections = psutil.Process().net_connections("tcp")
    return {
        "rank processes": len(rank_processes()),
        "controllers": len(controller_pids()),
        "descriptors of Ray": sum(descriptors_of_ray()),
        "placement groups": len(placement_groups()),
        "threads": threading.active_count(),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "listening ports": sum(one.status == psutil.CONN_LISTEN for one in connections),
    }


def descriptors_of_ray() -> list[int]:
    """Open files of the cluster's own processes: each group opens and closes some of the raylet's and the GCS's."""
    found = []
    for process in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.name() in ("raylet", "gcs_server"):
                found.append(process.num_fds())
    assert len(found) == 2, "raylet and GCS of the local cluster"
    return found


def shared_files(pids: set[int]) -> list[str]:
    """What processes have left in shared memory: torch and we name such files after the process."""
    return [
        name for name in os.listdir("/dev/shm") if any(f"_{pid}_" in name or name.endswith(f"_{pid}") for pid in pids)
    ]


def use_once(checkpoint: Path, pids: set[int]) -> None:
    with make_group(checkpoint, world_size=1, optimizer=torch.optim.SGD) as group:
        group.forward(Split(ROWS))
        group.train_step(Split(ROWS), loss=lambda output, rows: output.square().mean())
        pids.update(info.pid for info in group.ranks)


@pytest.mark.usefixtures("nothing_left")
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("times", [3, pytest.param(200, marks=pytest.mark.full)])
def test_create_and_close_again_and_again(times: int, checkpoint: Path) -> None:
    pids: set[int] = set()
    use_once(checkpoint, pids)  # what Ray keeps for good is there after the first
    before, memory = held(), anonymous_bytes()
    for _ in range(times):
        use_once(checkpoint, pids)
    after = held()
    # Ray's own pools of threads and connections settle at some number: a leak would be one for each group.
    slack = {"descriptors": 8, "threads": 2, "descriptors of Ray": 16}
    grown = {name: (before[name], after[name]) for name in after if after[name] > before[name] + slack.get(name, 0)}
    assert not grown
    assert len(pids) == times + 1
    assert not shared_files(pids)
    assert anonymous_bytes() - memory < 16 * MIB + times * MIB // 4


def anonymous_bytes() -> int:
    """Memory of this process that is no file's."""
    with open("/proc/self/status") as status:
        fields = dict(line.split(":", 1) for line in status)
    return int(fields["RssAnon"].split()[0]) * 1024


def store_bytes() -> float:
    """Bytes in use in the object store of the whole cluster."""
    total = ray.cluster_resources()["object_store_memory"]
    return float(total - ray.available_resources().get("object_store_memory", 0.0))


@pytest.mark.timeout(120)
@pytest.mark.parametrize("num_calls", [300, pytest.param(2000, marks=pytest.mark.full)])
def test_queued_forwards_take_bounded_memory(group: ShardedModelGroup, num_calls: int) -> None:
    expected = group.forward(Split(ROWS))
    before, in_store = anonymous_bytes(), store_bytes()
    blocker = group.call.remote(time.sleep, 0.5)
    calls = [group.forward.remote(Split(ROWS)) for _ in range(num_calls)]
    queued = anonymous_bytes()
    blocker.result()
    assert all(torch.equal(call.result(), expected) for call in calls)
    room = num_calls * 32 * KIB
    assert queued - before < room, "32 KiB for each call in the queue"
    assert anonymous_bytes() - before < room
    assert store_bytes() - in_store < 16 * MIB
    calls.clear()


@pytest.mark.timeout(120)
def test_buckets_of_a_state_dict_leave_the_object_store_as_the_driver_takes_them(checkpoint: Path) -> None:
    def make_large() -> None:
        """On the rank: let a state dict be of 16 buckets of 4 MiB, a few while Ray's own sweep removes what goes."""
        import time

        import torch

        from raysharding.worker import Worker

        def buckets(worker: Any, keys: Any) -> Any:
            for number in range(16):
                time.sleep(0.3)
                yield {str(number): torch.full((1 << 20,), float(number))}

        setattr(Worker, "state_dict", buckets)  # noqa: B010 - mypy refuses an assignment

    with make_group(checkpoint, world_size=1) as group:
        group.call(make_large)
        before, most = store_bytes(), 0.0
        call = group.state_dict.remote()
        while not call.wait(0.05):
            most = max(most, store_bytes() - before)
        assert [float(tensor.mean()) for tensor in call.result().values()] == list(range(16))
    assert 4 * MIB <= most <= 40 * MIB, "64 MiB, if all are held to the end"
