"""What a group's controller costs: tensors never pass through it, whatever their size."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from raysharding import Out, PerRank, ShardedModelGroup, Split
from raysharding.units import KIB, MIB
from tests.controllers import controlled

pytestmark = [pytest.mark.usefixtures("cluster"), pytest.mark.timeout(180)]

ROOM = 16 * MIB
SIZES = [pytest.param(256, id="256 MiB"), pytest.param(1024, marks=pytest.mark.full, id="1 GiB")]


@pytest.fixture(scope="module")
def own(cluster: None, checkpoint: Path) -> Iterator[tuple[ShardedModelGroup, int]]:
    with controlled(checkpoint) as (group, controller):
        for _ in range(50):  # what Python and Ray keep for good is there after these
            group.forward(Split(torch.ones(4, 8)))
            group.call(torch.ones, 1 << 20, out=Out.rank0())
        yield group, controller


class PeakMemory:
    """The growth of a process's resident memory at its highest."""

    def __init__(self, pid: int) -> None:
        self._folder = Path("/proc", str(pid))
        (self._folder / "clear_refs").write_text("5")  # proc(5): the peak begins anew
        self._before = self._read("VmRSS")

    def growth(self) -> int:
        """Return the bytes between the beginning and the peak since then."""
        return self._read("VmHWM") - self._before

    def _read(self, name: str) -> int:
        fields = dict(line.split(":", 1) for line in (self._folder / "status").read_text().splitlines())
        return int(fields[name].split()[0]) * KIB


@pytest.mark.parametrize("size", SIZES)
def test_tensors_do_not_pass_through_the_controller(own: tuple[ShardedModelGroup, int], size: int) -> None:
    """Neither a batch, nor an argument for one rank, nor a result."""
    group, controller = own
    peak, whole = PeakMemory(controller), torch.ones(size * MIB // 4)
    group.call(lambda rows: rows.shape[0], Split(whole.reshape(-1, 8)))
    assert group.call(lambda value: value.numel(), PerRank([whole, torch.ones(1)])) == [whole.numel(), 1]
    assert group.call(torch.ones, whole.numel(), out=Out.rank0()).numel() == whole.numel()
    assert peak.growth() < ROOM


def test_small_calls_leave_nothing_in_the_controller(own: tuple[ShardedModelGroup, int]) -> None:
    group, controller = own

    def queue() -> None:
        for _ in range(10):
            calls = [group.call.remote(int) for _ in range(100)]
            assert all(call.result() == [0, 0] for call in calls)

    queue()  # Ray's and Python's own pools of memory grow with the first calls, to 20 MiB
    peak = PeakMemory(controller)
    queue()
    assert peak.growth() < ROOM // 2, "8 KiB a call would be seen"
