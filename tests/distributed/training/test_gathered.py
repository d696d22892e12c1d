"""Inference on parameters that are gathered once: the same bits as by groups, no collective, shards as before."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from raysharding import Sharding
from raysharding.batch import Split, deal
from raysharding.distributed import footprint, init_mesh, shard_module
from raysharding.distributed.comm import collective_counters
from raysharding.distributed.comm.device import current_device
from raysharding.distributed.fully_shard import is_kept_gathered, keep_gathered, move_inputs, recovering, reshard
from raysharding.distributed.training.generate import generate
from tests.distributed.checks import on_ranks
from tests.distributed.training.training_cases import CASES
from tests.spawn import device_type

SHARDINGS: dict[str, dict[str, Any]] = {
    "default": {},
    "kept after forward": {"reshard_after_forward": False},
    "one group": {"wrap": "none"},
    "prefetched": {"forward_prefetch": True},
    "mixed": {"mixed_precision": "bf16"},
    "outputs cast": {
        "mixed_precision": torch.distributed.fsdp.MixedPrecisionPolicy(torch.bfloat16, output_dtype=torch.float64)
    },
    "offloaded": {"cpu_offload": True},
    "partly ignored": {"ignored_modules": ".*norm.*"},
    "compiled": {"compile": "eager"},
}

_GATHERS = re.compile("FSDP|ExecutionOrder|prefetch|_settle_trained|_hook_bases")


def sharded(name: str, replicate_size: int) -> nn.Module:
    torch.manual_seed(0)
    module = CASES["llama"].build().eval()
    sharding = Sharding(replicate_size=replicate_size, **SHARDINGS[name])
    return shard_module(module, init_mesh(device_type(), sharding), sharding)


def batch() -> Any:
    ids = CASES["llama"].rows()["input_ids"]
    return move_inputs({"input_ids": ids, "use_cache": False}, current_device(device_type()))


def logits(module: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return module(**batch()).logits


def hooks(module: nn.Module) -> list[list[tuple[int, Any]]]:
    return [list(one.items()) for part in module.modules() for one in (part._forward_pre_hooks, part._forward_hooks)]


@contextmanager
def collectives() -> Iterator[Callable[[], int]]:
    assert dist.group.WORLD is not None, "run_ranks makes it"
    counters = collective_counters(dist.group.WORLD)
    before = sum(count() for count in counters)
    yield lambda: sum(count() for count in counters) - before


@on_ranks(1, 2, full=(4,), sim=(2,))
def test_kept_parameters(replicate_size: int) -> None:
    for name in SHARDINGS:
        module = sharded(name, replicate_size)
        expected, before = logits(module), hooks(module)
        reshard(module)
        shards = {fqn: one.to_local().clone() for fqn, one in module.named_parameters() if hasattr(one, "to_local")}
        keep_gathered(module)
        assert is_kept_gathered(module), name
        with collectives() as num_collectives:
            found = [logits(module) for _ in range(2)]
            keep_gathered(module)  # the second time costs nothing
            assert num_collectives() == 0, name
        assert all(torch.equal(one, expected) and one.dtype == expected.dtype for one in found), name
        assert not any(hasattr(one, "to_local") for one in module.parameters()), name
        left = [
            str(hook) for table in hooks(module) for _, hook in table if re.search("FSDP|_Order|prefetch", str(hook))
        ]
        assert not left, name
        reshard(module)
        assert not is_kept_gathered(module)
        assert hooks(module) == before, name
        after = {fqn: one.to_local() for fqn, one in module.named_parameters() if hasattr(one, "to_local")}
        assert after.keys() == shards.keys(), name
        assert all(torch.equal(after[fqn], shards[fqn]) for fqn in shards), name
        assert torch.equal(logits(module), expected), f"{name}: by groups again"


@on_ranks(2, sim=(2,))
def test_kept_before_the_first_forward() -> None:
    """As the first use of a module: prefetching still learns the order, and training takes the same step."""
    for name in ("default", "prefetched", "mixed"):
        losses = []
        for keeps in (True, False):
            module = sharded(name, 1)
            if keeps:
                keep_gathered(module)
                logits(module)
                reshard(module)
            optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
            for _ in range(2):
                output = module(**batch(), labels=batch()["input_ids"])
                output.loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(output.loss.item())
            states = [part._get_fsdp_state() for part in module.modules() if isinstance(part, FSDPModule)]
            assert any(state._states_to_forward_prefetch for state in states) == (name == "prefetched")
        assert losses[:2] == losses[2:], name


@on_ranks(1, sim=(1,))
def test_an_uncut_module_is_not_copied() -> None:
    for name, copies in (("default", False), ("mixed", True)):
        module = sharded(name, 1)
        shards = {one.to_local().data_ptr() for one in module.parameters() if hasattr(one, "to_local")}
        keep_gathered(module)
        assert shards.isdisjoint(one.data_ptr() for one in module.parameters()) == copies, name
        reshard(module)


@on_ranks(2)
def test_an_error_ends_it() -> None:
    module = sharded("default", 1)
    expected = logits(module)
    reshard(module)
    keep_gathered(module)
    with pytest.raises(ValueError, match="input_ids"), recovering(module):
        module(input_ids=None)
    assert not is_kept_gathered(module)
    assert torch.equal(logits(module), expected)


@on_ranks(2, sim=(2,))
def test_memory_that_one_rank_lacks() -> None:
    module = sharded("default", 1)
    assert footprint.missing_to_keep(module) == ""
    of_host = footprint.available_bytes
    footprint.available_bytes = (lambda: 1000) if dist.get_rank() else of_host
    try:
        text = footprint.missing_to_keep(module)
    finally:
        footprint.available_bytes = of_host
    if device_type() == "cpu":
        # The same on every rank: both ranks are on this host, and hold the model and its largest group.
        assert re.search(r"takes [\d.]+ KiB a rank, and [\d.]+ KiB are missing where rank 1 is \(1000 B are free", text)


@on_ranks(2, 4, sim=(2,))
def test_each_rank_generates_until_its_own_rows_end() -> None:
    """Rows of unlike lengths, and a rank that has none: the ids of one process, padded to the longest."""
    from transformers import LlamaForCausalLM

    torch.manual_seed(0)
    twin: Any = CASES["llama"].build().eval()
    module, device = sharded("default", 1), current_device(device_type())
    prompts = CASES["llama"].rows()["input_ids"][:3]
    ids = twin.generate(prompts, max_new_tokens=9, do_sample=False)[:, prompts.shape[1] :]
    end = next(one for one in ids.unique().tolist() if len({(row == one).int().argmax().item() for row in ids}) > 1)
    options = {"max_new_tokens": 9, "do_sample": False, "eos_token_id": end, "pad_token_id": 1}
    expected = twin.generate(prompts, **options)
    calls: list[int] = []

    def length_of(row: torch.Tensor) -> int:
        new = row[prompts.shape[1] :].tolist()
        return new.index(end) + 1 if end in new else len(new)

    assert isinstance(module, LlamaForCausalLM)
    for keeps in (True, False):
        batch = deal((Split(prompts),), options, dist.get_world_size())[dist.get_rank()]
        if keeps:
            keep_gathered(module)
        handle = module.register_forward_pre_hook(lambda *_: calls.append(1))
        found = generate(module, batch.replaced(lambda value: move_inputs(value, device))).value
        handle.remove()
        assert is_kept_gathered(module) == keeps
        own = expected.tensor_split(dist.get_world_size())[dist.get_rank()]
        if not batch.is_dummy:
            assert torch.equal(found, own), keeps
        lengths = [length_of(row) for row in (own if keeps else expected)]
        assert len(calls) == max(lengths, default=0), keeps
        calls.clear()
        reshard(module)
