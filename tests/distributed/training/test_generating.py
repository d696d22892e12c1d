"""`generate` on ranks gives the ids of one process, and leaves the device's random numbers to those who draw them."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from raysharding.batch import RankBatch, RankOutput, Split, deal
from raysharding.distributed.comm.device import current_device, is_accelerator, set_current_device
from raysharding.distributed.comm.json_collectives import all_gather_json
from raysharding.distributed.fully_shard import keep_gathered, move_inputs, reshard
from raysharding.distributed.training.generate import generate
from raysharding.distributed.training.token_stream import TokenStream
from tests.distributed.checks import on_ranks
from tests.distributed.training.test_training import Pair
from tests.distributed.training.training_cases import CASES
from tests.spawn import device_type

pytest.importorskip("transformers")


def own_batch(prompts: torch.Tensor, options: dict[str, Any]) -> RankBatch:
    device = current_device(device_type())
    batch = deal((Split(prompts),), options, dist.get_world_size())[dist.get_rank()]
    return batch.replaced(lambda value: move_inputs(value, device))


def generated(module: nn.Module, prompts: torch.Tensor, **options: Any) -> torch.Tensor:
    """The ids of this rank's rows."""
    ids: torch.Tensor = generate(module, own_batch(prompts, options)).value
    return ids


@on_ranks(2, sim=(2,))
def test_ids_equal_one_process() -> None:
    for name in ("llama", "t5"):
        pair, prompts = Pair(CASES[name].build, "sgd"), CASES[name].rows()["input_ids"]
        twin: Any = pair.twin.eval()
        for options in ({}, {"num_beams": 3}):
            expected = twin.generate(prompts, max_new_tokens=5, do_sample=False, **options)
            found = generated(pair.module, prompts, max_new_tokens=5, do_sample=False, **options)
            assert torch.equal(found, expected.tensor_split(dist.get_world_size())[dist.get_rank()]), (name, options)


def generate_on(device: torch.device, module: nn.Module, batch: RankBatch, stream: TokenStream) -> RankOutput:
    if is_accelerator(device):
        set_current_device(device)  # torch has one for each thread
    return generate(module, batch, stream=stream)


@on_ranks(2, sim=(2,))
def test_a_stream_has_the_tokens_of_all_ranks() -> None:
    """In the order of the call, whether parameters are gathered once or by groups."""
    pair, prompts = Pair(CASES["llama"].build, "sgd"), CASES["llama"].rows()["input_ids"]
    expected: Any = pair.twin.eval()
    expected = expected.generate(prompts, max_new_tokens=5, do_sample=False)
    batch = own_batch(prompts, {"max_new_tokens": 5, "do_sample": False})
    for keeps in (False, True):
        if keeps:
            keep_gathered(pair.module)
        stream = TokenStream(partial(generate_on, current_device(device_type()), pair.module, batch), is_silent=False)
        came: list[list[int]] = [[] for _ in prompts]
        while (tokens := stream.next()) is not None:
            for row, token in tokens:
                came[row].append(token)
        assert torch.equal(stream.outcome.result().value, expected.tensor_split(dist.get_world_size())[dist.get_rank()])
        for one, row in zip(came, expected[:, prompts.shape[1] :].tolist(), strict=True):
            assert one == row[: len(one)]
            assert len(one) == len(row) or one[-1] == 2, "up to its end token"
    reshard(pair.module)


@on_ranks(2, sim=(2,))
def test_sampling() -> None:
    """Each row is a sample of its own; they come again with the seed, and drop-out goes on as without them."""
    pair, prompts = Pair(CASES["llama"].build, "sgd"), CASES["llama"].rows()["input_ids"][:1].repeat(6, 1)
    options = {"max_new_tokens": 8, "do_sample": True, "top_k": 0, "temperature": 5.0}
    drawn, dropped = [], []
    for seed in ({"seed": 5}, {"seed": 5}, {}, {}, None):
        torch.manual_seed(5)
        if seed is not None:
            drawn.append(generated(pair.module, prompts, **options, **seed))
        dropped.append(nn.functional.dropout(torch.ones(64, device=current_device(device_type()))).tolist())
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[1], drawn[2])
    assert not torch.equal(drawn[2], drawn[3])
    rows = [tuple(row) for rank in all_gather_json(drawn[0].tolist()) for row in rank]
    assert len(set(rows)) == 6
    assert all(one == dropped[0] for one in dropped)


@on_ranks(2, sim=(2,))
def test_own_generate_loops() -> None:
    """A class's own `generate` may run more forwards on one rank than on another, as Whisper's does."""
    from transformers import LlamaForCausalLM

    class Looping(LlamaForCausalLM):
        def generate(self, ids: torch.Tensor, **options: Any) -> Any:
            for _ in range(1 + int(torch.equal(ids.cpu(), parts[0]))):  # more on rank 0
                ids = super().generate(ids, **options)
            return ids

    def build() -> nn.Module:
        model: Any = CASES["llama"].build()
        model.__class__ = Looping
        return model

    rows = CASES["llama"].rows()
    parts = rows["input_ids"].tensor_split(dist.get_world_size())
    pair = Pair(build, "sgd")
    twin: Any = pair.twin.eval()
    expected = twin.generate(parts[dist.get_rank()], max_new_tokens=2)
    found = generated(pair.module, rows["input_ids"], max_new_tokens=2)
    assert torch.equal(found[:, : expected.shape[1]], expected)
    pair.step(CASES["llama"], rows)


@on_ranks(2, sim=(2,))
def test_start_tokens() -> None:
    """transformers prepends the start token if none of its rows begins with it; the rows of a rank are not all."""
    pair, prompts = Pair(CASES["t5"].build, "sgd"), CASES["t5"].rows()["input_ids"]
    twin: Any = pair.twin.eval()
    for first in (0, 3):  # the start token, and another
        ids = torch.full((len(prompts), 2), 3)
        ids[:, 0] = first
        expected = twin.generate(prompts, decoder_input_ids=ids, max_new_tokens=3)
        found = generated(pair.module, prompts, decoder_input_ids=Split(ids), max_new_tokens=3)
        assert torch.equal(found, expected.tensor_split(dist.get_world_size())[dist.get_rank()])
    ids[0, 0] = 0
    with pytest.raises(ValueError, match="rows of some ranks begin with decoder_start_token_id"):
        generated(pair.module, prompts, decoder_input_ids=Split(ids), max_new_tokens=3)
