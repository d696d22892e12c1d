"""Code of `group.call` that shards modules of its own over a part of the ranks, and leaves the group as it was."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from raysharding import Split
from tests.group.conftest import make_group

pytestmark = [pytest.mark.usefixtures("nothing_left"), pytest.mark.timeout(120)]


def on_two_ranks(folder: str) -> list[float]:
    import torch
    import torch.distributed as dist

    from raysharding.distributed import init_mesh, load_checkpoint, save_checkpoint, shard_module, train_step

    group = dist.new_group([1, 2])
    if dist.get_rank() == 0:
        return []
    torch.manual_seed(0)
    module = shard_module(torch.nn.Linear(8, 4), init_mesh("cpu", group=group))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    batch = {"input": torch.ones(2, 8)}
    losses = [train_step(module, optimizer, batch, loss=lambda y: y.square().mean())["loss"] for _ in range(2)]
    save_checkpoint(module, folder)
    load_checkpoint(module, folder)
    return losses


def test_meshes_of_a_part_beside_the_groups_own(checkpoint: Path, tmp_path: Path) -> None:
    rows = torch.randn(6, 8, generator=torch.Generator().manual_seed(0))
    with make_group(checkpoint, world_size=3) as group:
        before = group.forward(Split(rows))
        nothing, first, second = group.call(on_two_ranks, str(tmp_path / "own"))
        assert nothing == []
        assert first == second
        assert first[1] < first[0]
        torch.testing.assert_close(group.forward(Split(rows)), before, rtol=0, atol=0)
        group.save(tmp_path / "saved")
