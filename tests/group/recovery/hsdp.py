"""Groups of four ranks in two replicas, whose checkpoint is gone once they have it."""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from raysharding import GroupBrokenError, ShardedModelGroup, Sharding, Split, Timeouts
from raysharding.group import GroupState
from tests.group.conftest import make_group

BATCH = torch.randn(6, 8, generator=torch.Generator().manual_seed(1))
ADAM = partial(torch.optim.AdamW, lr=1e-2)
HSDP = Sharding(replicate_size=2)
QUICK = Timeouts(drain_s=1.0, call_s=60.0)


def to_target(dying: int | None = None) -> Callable[..., torch.Tensor]:
    """Return a loss that pickles by value; the backward pass of one rank may end its process."""

    def loss(output: Any, x: Any) -> Any:
        import os
        import signal

        import torch
        import torch.distributed as dist

        if output.requires_grad and dist.get_rank() == dying:
            output.register_hook(lambda _: os.kill(os.getpid(), signal.SIGKILL))
        return torch.nn.functional.mse_loss(output[:, :4], x[:, :4])

    return loss


def train(group: ShardedModelGroup, dying: int | None = None) -> float:
    return float(group.train_step(Split(BATCH), loss=to_target(dying))["loss"])


class Copied:
    """A checkpoint of one test's own, which it takes away when the group has been made: a reload would fail."""

    def __init__(self, checkpoint: Path, folder: Path) -> None:
        self.path = folder / "model.safetensors"
        shutil.copy(checkpoint, self.path)

    def take_away(self) -> None:
        self.path.rename(self.path.with_suffix(".gone"))

    def bring_back(self) -> None:
        self.path.with_suffix(".gone").rename(self.path)


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
