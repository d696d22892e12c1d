"""`group.stacks()` and `group.logs(rank)`: of ranks that work, that hold the GIL, that are stopped, that are dead."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from pathlib import Path

import pytest

from raysharding import GroupBrokenError, ShardedModelGroup
from raysharding.group import GroupState
from tests import programs
from tests.clock import now, wait_until
from tests.controllers import await_state
from tests.docs.blocks import blocks_of
from tests.group.calls.test_live_view import view_threads
from tests.group.conftest import make_group

pytestmark = pytest.mark.usefixtures("nothing_left")


def print_and_sleep(seconds: float, began: Path | None = None) -> None:
    import tempfile
    import time

    for line in range(30):
        print(f"line {line} of rank output")
    print("a complaint", file=sys.stderr)
    if began is not None:
        tempfile.mkstemp(dir=began)
    time.sleep(seconds)


def hold_the_gil(seconds: int, began: Path) -> None:
    import ctypes
    import tempfile

    tempfile.mkstemp(dir=began)
    ctypes.PyDLL(None).sleep(seconds)


def wait_for_ranks(began: Path) -> None:
    """Wait until both ranks have made their files, and have gone from there into the sleep."""
    wait_until(lambda: len(list(began.iterdir())) >= 2, 20, "both ranks have begun", 0.02)
    time.sleep(0.2)


def test_of_ranks_that_work(group: ShardedModelGroup, tmp_path: Path) -> None:
    call = group.call.remote(print_and_sleep, 3.0, tmp_path)
    wait_for_ranks(tmp_path)
    begun = now()
    stacks, log = group.stacks(), group.logs(1, num_lines=5)
    assert now() - begun < 1.0
    assert not call.done(), "while it works"
    assert sorted(stacks) == [0, 1]
    assert all("in print_and_sleep" in text for text in stacks.values())
    assert [line for line in log.splitlines() if line.startswith("line")] == [
        f"line {line} of rank output" for line in range(25, 30)
    ]
    assert "a complaint" in log
    call.result()
    assert group.stacks().keys() == {0, 1}


@pytest.mark.full
def test_of_a_rank_that_does_not_answer(group: ShardedModelGroup, tmp_path: Path) -> None:
    call = group.call.remote(hold_the_gil, 4, tmp_path)
    wait_for_ranks(tmp_path)
    begun = now()
    stacks = group.stacks()
    assert now() - begun < 2.2
    for rank, text in stacks.items():
        assert f"rank {rank} does not answer within 1 s: its process runs: a thread may hold the GIL" in text
        assert "in hold_the_gil" in text
    call.result()
    group.call(print_and_sleep, 0.0)
    os.kill(group.ranks[1].pid, signal.SIGSTOP)
    try:
        begun = now()
        stacks = group.stacks()
        assert now() - begun < 2.2
        assert "rank 1 does not answer within 1 s: its process is stopped by a signal" in stacks[1]
        assert "does not answer" not in stacks[0]
        assert "line 29 of rank output" in group.logs(1)
    finally:
        os.kill(group.ranks[1].pid, signal.SIGCONT)
    assert group.call(lambda: 1) == [1, 1]


def attach_to_an_issue(group: ShardedModelGroup) -> None:
    """Run what a page says to attach; its tests run it with a group that is READY."""
    (block,) = (one.text for one in blocks_of("docs/pages/failures.md") if "report.mkdir()" in one.text)
    exec(re.sub(r"(?m)^group = .*$", "", block), {"group": group})


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_of_a_rank_that_died_while_idle(
    number: int,
    checkpoint: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    group = make_group(checkpoint)
    group.call(print_and_sleep, 0.0)
    view = group.watch(refresh_s=0.05)
    since = now()
    os.kill(group.ranks[1].pid, number)
    await_state(group, GroupState.BROKEN, 2.0)
    seen = view.num_refreshes
    with pytest.raises(GroupBrokenError) as caught:
        group.call(int)
    assert now() - since < 2.5
    assert caught.value.primary is not None
    assert (caught.value.primary.rank, caught.value.primary.kind, caught.value.primary.phase) == (1, "died", "idle")
    assert "line 29 of rank output" in group.logs(1)
    with pytest.raises(GroupBrokenError):
        group.stacks()
    monkeypatch.chdir(tmp_path)
    attach_to_an_issue(group)
    assert "rank 1 died" in Path("report/group.txt").read_text()
    assert "line 29 of rank output" in Path("report/rank-1.log").read_text()
    until = now() + 20
    while view.num_refreshes <= seen + 1:  # the view goes on: a restart may follow
        assert now() < until
        time.sleep(0.02)
    group.shutdown()
    while "ended: the group was shut down" not in repr(view) or view_threads():
        assert now() < until
        time.sleep(0.02)
    shown = capsys.readouterr().err
    assert f"raysharding: {group.name}: ready" in shown
    assert f"raysharding: {group.name}: broken, cause: {group.name}: rank 1 died" in shown
    assert "line 29 of rank output" in group.logs(1)
    monkeypatch.chdir("report")
    attach_to_an_issue(group)


def test_what_is_asked_for_is_checked(group: ShardedModelGroup) -> None:
    with pytest.raises(ValueError, match="rank=2: give one of 0 to 1"):
        group.logs(2)
    with pytest.raises(ValueError, match="num_lines=0: give a whole number, 1 or more"):
        group.logs(0, num_lines=0)


ON_ANOTHER_NODE = """
import os, signal, sys, time
import ray
from ray.cluster_utils import Cluster
from raysharding import Placement, ShardedModelGroup
from tests.group.conftest import make_mlp
from tests.forking import runtime_env
from tests.group.calls.test_inspection import print_and_sleep

cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
second = cluster.add_node(num_cpus=1)
ray.init(address=cluster.address, log_to_driver=False, runtime_env=runtime_env())
spread = Placement(strategy="STRICT_SPREAD")
group = ShardedModelGroup.from_checkpoint(sys.argv[1], model=make_mlp(), world_size=2, device="cpu", placement=spread)
group.call(print_and_sleep, 0.0)
assert "line 29" in group.logs(1)
os.kill(group.ranks[1].pid, signal.SIGSTOP)
assert "its process is stopped by a signal" not in group.stacks()[1], "nobody on that node can say"
assert "does not answer" in group.stacks()[1]
os.kill(group.ranks[1].pid, signal.SIGKILL)
assert "line 29" in group.logs(1)
group.shutdown()
cluster.remove_node(second)
try:
    group.logs(1)
except Exception as error:
    print(type(error).__name__, str(error)[:200])
ray.shutdown()
cluster.shutdown()
"""


@pytest.mark.usefixtures("worker_python")
@pytest.mark.full
def test_of_a_rank_on_another_node(checkpoint: Path) -> None:
    environment = os.environ | {"RAY_AUTH_MODE": "disabled"}
    done = programs.run(ON_ANOTHER_NODE, str(checkpoint), environment=environment)
    assert done.returncode == 0, done.stderr
    assert "GroupError cannot read the log of rank 1 on node" in done.stdout, done.stdout
