"""Where a test finds the controller of a group: what is known of `GroupController` outside of the library is here."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from raysharding import ShardedModelGroup
from raysharding.group import GroupState
from tests.clock import now
from tests.conftest import make_group, rank_processes

TITLE = "ray::GroupController"
"""What Ray calls the process of a controller."""


def controller_pids() -> set[int]:
    """Pids of the controllers on this test run's clusters, those of hosts in network namespaces among them."""
    return rank_processes(TITLE)


def new_controller(before: set[int], within_s: float = 60.0) -> int:
    """Return the pid of the controller that is not one of those before, and wait for it."""
    until = now() + within_s
    while not (found := controller_pids() - before):
        assert now() < until, "no controller"
        time.sleep(0.005)
    (pid,) = found
    return pid


@contextmanager
def controlled(checkpoint: Path, **options: Any) -> Iterator[tuple[ShardedModelGroup, int]]:
    """Make a group, give it with the pid of its controller, and shut it down."""
    before = controller_pids()
    with make_group(checkpoint, **options) as group:
        yield group, new_controller(before)


def await_state(group: ShardedModelGroup, state: GroupState, within_s: float) -> float:
    """Wait until a driver sees a group in a state; returns the clock."""
    until = now() + within_s
    while (found := group.state) is not state:
        assert now() < until, f"{found} after {within_s:g} s"
        time.sleep(0.01)
    return now()
