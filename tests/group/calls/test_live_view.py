"""`group.watch()`: what it shows, what it costs the ranks, and when it ends."""

from __future__ import annotations

import contextlib
import gc
import os
import pty
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from raysharding import ShardedModelGroup
from raysharding.group.cluster import Picture
from raysharding.report import Table
from tests.clock import now
from tests.group.conftest import make_group

pytestmark = pytest.mark.usefixtures("nothing_left")


def count_probes() -> None:
    """On a rank: count the probes that it answers."""
    from raysharding import current_worker

    kind: Any = type(current_worker().status)
    answer = kind.__call__

    def counted(status: Any) -> dict:
        status.num_probes = getattr(status, "num_probes", 0) + 1
        return answer(status)

    kind.__call__ = counted


def num_probes() -> int:
    from raysharding import current_worker

    return getattr(current_worker().status, "num_probes", 0)


def until(condition: Callable[[], bool], what: str) -> None:
    end = now() + 20
    while not condition():
        assert now() < end, what
        time.sleep(0.02)


def read_all(descriptor: int, parts: list[bytes]) -> None:
    """Read what is written to a terminal until its other end is closed."""
    with contextlib.suppress(OSError), os.fdopen(descriptor, "rb", buffering=0) as file:
        while part := file.read(4096):
            parts.append(part)


def view_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("watch ")]


@pytest.fixture(scope="module")
def counting(cluster: None, checkpoint: Path) -> Iterator[ShardedModelGroup]:
    """A group whose ranks count probes, with an optimizer."""
    with make_group(checkpoint) as group:
        group.set_optimizer(torch.optim.SGD, lr=0.01)
        group.call(count_probes)
        yield group


def test_ranks_are_probed_once_a_refresh_and_not_otherwise(counting: ShardedModelGroup) -> None:
    counting.forward(torch.ones(1, 8))
    time.sleep(0.5)
    assert counting.call(num_probes) == [0, 0], "nobody looks"
    with counting.watch(refresh_s=0.1) as view:
        until(lambda: view.num_refreshes >= 3, "three refreshes")
    refreshes = view.num_refreshes
    assert counting.call(num_probes) == [refreshes, refreshes]
    time.sleep(0.5)
    assert counting.call(num_probes) == [refreshes, refreshes], "nobody looks any more"
    assert repr(view) == f"<LiveView of {counting.name}, ended: stopped, refreshed {refreshes} times>"


def test_steps_of_a_fit_are_shown_while_it_runs(counting: ShardedModelGroup, capsys: pytest.CaptureFixture) -> None:
    def slow(rows: list) -> dict[str, torch.Tensor]:
        import time

        time.sleep(0.05)
        return {name: torch.stack([row[name] for row in rows]) for name in ("input", "targets")}

    def loss(output: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, int]:
        return (output - targets).square().sum(), output.numel()

    rows = [{"input": torch.ones(8), "targets": torch.ones(4)} for _ in range(80)]
    with counting.watch(refresh_s=0.05):
        counting.fit(rows, batch_size=4, loss=loss, collate_fn=slow, progress=False)
        time.sleep(0.3)
    shown = capsys.readouterr().err.splitlines()
    assert any(line.startswith(f"raysharding: {counting.name}: busy, fit: step ") for line in shown), shown
    assert any(", last fit: step 20, epoch 0, loss " in line for line in shown), shown


def test_terminal_has_a_line_for_each_rank(counting: ShardedModelGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, 90))
    parts: list[bytes] = []
    reader = threading.Thread(target=read_all, args=(ours, parts), daemon=True)
    reader.start()
    with os.fdopen(theirs, "w") as terminal:
        monkeypatch.setattr(sys, "stderr", terminal)
        with counting.watch(refresh_s=0.1) as view:
            until(lambda: view.num_refreshes >= 2, "two refreshes")
    reader.join(20)
    seen = b"".join(parts).decode()
    for rank in counting.ranks:
        line = f"{rank.rank}     {rank.node_ip}  cpu     ready  "
        assert seen.count(line) >= 3, "in each refresh, and at the end"
    assert f"{counting.name}: the view has ended: stopped (" in seen
    assert max(map(len, seen.replace("\n", "\r").split("\r"))) < 90 + len("\x1b[A" * 6), "no line is wrapped"


def test_another_watch_ends_the_earlier(counting: ShardedModelGroup) -> None:
    first = counting.watch(refresh_s=30)
    with counting.watch(refresh_s=30):
        assert "ended: stopped" in repr(first)
        assert len(view_threads()) == 1
    assert view_threads() == []


@pytest.mark.parametrize("seconds", [0, -1.0, float("nan"), float("inf")])
def test_refresh_must_be_a_time(counting: ShardedModelGroup, seconds: float) -> None:
    with pytest.raises(ValueError, match="refresh_s="):
        counting.watch(refresh_s=seconds)


def test_group_that_is_dropped_is_freed_and_ends_its_view(checkpoint: Path) -> None:
    group = make_group(checkpoint, world_size=1)
    view = group.watch(refresh_s=0.05)
    until(lambda: view.num_refreshes > 1, "refreshes")
    del group
    gc.collect()
    until(lambda: view_threads() == [], "it ends with the group")
    assert "ended: the group was " in repr(view)


def test_html_is_escaped() -> None:
    picture = Picture("<b>", "12:00:00", ("a & b",), Table(("<i>",), [("<script>",)]))
    shown = picture._repr_html_()
    assert "&lt;b&gt;" in shown
    assert "a &amp; b" in shown
    assert "<th>&lt;i&gt;</th>" in shown
    assert "<td>&lt;script&gt;</td>" in shown
