"""The order of calls: one driver's run as it submits them, and those of several drivers beside each other."""

from __future__ import annotations

import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import ray
import torch

from raysharding import CallCancelledError, GroupError, ShardedModelGroup
from raysharding.group import GroupState
from raysharding.group.calls import client as client_module
from tests.conftest import make_group
from tests.group.standing import Driver, StandingCluster

pytestmark = pytest.mark.timeout(600)

NUM_CALLS = 500
LARGE = 100_000
"""Elements of a tensor that goes through Ray's object store: 400 KB."""


def note(number: int, values: Any = None) -> tuple[int, float]:
    """On a rank: keep the number of the call; returns it, and the sum of the values."""
    import sys

    sys.__dict__.setdefault("noted", []).append(number)
    return number, 0.0 if values is None else float(torch.as_tensor(values).sum())


def noted() -> list[int]:
    """On a rank: return the numbers since the last time."""
    import sys

    numbers: list[int] = sys.__dict__.pop("noted", [])
    return numbers


def values_of(number: int) -> Any:
    """Most calls bring nothing, some a little, some what goes through the object store."""
    if number % 11 == 0:
        return torch.full((LARGE,), float(number))
    return torch.full((number % 7,), float(number)) if number % 3 == 0 else None


def test_500_calls_of_mixed_sizes_run_in_the_order_of_their_submission(group: ShardedModelGroup) -> None:
    group.call(noted)
    calls = [group.call.remote(note, number, values_of(number)) for number in range(NUM_CALLS)]
    for number, call in enumerate(calls):
        values = values_of(number)
        total = 0.0 if values is None else float(values.sum())
        assert call.result(60) == [(number, total)] * 2
    assert group.call(noted) == [list(range(NUM_CALLS))] * 2


def test_a_part_of_a_result_that_is_asked_for_before_its_call_arrives_is_waited_for(group: ShardedModelGroup) -> None:
    """Else `state_dict` takes the call for ended, and the ranks wait forever for somebody to take the first bucket."""
    client = group._client
    part = client.item(client.connection.registration.next_number, 0)
    time.sleep(0.5)
    call = group.call.remote(int)
    assert part.result(timeout=20.0) is not None
    assert call.result() == [0, 0]


def test_an_argument_that_is_still_being_made_lets_no_later_call_pass(group: ShardedModelGroup) -> None:
    @ray.remote(num_cpus=0)
    def make() -> Any:
        import time

        import numpy

        time.sleep(1.0)
        return numpy.ones(LARGE)

    group.call(noted)
    pending = make.remote()
    calls = [group.call.remote(note, number, pending if number in (3, 7) else None) for number in range(20)]
    assert [call.result(60)[1] for call in calls] == [(n, LARGE if n in (3, 7) else 0.0) for n in range(20)]
    assert group.call(noted) == [list(range(20))] * 2


def test_arguments_that_are_lost_before_the_ranks_begin_leave_the_group_ready(
    group: ShardedModelGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As those of a driver that dies may be, which must not break the group of the others."""

    @ray.remote(num_cpus=0, max_retries=0)
    def lost() -> None:
        import os

        os._exit(1)

    monkeypatch.setattr(client_module, "_stored", lambda part: lost.remote())
    call = group.call.remote(int)
    monkeypatch.undo()
    with pytest.raises(GroupError, match="could not deliver the arguments"):
        call.result()
    assert group.state is GroupState.READY
    assert group.call(torch.numel, torch.ones(LARGE)) == [LARGE, LARGE]


def test_what_is_asked_about_a_call_waits_for_the_call(group: ShardedModelGroup) -> None:
    """Ray may bring the question before the call."""
    client = group._client
    number = client.connection.registration.next_number
    busy = group.call.remote(time.sleep, 1.0)
    item = client.item(number + 1, 0)
    interrupted = client.connection.begin("interrupt", client.connection.key, "the test", number + 3)
    time.sleep(0.3)
    first, second = group.call.remote(note, 0), group.call.remote(note, 1)
    for call in (first, second):
        with pytest.raises(CallCancelledError, match="the test cancelled the call"):
            call.result(30)
    assert ray.get(interrupted, timeout=30)[0] == 2
    assert item.result(30) is None
    busy.result(30)
    item = client.item(number + 3, 1)
    time.sleep(0.3)
    assert group.call(note, 2) == [(2, 0.0)] * 2
    assert item.result(30) is not None


CALLS = """
from tests.group.calls.test_queue import note, values_of

def ask(numbers):
    calls = [(n, group.call.remote(note, first + n, values_of(n))) for n in numbers]
    for n, call in calls:
        values = values_of(n)
        assert call.result() == [(first + n, 0.0 if values is None else float(values.sum()))] * 2, n

group = ShardedModelGroup.attach("shared")
first, num_calls = map(int, sys.argv[3:])
tell(ready=True)
sys.stdin.readline()
try:
    for begin in range(0, num_calls, 20):
        ask(range(begin, begin + 20))
        if begin == 40:
            tell(begun=True)
    tell(done=True)
except KeyboardInterrupt:
    ask(range(5000, 5020))
    tell(interrupted=True)
sys.stdin.readline()
os._exit(0)  # no shutdown: the group is another driver's, too
"""


def test_a_driver_that_dies_and_one_that_presses_ctrl_c_leave_the_calls_of_the_third_alone(
    mine: Driver, standing: StandingCluster, checkpoint: Path
) -> None:
    with (
        Driver(standing, checkpoint, CALLS, "0", "200") as whole,
        Driver(standing, checkpoint, CALLS, "10000", "2000") as dying,
        Driver(standing, checkpoint, CALLS, "20000", "2000") as stopping,
    ):
        three = (whole, dying, stopping)
        for driver in three:
            assert driver.hear()["ready"]
        for driver in three:
            driver.say("go")
        for driver in (dying, stopping):
            assert driver.hear()["begun"]
        dying.kill()
        stopping.kill(signal.SIGINT)
        assert stopping.hear()["interrupted"]
        assert whole.hear()["begun"]
        assert whole.hear()["done"]
    mine.say("noted")
    first, second = mine.hear()["value"]
    assert first == second, "every rank ran the same calls in the same order"
    by_driver = {begin: [n - begin for n in first if begin <= n < begin + 10_000] for begin in (0, 10_000, 20_000)}
    assert by_driver[0] == list(range(200))
    ran = by_driver[10_000]
    assert ran == sorted(set(ran))
    assert 60 <= len(ran) < 2000
    lost = [number for number in range(ran[-1]) if number not in ran]
    assert lost in ([], [number for number in lost[:1] if number % 11 == 0]), "a call whose arguments died with it"
    before, after = [n for n in by_driver[20_000] if n < 2000], [n for n in by_driver[20_000] if n >= 2000]
    assert before == list(range(len(before)))
    assert 60 <= len(before) < 2000
    assert after == list(range(5000, 5020)), "it goes on, too"


@pytest.mark.parametrize("times", [5, pytest.param(200, marks=pytest.mark.full)])
def test_copies_in_both_directions_by_two_drivers_end(times: int, cluster: None, checkpoint: Path) -> None:
    with make_group(checkpoint, name="left") as left, make_group(checkpoint, name="right") as right:
        others = ShardedModelGroup.attach("right"), ShardedModelGroup.attach("left")
        copied = list[int]()

        def copy(source: ShardedModelGroup, target: ShardedModelGroup) -> None:
            for _ in range(times):
                source.copy_to(target)
            calls = [source.copy_to.remote(target) for _ in range(10)]
            copied.extend(call.result().num_tensors for call in calls)

        threads = [threading.Thread(target=copy, args=pair) for pair in ((left, right), others)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(300)
        assert len(copied) == 20
        assert all(copied)
        torch.testing.assert_close(left.state_dict(), right.state_dict(), rtol=0, atol=0)


def test_a_copy_that_was_submitted_is_before_the_next_call_of_the_other_group(
    group: ShardedModelGroup, checkpoint: Path
) -> None:
    """`submit` returns when both groups hold the copy: what is asked of the target afterwards sees the new weights."""

    def add() -> None:
        import torch

        from raysharding import current_worker

        with torch.no_grad():
            for parameter in current_worker().module.parameters():
                parameter.add_(1.0)

    with make_group(checkpoint) as target:
        for _ in range(50):
            group.call.remote(add)
            copy = group.copy_to.remote(target)
            seen = target.forward.remote(torch.ones(1, 8))
            assert torch.equal(seen.result(), group.forward(torch.ones(1, 8)))
            copy.result()
    group.load(checkpoint)
