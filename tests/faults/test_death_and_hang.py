"""Rows 1, 2 and 5: a rank that is killed, told to end, stopped, crashes or blocks: every phase, and any rank."""

from __future__ import annotations

import pickle
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from raysharding import (
    CallTimeoutError,
    GroupBrokenError,
    GroupError,
    Loading,
    RendezvousError,
    ShardedModelGroup,
    Split,
    Timeouts,
)
from raysharding.checkpoint import open_checkpoint
from raysharding.group import GroupState
from raysharding.group.calls import Client
from tests.clock import now
from tests.conftest import RELEASE_S, make_group, rank_processes
from tests.faults.trap import BUCKET_BYTES, WIDTH, Fault, How, Trap, plain_model, signal_rank

pytestmark = [pytest.mark.usefixtures("nothing_left"), pytest.mark.timeout(180)]

WORLD_SIZE = 3
DEATH_S = 2.0
STALL_S = 3.0
CALL_S = 3.0
HANG_S = 2.0
PLACE_S = 10.0
RENDEZVOUS_S = 3.0
ROWS = torch.randn(7, WIDTH)

LOADING = Loading("scatter", bucket_bytes=BUCKET_BYTES)
TIMEOUTS = Timeouts(load_stall_s=STALL_S, drain_s=1.0)

INSIDE = {
    "plan": ("load", "plan", 0),
    "stream": ("load", "stream", 3 * BUCKET_BYTES),
    "finalize": ("load", "finalize", 0),
    "forward": ("forward", "forward", 0),
    "train_step": ("train_step", "train_step", 0),
    "save": ("save", "save", 0),
    "save, half": ("save", "save", 2 * BUCKET_BYTES),
}
"""Phase → call, phase and bytes at which a rank does the fault to itself."""

OUTSIDE = ("place", "rendezvous", "close")
PHASES = (*OUTSIDE[:2], *INSIDE, "close")
QUICK_PHASES: dict[How, tuple[str, ...]] = {
    "kill": ("rendezvous", "stream", "forward", "save, half"),
    "stop": ("stream", "forward"),
}
"""Phases of the quick cut, which differ most."""

STOPS_OF_RANK_0 = ("rendezvous", "plan", "stream", "save")
"""Phases in which rank 0 does something of its own: its store, the plan, reading, the commit."""

SAID = {"place": {"start", "serve_store", "join"}, "rendezvous": {"join"}, "save, half": {"save"}}
"""Phase → what the error may call it, where that is not the phase itself. `start` has no rank's own word yet."""
IN_LOAD = {"memory_need", "load", "plan", "stream", "finalize"}
"""What is known of a rank that died is what it last said of itself, up to 0.2 s before."""


def cases(how: How) -> list[Any]:
    """The grid, all but a part of a diagonal marked `full`: rank 0, which reads and has the store, and one other.

    A stopped rank costs its deadline each time: where no rank differs from the others, it is one rank.
    """
    grid = []
    for index, phase in enumerate(PHASES):
        other = index % WORLD_SIZE
        for rank in {other} if how == "stop" and phase not in STOPS_OF_RANK_0 else sorted({0, other or 1}):
            is_quick = rank == other and phase in QUICK_PHASES[how]
            marks = () if is_quick else pytest.mark.full
            grid.append(pytest.param(phase, rank, marks=marks, id=f"{phase}-{rank}"))
    return grid


@pytest.mark.parametrize(("phase", "rank"), cases("kill"))
def test_a_rank_that_is_killed(phase: str, rank: int, many_buckets: Path, tmp_path: Path) -> None:
    dies("kill", phase, rank, many_buckets, tmp_path)


@pytest.mark.parametrize(
    "phase", ["forward", *(pytest.param(one, marks=pytest.mark.full) for one in ("stream", "train_step", "save, half"))]
)
def test_a_rank_that_is_terminated(phase: str, many_buckets: Path, tmp_path: Path) -> None:
    """By SIGTERM, as `kill`, schedulers and systemd send it. Under Ray's own handler it would live on, half dead."""
    dies("terminate", phase, 1, many_buckets, tmp_path)


@pytest.mark.parametrize(("phase", "rank"), cases("stop"))
def test_a_rank_that_is_stopped(phase: str, rank: int, many_buckets: Path, tmp_path: Path) -> None:
    error, seconds = struck("stop", phase, rank, many_buckets, tmp_path)
    assert seconds < deadline(phase) + HANG_S
    if error is not None:
        hangs(error, "process is stopped by a signal" if phase in INSIDE else "")


@pytest.mark.parametrize("how", ["segfault", "hold the GIL"])
def test_a_rank_that_crashes_or_blocks(how: How, many_buckets: Path, tmp_path: Path) -> None:
    if how == "segfault":
        dies(how, "forward", 1, many_buckets, tmp_path)
        return
    error, seconds = struck(how, "forward", 1, many_buckets, tmp_path)
    assert seconds < CALL_S + HANG_S
    assert error is not None
    hangs(error, "process runs: a thread may hold the GIL")
    assert "in strike" in error.failures[1].traceback


def dies(how: How, phase: str, rank: int, checkpoint: Path, folder: Path) -> None:
    error, seconds = struck(how, phase, rank, checkpoint, folder)
    assert (error is None) == (phase == "close")
    if error is not None:
        assert seconds < DEATH_S
        assert error.primary is not None
        assert error.primary.kind == "died"
        assert not isinstance(error, CallTimeoutError)


def hangs(error: GroupError, why: str) -> None:
    assert isinstance(error, CallTimeoutError)
    assert error.primary is not None
    assert error.primary.kind == "hung"
    assert not why or f"answers no questions; its {why}" in error.primary.message


def deadline(phase: str) -> float:
    return {"place": PLACE_S, "rendezvous": RENDEZVOUS_S + 5.0}.get(phase, STALL_S if phase != "forward" else CALL_S)


def struck(how: How, phase: str, rank: int, checkpoint: Path, folder: Path) -> tuple[GroupError | None, float]:
    """Do a fault to a rank in a phase; return the error and the seconds until it came.

    `close` has no error, and that of a rank which did not come to the rendezvous is looked at here.
    """
    if phase == "place":
        return struck_in_place(how, rank, checkpoint)
    if phase == "rendezvous":
        return struck_in_rendezvous(how, rank, checkpoint)
    if phase == "close":
        closed_with(how, rank, checkpoint)
        return None, 0.0
    trap = Trap(folder, Fault(how, rank, *INSIDE[phase]))
    with pytest.raises(GroupError) as caught:
        use(phase, trap, checkpoint, folder / "saved")
    seconds = trap.since()
    check_words(caught.value, rank, IN_LOAD if INSIDE[phase][0] == "load" else SAID.get(phase, {phase}))
    return caught.value, seconds


def use(phase: str, trap: Trap, checkpoint: Path, target: Path) -> None:
    """Make a group with a trap, and call what belongs to the phase; it raises, and then the group says so at once."""
    is_short = phase in ("forward", "train_step")
    group = make_group(
        checkpoint,
        world_size=WORLD_SIZE,
        model=trap.model(),
        loading=LOADING,
        timeouts=Timeouts(load_stall_s=STALL_S, drain_s=1.0, call_s=CALL_S if is_short else 60.0),
        optimizer=torch.optim.SGD if phase == "train_step" else None,
    )
    pid = group.ranks[trap.fault.rank].pid
    if phase.startswith("save"):
        target.mkdir()
        (target / "model.safetensors").write_bytes(checkpoint.read_bytes())
    calls: dict[str, Callable[[], Any]] = {
        "forward": lambda: group.forward(Split(ROWS)),
        "train_step": lambda: group.train_step(Split(ROWS), loss=lambda output, rows: output.square().mean()),
    }
    with pytest.raises(GroupError) as caught:
        calls.get(phase, lambda: group.save(target, overwrite=True))()
    assert caught.value.primary is not None
    assert caught.value.primary.pid == pid
    assert_broken(group, caught.value)
    if phase.startswith("save"):  # I4
        assert (target / "model.safetensors").read_bytes() == checkpoint.read_bytes()
        assert len(open_checkpoint(target).tensors) == len(open_checkpoint(checkpoint).tensors)
    group.shutdown()  # the controller of a broken group lives on, for a restart
    raise caught.value


def assert_broken(group: ShardedModelGroup, error: GroupError) -> None:
    assert group.state is GroupState.BROKEN
    begun = now()
    with pytest.raises(GroupBrokenError, match="is broken and refuses calls") as caught:
        group.forward(Split(ROWS))
    assert now() - begun < 0.5
    assert caught.value.primary == error.primary


def check_words(error: GroupError, rank: int | None, phases: set[str]) -> None:
    """I2: rank, node, process and phase are named, the primary cause first, and the error pickles."""
    primary = error.primary
    assert primary is not None
    assert primary.phase in phases
    if rank is not None:
        assert primary.rank == rank
        assert primary.pid > 0
        assert primary.node_ip.count(".") == 3
        assert f"primary: rank {rank} (node {primary.node_ip}, pid {primary.pid})" in str(error)
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again), again.failures) == (type(error), str(error), error.failures)
    assert all(failure.kind != "died" or failure is primary for failure in error.failures.values())


def struck_in_place(how: How, rank: int, checkpoint: Path) -> tuple[GroupError, float]:
    """Strike the actor that appears as number `rank`, as soon as there is a process of that name."""
    struck_at: list[float] = []
    over = threading.Event()
    before = rank_processes()

    def watch() -> None:
        seen: list[int] = []
        while not over.is_set():
            seen.extend(rank_processes() - before - set(seen))
            if len(seen) > rank:
                struck_at.append(now())
                signal_rank(seen[rank], how)
                return
            time.sleep(0.01)

    watcher = threading.Thread(target=watch)
    watcher.start()
    # A stopped rank may have got as far as to be late at the rendezvous instead.
    start_s = PLACE_S if how == "stop" else 100.0
    timeouts = Timeouts(start_s=start_s, rendezvous_s=start_s, drain_s=1.0, load_stall_s=start_s)
    try:
        with pytest.raises(GroupError) as caught:
            make_group(checkpoint, world_size=WORLD_SIZE, model=plain_model(), timeouts=timeouts)
    finally:
        over.set()
        watcher.join()
    assert struck_at, f"an error before the fault: {caught.value}"
    seconds = now() - struck_at[0]
    check_words(caught.value, None, SAID["place"])
    return caught.value, seconds


def struck_in_rendezvous(how: How, rank: int, checkpoint: Path) -> tuple[GroupError | None, float]:
    """Strike a rank while the ranks join, which goes on because another one is stopped, or it is itself."""
    struck_at: list[float] = []
    submit_each = Client.submit_each

    def strike(pid: int) -> None:
        struck_at.append(now())
        signal_rank(pid, how)

    def submit(client: Client, method: str, *args: Any, **options: Any) -> Any:
        if method == "join" and how == "stop":
            strike(client.ranks[rank].pid)
        elif method == "join":
            other = 1 if rank != 1 else 2
            signal_rank(client.ranks[other].pid, "stop")
            threading.Timer(0.5, strike, [client.ranks[rank].pid]).start()
        return submit_each(client, method, *args, **options)

    timeouts = Timeouts(rendezvous_s=RENDEZVOUS_S if how == "stop" else 60.0, drain_s=1.0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Client, "submit_each", submit)
        with pytest.raises((GroupError, RendezvousError)) as caught:
            make_group(checkpoint, world_size=WORLD_SIZE, model=plain_model(), timeouts=timeouts)
    seconds = now() - struck_at[0]
    error = caught.value
    if isinstance(error, RendezvousError):
        # What the ranks that did come say: who did not.
        assert (how, error.missing_ranks) == ("stop", (rank,))
        assert isinstance(error.__cause__, GroupError)
        return None, seconds
    assert isinstance(error, GroupError)
    check_words(error, rank, SAID["rendezvous"])
    return error, seconds


def closed_with(how: How, rank: int, checkpoint: Path) -> None:
    """A rank that dies or hangs as the group is closed is no error: what there is to release is released."""
    group = make_group(checkpoint, world_size=WORLD_SIZE, model=plain_model())
    pids = [info.pid for info in group.ranks]
    ports = listening(pids)
    assert ports
    signal_rank(pids[rank], how)
    begun = now()
    group.shutdown()
    assert now() - begun < RELEASE_S
    assert group.state is GroupState.CLOSED
    # Ray says that an actor is dead a little before its process is gone.
    while left := [one for one in psutil.net_connections("tcp") if one.pid in pids or is_listening(one, ports)]:
        assert now() - begun < RELEASE_S, left
        time.sleep(0.05)
    assert not any(psutil.pid_exists(pid) for pid in pids)


def is_listening(connection: Any, ports: set[int]) -> bool:
    return connection.status == psutil.CONN_LISTEN and connection.laddr.port in ports


def listening(pids: list[int]) -> set[int]:
    """Ports at which processes listen."""
    connections = [one for pid in pids for one in psutil.Process(pid).net_connections("tcp")]
    return {one.laddr.port for one in connections if one.status == psutil.CONN_LISTEN}
