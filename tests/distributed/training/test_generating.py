"""`generate` on ranks gives the ids of one process, and leaves the device's random numbers to those who draw them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from raysharding.batch import Split, deal
from raysharding.distributed.comm.device import current_device
from raysharding.distributed.comm.json_collectives import all_gather_json
from raysharding.distributed.fully_shard import move_inputs
from raysharding.distributed.training.generate import generate
from tests.distributed.training.test_training import Pair
from tests.distributed.training.training_cases import CASES
from tests.grid import DEVICES
from tests.spawn import device_type, run_ranks


def generated(module: nn.Module, prompts: torch.Tensor, **options: Any) -> torch.Tensor:
    """The ids of this rank's rows."""
    device = current_device(device_type())
    batch = deal((Split(prompts),), options, dist.get_world_size())[dist.get_rank()]
    ids: torch.Tensor = generate(module, batch.replaced(lambda value: move_inputs(value, device))).value
    return ids


def equal_one_process() -> None:
    for name in ("llama", "t5"):
        pair, prompts = Pair(CASES[name].build, "sgd"), CASES[name].rows()["input_ids"]
        twin: Any = pair.twin.eval()
        for options in ({}, {"num_beams": 3}):
            expected = twin.generate(prompts, max_new_tokens=5, do_sample=False, **options)
            found = generated(pair.module, prompts, max_new_tokens=5, do_sample=False, **options)
            assert torch.equal(found, expected.tensor_split(dist.get_world_size())[dist.get_rank()]), (name, options)


def sample() -> None:
    """Each row is a sample of its own; they come again with the seed, and drop-out goes on as without them."""
    pair, prompts = Pair(CASES["llama"].build, "sgd"), CASES["llama"].rows()["input_ids"][:1].repeat(6, 1)
    drawn, dropped = [], []
    for samples in (True, True, False):
        torch.manual_seed(5)
        if samples:
            drawn.append(generated(pair.module, prompts, max_new_tokens=8, do_sample=True, top_k=0, temperature=5.0))
        dropped.append(nn.functional.dropout(torch.ones(64, device=current_device(device_type()))).tolist())
    assert torch.equal(drawn[0], drawn[1])
    rows = [tuple(row) for rank in all_gather_json(drawn[0].tolist()) for row in rank]
    assert len(set(rows)) == 6
    assert dropped[0] == dropped[1]
    if device_type() != "cpu" or dist.get_rank():  # rank 0's generator on the CPU gives the seed
        assert dropped[0] == dropped[2]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("job", [equal_one_process, sample])
def test_generate(job: Callable[[], None], device: str) -> None:
    pytest.importorskip("transformers")
    run_ranks(2, job, device=device)
