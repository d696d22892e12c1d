"""A block whose own forward is never called: FSDP cannot gather it, and the error says what helps."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn

from raysharding.batch import deal
from raysharding.checkpoint import open_checkpoint
from raysharding.config import Sharding
from raysharding.worker import Worker
from tests.spawn import run_ranks


class Bypassing(nn.Module):
    """Calls `forward` of its block by hand, past the hooks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(4, 4))])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[N, 4] to [N, 4]."""
        return self.blocks[0].forward(x)


def forward(path: Path, wrap: str) -> tuple[torch.Tensor | None, str]:
    """On every rank: the output, or what the error's notes say."""
    worker = Worker(dist.get_rank(), 2, dist.get_rank(), "cpu")
    worker.build(Bypassing, open_checkpoint(path), Sharding(wrap=wrap))
    worker.load()
    try:
        return worker.forward(deal((torch.ones(2, 4),), {}, 2)[dist.get_rank()]).value, ""
    except RuntimeError as error:
        return None, " ".join(error.__notes__)


@pytest.mark.all_ranks
@pytest.mark.timeout(60)
def test_the_error_names_a_cure_that_helps(tmp_path: Path) -> None:
    torch.manual_seed(0)
    reference = Bypassing()
    save_file(reference.state_dict(), tmp_path / "model.safetensors")
    for output, notes in run_ranks(2, forward, tmp_path / "model.safetensors", "auto", timeout_s=25):
        assert output is None
        assert 'Sharding(wrap="none")' in notes
    for output, _ in run_ranks(2, forward, tmp_path / "model.safetensors", "none", timeout_s=25):
        torch.testing.assert_close(output, reference(torch.ones(2, 4)).detach())
