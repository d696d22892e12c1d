"""`GcsMonitor` beside a listening socket that comes and goes."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable

import pytest

from raysharding.group.cluster import gcs_monitor
from raysharding.group.cluster.gcs_monitor import GcsMonitor
from tests.clock import now


def wait_until(is_so: Callable[[], bool], within_s: float) -> None:
    begun = now()
    while not is_so():
        assert now() - begun < within_s
        time.sleep(0.02)


@pytest.mark.full
def test_a_head_that_answers_is_never_silent() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        head = GcsMonitor(f"127.0.0.1:{listener.getsockname()[1]}")
        until = now() + 2.5
        while now() < until:
            assert head.seconds_silent() < 1.5
            assert not head.is_silent()
            time.sleep(0.05)
        head.close()


def test_a_head_that_ends_is_known_within_a_second_and_heard_again_when_it_is_back() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        head = GcsMonitor(f"127.0.0.1:{port}")
        assert not head.is_silent()
    wait_until(head.is_silent, within_s=1.5)
    wait_until(lambda: head.seconds_silent() > 2.0, within_s=3.0)
    with socket.create_server(("127.0.0.1", port)):
        wait_until(lambda: not head.is_silent(), within_s=1.5)
        assert head.seconds_silent() < 1.0
    head.close()


def test_a_driver_that_was_stopped_itself_does_not_blame_the_head(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gcs_monitor, "_ANSWER_S", 1.0)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        head = GcsMonitor(f"127.0.0.1:{listener.getsockname()[1]}")
    head.seconds_silent()
    time.sleep(1.2)
    assert head.seconds_silent() < 0.1
    head.close()
