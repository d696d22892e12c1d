"""Groups of four ranks in two replicas, whose checkpoint is gone once they have it."""

from __future__ import annotations

import os
import shutil
import signal
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from raysharding import GroupBrokenError, ShardedModelGroup, Sharding, Timeouts
from raysharding.group import GroupState
from tests.group.conftest import make_group

ADAM = partial(torch.optim.AdamW, lr=1e-2)
HSDP = Sharding(replicate_size=2)
QUICK = Timeouts(drain_s=1.0, call_s=60.0)


class Copied:
    """A checkpoint of one test's own, which it takes away when the group has been made: a reload would fail."""

    def __init__(self, checkpoint: Path, folder: Path) -> None:
        self.path = folder / "model.safetensors"
        shutil.copy(checkpoint, self.path)

    def take_away(self) -> None:
        self.path.rename(self.path.with_suffix(".gone"))


def make_hsdp(copied: Copied, **options: Any) -> ShardedModelGroup:
    """Four ranks: 0 and 2 hold one half of the model, 1 and 3 the other."""
    options = {"timeouts": QUICK, "optimizer": ADAM, "sharding": HSDP, "world_size": 4, **options}
    group = make_group(copied.path, **options)
    copied.take_away()
    return group


def kill(group: ShardedModelGroup, *ranks: int, by: signal.Signals = signal.SIGKILL) -> None:
    for rank in ranks:
        os.kill(group.ranks[rank].pid, by)


def kill_idle(group: ShardedModelGroup, *ranks: int) -> None:
    kill(group, *ranks)
    until = time.monotonic() + 2.0
    while group.state is not GroupState.BROKEN:
        assert time.monotonic() < until
        time.sleep(0.01)
    with pytest.raises(GroupBrokenError, match=rf"rank [{''.join(map(str, ranks))}] died"):
        group.call(int)
