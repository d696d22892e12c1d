"""Inference on parameters that are gathered once: the same bits as by groups, no collective, shards as before."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from raysharding import Sharding
from raysharding.distributed import init_mesh, shard_module
from raysharding.distributed.comm import collective_counters
from raysharding.distributed.comm.device import current_device
from raysharding.distributed.fully_shard import move_inputs, recovering, reshard
from raysharding.distributed.training import gathered, is_kept_gathered, keep_gathered
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

_GATHERS = re.compile("FSDP|_Order|prefetch")


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
        assert keep_gathered(module), name
        with collectives() as num_collectives:
            found = [logits(module) for _ in range(2)]
            assert keep_gathered(module), "the second time costs nothing"
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


@on_ranks(2)
def test_too_little_memory() -> None:
    """One rank without the memory is enough for all to go by groups, and a line says what is missing."""
    module = sharded("default", 1)
    expected = logits(module)
    reshard(module)
    found = gathered.available_bytes
    gathered.available_bytes = (lambda: 1000) if dist.get_rank() else found
    try:
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            assert not keep_gathered(module)
            assert keep_gathered(module, wanted=True), "the user knows better"
    finally:
        gathered.available_bytes = found
    texts = [str(one.message) for one in said]
    if dist.get_rank() == 0:
        assert any("are missing where rank 1 is" in text and "1000 B are free" in text for text in texts), texts
    else:
        assert not texts
    reshard(module)
    assert not keep_gathered(module, wanted=False)
    assert torch.equal(logits(module), expected)
