"""Ctrl-C, as real SIGINTs: once the group stops at the next call boundary, twice it is torn down."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

from raysharding import CallCancelledError, GroupBrokenError, Placement, ShardedModelGroup, Split, Timeouts
from raysharding.group import GroupState
from tests.clock import now
from tests.controllers import controller_pids
from tests.group.conftest import make_group, placement_groups

pytestmark = pytest.mark.usefixtures("nothing_left")


def work(seconds: float) -> int:
    import time

    time.sleep(seconds)
    return 7


@contextlib.contextmanager
def sigint(*after_s: float) -> Iterator[None]:
    """Send this process SIGINT at these times."""
    timers = [threading.Timer(delay, os.kill, (os.getpid(), signal.SIGINT)) for delay in after_s]
    for timer in timers:
        timer.start()
    try:
        yield
    finally:
        for timer in timers:
            timer.join()


@contextlib.contextmanager
def handler(wanted: Any) -> Iterator[None]:
    """Install a SIGINT handler, and see that it is still installed in the end."""
    before = signal.signal(signal.SIGINT, wanted)
    try:
        yield
        assert signal.getsignal(signal.SIGINT) is wanted
    finally:
        signal.signal(signal.SIGINT, before)


WAITS: dict[str, Callable[[Any], Any]] = {
    "result": lambda call: call.result(),
    "result with a time": lambda call: call.result(timeout_s=0.1),
    "per_rank": lambda call: call.per_rank(),
    "stream": lambda call: list(call.stream()),
}


@pytest.mark.parametrize("wait", WAITS)
def test_once_stops_at_the_next_call_boundary(
    group: ShardedModelGroup, reference: nn.Module, wait: str, capsys: pytest.CaptureFixture[str]
) -> None:
    running, queued = group.call.remote(work, 1.0), [group.call.remote(work, 30.0) for _ in range(3)]
    time.sleep(0.2)
    begun, begun_clock = now(), time.monotonic()
    delay = 0.05 if wait == "result with a time" else 0.3
    with handler(signal.default_int_handler), sigint(delay), pytest.raises(KeyboardInterrupt):
        WAITS[wait](queued[0])
    assert time.monotonic() - begun_clock > 0.5
    assert now() - begun < 5.0, "it waits for the running call, and for no other"
    assert running.done()
    assert running.result() == [7, 7]
    for call in queued:
        with pytest.raises(CallCancelledError, match="Ctrl-C cancelled the call before any rank of group"):
            call.result()
    assert group.state is GroupState.READY
    said = capsys.readouterr().err
    said = re.sub(r"1[78]\d\d s", "1800 s", said)
    assert "stops when the running call has ended (deadline in 1800 s); queued calls cancelled: 3" in said
    x = torch.ones(3, 8)
    assert torch.allclose(group.forward(Split(x)), reference(x), atol=1e-6), "the weights are kept"


def test_once_in_a_blocking_call(group: ShardedModelGroup) -> None:
    begun_clock = time.monotonic()
    with handler(signal.default_int_handler), sigint(0.3), pytest.raises(KeyboardInterrupt):
        group.call(work, 1.0)
    assert time.monotonic() - begun_clock > 0.9
    assert group.state is GroupState.READY
    with handler(signal.default_int_handler), sigint(0.3), pytest.raises(KeyboardInterrupt) as caught:
        group.call(lambda: work(0.6) and 1 / 0)
    assert "ZeroDivisionError" in str(caught.value.__cause__), "what the call itself raised is not lost"
    assert group.call(work, 0.0) == [7, 7]


def test_twice_tears_the_group_down(checkpoint: Path) -> None:
    group = make_group(checkpoint)
    queued = [group.call.remote(work, 60.0) for _ in range(2)]
    begun, begun_clock = now(), time.monotonic()
    with handler(signal.default_int_handler), sigint(0.3, 0.9), pytest.raises(KeyboardInterrupt):
        queued[0].result()
    assert time.monotonic() - begun_clock > 0.9
    assert now() - begun < 2.9
    assert group.state is GroupState.BROKEN
    stopped = rf"refuses calls: group .* was stopped by a second Ctrl-C \(in call\) at .*, pid {os.getpid()}"
    with pytest.raises(GroupBrokenError, match=stopped):
        group.call(work, 0.0)
    with pytest.raises(CallCancelledError):
        queued[1].result()
    group.shutdown()


def test_a_handler_of_the_programs_own_decides(group: ShardedModelGroup) -> None:
    class Stop(Exception):
        pass

    def stop(number: int, frame: FrameType | None) -> None:
        raise Stop

    seen: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        seen.append(number)

    with handler(note), sigint(0.2):
        calls = [group.call.remote(work, 0.3) for _ in range(2)]
        assert [call.result() for call in calls] == [[7, 7]] * 2, "it dealt with the signal: nothing is cancelled"
    assert seen == [signal.SIGINT]
    with handler(stop), sigint(0.2), pytest.raises(Stop):
        group.call(work, 0.5)
    with handler(signal.SIG_IGN), sigint(0.2):
        assert group.call(work, 0.5) == [7, 7]
    assert group.state is GroupState.READY


def test_the_handler_is_only_touched_in_the_main_thread(group: ShardedModelGroup) -> None:
    with handler(signal.default_int_handler):
        thread = threading.Thread(target=group.call, args=(work, 0.5))
        thread.start()
        time.sleep(0.2)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        thread.join()
        group.call(work, 0.0)
        with pytest.raises(RuntimeError):
            group.call(lambda: 1 / 0)


def test_interrupt_from_another_thread(group: ShardedModelGroup) -> None:
    running, queued = group.call.remote(work, 0.8), [group.call.remote(work, 30.0) for _ in range(2)]
    time.sleep(0.2)
    with pytest.raises(TimeoutError, match=r"has not ended after 0\.1 s"):
        group.interrupt(timeout_s=0.1)
    assert group.interrupt() == 0, "those two were cancelled before"
    assert running.done()
    for call in queued:
        with pytest.raises(CallCancelledError, match=r"interrupt\(\) cancelled"):
            call.result()
    assert group.interrupt() == 0
    assert group.state is GroupState.READY


def test_interrupt_waits_for_no_call_that_was_submitted_after_it(group: ShardedModelGroup) -> None:
    """Else it does not return while other threads submit."""
    running = group.call.remote(work, 0.6)
    interrupting = threading.Thread(target=group.interrupt)
    interrupting.start()
    time.sleep(0.3)
    later = group.call.remote(work, 1.5)
    interrupting.join()
    assert running.done()
    assert not later.done()
    assert later.result() == [7, 7]


def test_an_interrupt_that_cannot_be_sent_ends(group: ShardedModelGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(*_: object) -> None:
        raise ConnectionError("as Ray Client raises without its server")

    monkeypatch.setattr(group._client.connection, "ask", lost)
    assert group.interrupt(timeout_s=10) == 0


def make_sleepy(begun: Path) -> Callable[[], nn.Module]:
    """Return a model callable that says that it has begun, and does not end."""

    def build() -> nn.Module:
        import time

        begun.touch()
        time.sleep(60)
        raise AssertionError("nobody waits for that")

    return build


@pytest.mark.parametrize(
    ("moment", "times"),
    [
        ("the controller starts", 1),
        ("the ranks wait for room", 1),
        ("the model is built", 1),
        ("the model is built", 2),
    ],
)
def test_a_group_that_is_being_made_is_undone(checkpoint: Path, tmp_path: Path, moment: str, times: int) -> None:
    """By one Ctrl-C; `nothing_left` sees that nothing is, after a second one in the middle of the undoing, too."""
    groups, controllers, sent, begun = placement_groups(), controller_pids(), list[float](), tmp_path / "begun"
    is_there: dict[str, Callable[[], object]] = {
        "the controller starts": lambda: controller_pids() - controllers,
        "the ranks wait for room": lambda: placement_groups() - groups,
        "the model is built": begun.exists,
    }
    options: dict[str, Any] = {"placement": Placement(strategy="STRICT_SPREAD"), "timeouts": Timeouts(place_s=60)}

    def fire() -> None:
        until = now() + 60
        while not is_there[moment]() and now() < until:
            time.sleep(0.02)
        for _ in range(times):
            sent.append(now())
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.01)

    thread = threading.Thread(target=fire)
    thread.start()
    with handler(signal.default_int_handler), contextlib.suppress(KeyboardInterrupt):  # of a second one that came late
        with pytest.raises(KeyboardInterrupt):
            make_group(checkpoint, model=make_sleepy(begun), **(options if "model" not in moment else {}))
        thread.join()
    thread.join()
    assert now() - sent[0] < (10 if "model" in moment else 5)


IN_A_TERMINAL = """
import sys, time, ray, torch
from raysharding import ShardedModelGroup, Split
from tests.group.conftest import make_mlp

ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False)
with ShardedModelGroup.from_checkpoint(sys.argv[1], model=make_mlp(), world_size=2, device="cpu") as group:
    before, pids = group.state_dict(), [one.pid for one in group.ranks]
    for _ in range(2):
        print("in a call", flush=True)
        try:
            group.call(lambda: __import__("time").sleep(2))
        except KeyboardInterrupt:
            print("interrupted", group.state.value, flush=True)
    after = group.state_dict()
    assert all(torch.equal(after[name], before[name]) for name in before)
    assert group.call(lambda: __import__("os").getpid()) == pids
    print(group.forward(Split(torch.zeros(2, 8))).shape, flush=True)
"""


@pytest.mark.full
def test_in_a_terminal_which_signals_every_process(checkpoint: Path) -> None:
    """Ctrl-C reaches the whole process group: driver, Ray, ranks."""
    root = Path(__file__).resolve().parents[3]
    driver = subprocess.Popen(
        [sys.executable, "-c", IN_A_TERMINAL, str(checkpoint)],
        cwd=root,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert driver.stdout is not None
    lines = []
    try:
        for line in driver.stdout:
            lines.append(line.strip())
            if lines[-1] == "in a call":
                time.sleep(0.5)
                os.killpg(driver.pid, signal.SIGINT)
    finally:
        driver.kill()
        said = driver.stderr.read() if driver.stderr else ""
    assert lines == ["in a call", "interrupted ready"] * 2 + ["torch.Size([2, 4])"], said
    assert said.count("stops when the running call has ended") == 2
