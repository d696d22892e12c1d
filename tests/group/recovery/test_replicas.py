"""`restart` of an HSDP group that has lost ranks, but no shard: new ones copy the others, and no file is read."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from raysharding import CallTimeoutError, GroupError, PerRank, ShardedModelGroup, Sharding, Split, Timeouts
from raysharding.group import GroupState
from raysharding.group.recovery.restart import RestartReport
from raysharding.group.rpc.messages import StateChange
from raysharding.group.supervision.group_state import Replicas
from tests.distributed.fidelity import CASES, batch_of, make_checkpoint
from tests.group.conftest import make_group
from tests.group.recovery.hsdp import ADAM, BATCH, HSDP, QUICK, Copied, kill, kill_idle, make_hsdp, train
from tests.group.supervision.standing import ROOT
from tests.models.architectures import ARCHITECTURES

pytestmark = [pytest.mark.usefixtures("nothing_left"), pytest.mark.timeout(240)]


@pytest.fixture
def copied(checkpoint: Path, tmp_path: Path) -> Copied:
    return Copied(checkpoint, tmp_path)


@pytest.fixture(scope="session")
def undisturbed(cluster: None, checkpoint: Path) -> list[float]:
    """Losses of a group to which nothing happens."""
    with make_group(checkpoint, world_size=4, sharding=HSDP, optimizer=ADAM) as group:
        return [train(group) for _ in range(8)]


def assert_replaced(report: RestartReport, replaced: dict[int, int], before: list[int], group: Any) -> None:
    assert (report.how, report.checkpoint, report.world_size) == ("replicas", None, 4)
    for rank, source in replaced.items():
        assert f"rank {rank} from rank {source}" in report.why
    kept = [rank for rank, pid in enumerate(before) if group.ranks[rank].pid == pid]
    assert kept == [rank for rank in range(4) if rank not in replaced]
    assert group.state is GroupState.READY


def pids(group: ShardedModelGroup) -> list[int]:
    return [rank.pid for rank in group.ranks]


def equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    return found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)


def test_a_lost_rank_is_copied_from_its_replica_one_fault_after_the_other(
    copied: Copied, undisturbed: list[float]
) -> None:
    with make_hsdp(copied) as group:
        handle = group.forward
        found = [train(group) for _ in range(2)]

        # In the middle of a step, of which nothing may be seen afterwards.
        held, before = group.state_dict(), pids(group)
        begun = time.monotonic()
        with pytest.raises(GroupError, match="rank 1 died") as caught:
            train(group, dying=1)
        assert time.monotonic() - begun < 5.0
        assert caught.value.failures[1].kind == "died"
        assert group.state is GroupState.BROKEN
        assert_replaced(group.restart(), {1: 3}, before, group)
        assert equal(group.state_dict(), held)
        found += [train(group) for _ in range(2)]

        # Idle: rank 0, which serves the store, and which the new rank 1 has copied nothing from.
        held, before = group.state_dict(), pids(group)
        kill_idle(group, 0)
        assert_replaced(group.restart(), {0: 2}, before, group)
        assert equal(group.state_dict(), held)
        found += [train(group) for _ in range(2)]
        assert handle(Split(BATCH)).shape == (6, 4)
        assert found == undisturbed[:6], "the optimizer has gone on as if nothing had happened"


@pytest.mark.full
def test_a_stopped_rank_is_given_up_and_copied(copied: Copied, undisturbed: list[float]) -> None:
    with make_hsdp(copied, timeouts=Timeouts(drain_s=1.0, call_s=6.0)) as group:
        found = [train(group) for _ in range(2)]
        held, before = group.state_dict(), pids(group)
        kill(group, 3, by=signal.SIGSTOP)
        begun = time.monotonic()
        with pytest.raises(CallTimeoutError, match="rank 3 hung") as caught:
            train(group)
        assert time.monotonic() - begun < 6.0 + 2.0
        assert caught.value.primary is not None
        assert "stopped by a signal" in caught.value.primary.message
        assert_replaced(group.restart(), {3: 1}, before, group)
        assert equal(group.state_dict(), held)
        found += [train(group) for _ in range(2)]
        assert found == undisturbed[:4]


@pytest.mark.full
def test_what_no_replica_holds_is_loaded_again(copied: Copied) -> None:
    with make_hsdp(copied) as group:
        kill_idle(group, 1, 3)
        copied.bring_back()
        report = group.restart()
        assert report.how == "reloaded"
        assert "every other rank that held shard 1" in report.why or "a rank died" in report.why


@pytest.mark.full
def test_ranks_that_are_at_work_are_waited_for(copied: Copied) -> None:
    """An error comes within 2 s of a death; the others may be far from their next collective."""

    def work(seconds: float) -> None:
        import os
        import signal
        import time

        import torch.distributed as dist

        if seconds == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(seconds)
        dist.barrier()  # rank 2 never comes: the test is about just that

    with make_hsdp(copied, timeouts=Timeouts(drain_s=4.0)) as group:
        held, before = group.state_dict(), pids(group)
        begun = time.monotonic()
        with pytest.raises(GroupError, match="rank 2 died"):
            group.call(work, PerRank([0.1, 3.0, 0.0, 2.5]))
        assert time.monotonic() - begun < 2.0
        assert_replaced(group.restart(), {2: 0}, before, group)
        # Rank 1 does not come to an end, but rank 3 holds what it does.
        before = pids(group)
        with pytest.raises(GroupError, match="rank 2 died"):
            group.call(work, PerRank([0.1, 60.0, 0.0, 0.1]))
        assert_replaced(group.restart(), {1: 3, 2: 0}, before, group)
        assert equal(group.state_dict(), held)


@pytest.mark.full
def test_a_whole_replica_is_copied(copied: Copied, undisturbed: list[float]) -> None:
    with make_hsdp(copied) as group:
        found = [train(group) for _ in range(2)]
        for lost, sources in (((2, 3), {2: 0, 3: 1}), ((0, 1), {0: 2, 1: 3})):
            held, before = group.state_dict(), pids(group)
            kill(group, *lost)
            with pytest.raises(GroupError, match="died"):
                train(group)
            assert_replaced(group.restart(), sources, before, group)
            assert equal(group.state_dict(), held)
            found += [train(group) for _ in range(2)]
        assert found == undisturbed[:6]


@pytest.mark.full
@pytest.mark.parametrize("lost", [0, 2], ids=["that keeps the record", "of another"])
def test_a_named_group_can_be_attached_after_it(copied: Copied, undisturbed: list[float], lost: int) -> None:
    with make_hsdp(copied, name="twins") as first:
        found = [train(first) for _ in range(2)]
        before = pids(first)
        # By bundle: ranks are numbered otherwise.
        rank = next(number for number, one in enumerate(first._client.members) if one.name == f"twins/{lost}")
        kill_idle(first, rank)
        assert_replaced(first.restart(), {rank: (rank + 2) % 4}, before, first)
        found += [train(first)]
        group = ShardedModelGroup.attach("twins")
        assert group.ranks == first.ranks
        found += [train(group)]
        # And once more, by the driver that has attached.
        before = pids(group)
        kill_idle(group, 1)
        assert_replaced(group.restart(), {1: 3}, before, group)
        found += [train(group) for _ in range(2)]
        assert found == undisturbed[:6]
        group.shutdown()


@pytest.mark.full
@pytest.mark.parametrize("name", ["llama", "mixtral", "t5"])
def test_a_transformers_model_is_built_anew_from_the_headers_alone(name: str, tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "model", CASES[name])
    batch: dict[str, Any] = batch_of(ARCHITECTURES[CASES[name].architecture], CASES[name])
    options: dict[str, Any] = {"world_size": 2, "device": "cpu", "sharding": HSDP, "optimizer": ADAM, "timeouts": QUICK}
    losses = []
    for is_disturbed in (False, True):
        with ShardedModelGroup.from_checkpoint(tmp_path / "model", **options) as group:
            call: dict[str, Any] = {key: Split(value) for key, value in batch.items()}
            found = [group.train_step(**call) for _ in range(2)]
            group.forward(**call)
            if is_disturbed:
                (tmp_path / "model").rename(tmp_path / "gone")
                held = group.state_dict()
                kill_idle(group, 0)
                assert group.restart().how == "replicas"
                assert equal(group.state_dict(), held)
            losses.append([*found, *(group.train_step(**call) for _ in range(2))])
    assert losses[0] == losses[1]


def add_buffer() -> None:
    import torch

    from raysharding import current_worker

    current_worker().module.register_buffer("late", torch.ones(2))


def make_own_optimizer() -> None:
    import torch

    from raysharding import current_worker

    worker = current_worker()
    worker.optimizer = torch.optim.SGD(worker.module.parameters(), lr=0.1)


def change_one_copy() -> None:
    import torch
    import torch.distributed as dist

    from raysharding import current_worker

    if dist.get_rank() == 0:
        with torch.no_grad():
            for parameter in current_worker().module.parameters():
                parameter.add_(1.0)


@pytest.mark.full
@pytest.mark.parametrize(
    ("change", "why"),
    [
        (add_buffer, "late is .* on the rank that is left, not there when built anew"),
        (make_own_optimizer, "the state of SGD was held, the optimizer is AdamW"),
        (change_one_copy, "a call had changed some copies of a shard and not the others"),
    ],
)
def test_what_cannot_be_copied_is_loaded_again(copied: Copied, change: Callable[[], None], why: str) -> None:
    with make_hsdp(copied) as group:
        group.call(change)
        kill_idle(group, 2)
        copied.bring_back()
        report = group.restart()
        assert report.how == "reloaded"
        assert re.search(why, report.why, re.DOTALL), report.why
        train(group)


@pytest.mark.full
def test_an_update_in_part_is_loaded_again(copied: Copied) -> None:
    def step(others: str) -> None:
        import os
        import signal

        import torch
        import torch.distributed as dist

        from raysharding import current_worker

        if others == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if others == "change":
            with torch.no_grad():
                for parameter in current_worker().module.parameters():
                    parameter.add_(1.0)
        dist.barrier()  # rank 2 never comes: the test is about just that

    with make_hsdp(copied) as group:
        with pytest.raises(GroupError, match="rank 2 died"):
            group.call(step, PerRank(["change", "wait", "die", "wait"]))
        copied.bring_back()
        report = group.restart()
        assert report.how == "reloaded"
        assert "changed in part" in report.why


@pytest.mark.full
def test_ranks_that_are_left_are_kept_for_a_while_only(copied: Copied) -> None:
    with make_hsdp(copied, timeouts=Timeouts(drain_s=0.5, keep_s=1.0)) as group:
        kill_idle(group, 2)
        time.sleep(1.5)
        copied.bring_back()
        report = group.restart()
        assert report.how == "reloaded"
        assert "were kept for Timeouts(keep_s=1) only" in report.why


NODE_LOST = """
import os, sys, time
from functools import partial
import ray, torch
from ray.cluster_utils import Cluster
from raysharding import ShardedModelGroup, Sharding, Timeouts
from tests.group.conftest import make_mlp
from tests.forking import runtime_env

cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
second = cluster.add_node(num_cpus=2)
ray.init(address=cluster.address, log_to_driver=False, runtime_env=runtime_env())
options = {"sharding": Sharding(replicate_size=2), "optimizer": partial(torch.optim.AdamW, lr=0.01)}
options["timeouts"] = Timeouts(place_s=30.0, keep_s=60.0)
group = ShardedModelGroup.from_checkpoint(sys.argv[1], model=make_mlp(), world_size=4, device="cpu", **options)
os.rename(sys.argv[1], sys.argv[1] + ".gone")
before = group.state_dict()
third = cluster.add_node(num_cpus=2)
old = {one.node_id for one in group.ranks}
lost = [one.rank for one in group.ranks if one.node_id != ray.get_runtime_context().get_node_id()]
assert len(lost) == 2, group.ranks
cluster.remove_node(second)
until = time.monotonic() + 60.0
while group.state.value != "broken":
    assert time.monotonic() < until
    time.sleep(0.05)
report = group.restart()
after = group.state_dict()
assert all(torch.equal(after[name], before[name]) for name in before)
assert {group.ranks[rank].node_id for rank in lost}.isdisjoint(old)
print(report.how, report.why, group.ranks)
group.shutdown()
ray.shutdown()
cluster.shutdown()
"""


@pytest.mark.usefixtures("worker_python")
@pytest.mark.full
def test_a_lost_node_takes_a_replica_and_another_node_gets_it(copied: Copied) -> None:
    command = [sys.executable, "-c", NODE_LOST, str(copied.path)]
    environment = os.environ | {"RAY_AUTH_MODE": "disabled"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("replicas "), done.stdout


def test_which_ranks_hold_the_same() -> None:
    layout = Replicas.of(Sharding(replicate_size=3), 6)
    assert layout.bare_shard([]) is None
    assert layout.bare_shard([0, 1, 2, 3]) is None
    assert layout.sources([0, 1, 2]) == {0: 4, 1: 3, 2: 4}
    assert layout.bare_shard([1, 3, 5, 0]) == 1
    one, two = StateChange(True, 0), StateChange(True, 1)
    assert layout.are_alike({0: one, 2: one, 4: one, 1: two, 3: two})
    assert not layout.are_alike({0: one, 1: one, 4: two})
    alone = Replicas.of(Sharding(), 2)
    assert not alone.are_several
    assert alone.bare_shard([1]) is not None
    assert Replicas.of(Sharding(replicate_size=3), 4) == Replicas(4, 4), "which the ranks refuse"
