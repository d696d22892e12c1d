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
from tests.distributed.checks import on_ranks


class Bypassing(nn.Module):
    """Calls `forward` of its block by hand, past the hooks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(4, 4))])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[N, 4] to [N, 4]."""
        return self.blocks[0].forward(x)


@pytest.mark.all_ranks
@on_ranks(2)
def test_the_error_of_a_block_that_is_not_called_names_a_cure_that_helps(root: Path) -> None:
    torch.manual_seed(0)
    reference, path = Bypassing(), root / "bypassing.safetensors"
    if dist.get_rank() == 0:
        save_file(reference.state_dict(), path)
    dist.barrier()
    for wrap in ("auto", "none"):
        worker = Worker(dist.get_rank(), 2, dist.get_rank(), "cpu")
        worker.build(Bypassing, open_checkpoint(path), Sharding(wrap=wrap))
        worker.load()
        batch = deal((torch.ones(2, 4),), {}, 2)[dist.get_rank()]
        if wrap == "none":
            torch.testing.assert_close(worker.forward(batch).value, reference(torch.ones(2, 4)).detach())
            continue
        with pytest.raises(RuntimeError) as caught:
            worker.forward(batch)
        assert 'Sharding(wrap="none")' in " ".join(caught.value.__notes__)
