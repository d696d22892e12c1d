"""`clip_grad_norm_`, `no_sync` and the averaging of replicated gradients, against FSDP1 and one process."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from raysharding.distributed import clip_grad_norm_, no_sync, using_group
from raysharding.distributed.fully_shard.internals import drop_unreduced_gradients, fsdp_groups, syncs_gradients
from tests.distributed.fully_shard.sharding_models import (
    Net,
    assert_same,
    build,
    fsdp1,
    fsdp1_gradients,
    gradients,
    meshes,
    mine,
    rows,
    sharded,
)
from tests.grid import device_grid
from tests.spawn import RanksFailedError, part_of_ranks, run_ranks

NUM_ROWS = 72
"""Rows that 1, 2, 3 and 4 ranks divide, also in three micro-batches."""


# --- clip_grad_norm_ ------------------------------------------------------------------------------------------------


def clips_as_fsdp1(replicate_size: int) -> None:
    batch = mine(rows(NUM_ROWS))
    for norm_type in (1, 2.0, math.inf):
        for share in (0.3, 0.0, 10.0):
            module, oracle = sharded(build(), replicate_size=replicate_size), fsdp1(build())
            for each in (module, oracle):
                each(batch).square().sum().backward()
            expected = oracle.clip_grad_norm_(math.inf, norm_type)
            bound = share * float(expected)
            oracle.clip_grad_norm_(bound, norm_type)
            norm = clip_grad_norm_(module, bound, norm_type)
            assert torch.allclose(norm.cpu(), expected, rtol=1e-5), (norm_type, norm, expected)
            assert_same(gradients(module), fsdp1_gradients(oracle), rtol=1e-4)


def norms_equal_one_process(replicate_size: int) -> None:
    batch = rows(NUM_ROWS)
    for norm_type in (0.5, 1.0, 2.0, 3.0, math.inf):
        module, twin = sharded(build(), replicate_size=replicate_size), build()
        module(mine(batch)).square().mean().backward()
        twin(batch).square().mean().backward()
        expected = nn.utils.clip_grad_norm_(twin.parameters(), 0.1, norm_type)
        assert torch.allclose(clip_grad_norm_(module, 0.1, norm_type).cpu(), expected, rtol=1e-5), norm_type
        assert_same(gradients(module), gradients(twin), rtol=1e-4)


def odd_gradients() -> None:
    """Zero gradients, values that are not finite, and a forward between backward and clipping."""
    batch = mine(rows(NUM_ROWS))
    for factor in (0.0, math.inf, math.nan):
        module, oracle = sharded(build()), fsdp1(build())
        for each in (module, oracle):
            (each(batch).square().sum() * factor).backward()
        norm, expected = clip_grad_norm_(module, 1.0), oracle.clip_grad_norm_(1.0)
        assert torch.allclose(norm.cpu(), expected, equal_nan=True), (factor, norm, expected)
        # FSDP1's flat gradient holds zeros for what was not used, and turns them into NaN.
        used = {name: grad for name, grad in fsdp1_gradients(oracle).items() if not name.startswith("unused")}
        assert_same(gradients(module), used)
    module, twin = sharded(build()), sharded(build())
    for each in (module, twin):
        each(batch).square().mean().backward()
    module(batch)  # the root's full parameters now stand where the shards are
    assert torch.equal(clip_grad_norm_(module, None), clip_grad_norm_(twin, None))


def refuses_a_part() -> None:
    """As FSDP1 does: the norm of a part is not that of the whole, and its gradients would shrink by themselves."""
    module, oracle = sharded(build()), fsdp1(build())
    for each in (module, oracle):
        each(mine(rows(NUM_ROWS))).square().mean().backward()
    before = gradients(module)
    with pytest.raises(RuntimeError, match="root FSDP instance"):
        oracle.blocks[0].clip_grad_norm_(1e-3)
    for part, name in ((module.blocks[0], "Block"), (module.blocks, "ModuleList"), (module.head, "Linear")):
        with pytest.raises(RuntimeError, match=rf"this {name} is a part of .*clip_grad_norm_\("):
            clip_grad_norm_(part, 1e-3)
    assert_same(gradients(module), before)
    pair, plain = nn.ModuleList([module, sharded(build(seed=1))]), nn.Linear(2, 2)
    assert clip_grad_norm_(pair, None) == clip_grad_norm_(module, None), "several roots have one norm"
    with using_group(part_of_ranks()):
        assert clip_grad_norm_(plain, 1.0).item() == 0.0


def torch_clips_by_the_largest() -> None:
    """What torch's own does with an empty shard: `few` has one row, so all ranks but the first hold none of it."""
    module = sharded(build())
    module(mine(rows(NUM_ROWS))).square().mean().backward()
    assert clip_grad_norm_(module, None, math.inf).item() > 0
    nn.utils.clip_grad_norm_(module.parameters(), 1.0, math.inf)


# --- no_sync --------------------------------------------------------------------------------------------------------


REDUCE_SCATTER = next(name for name in ("reduce_scatter_single", "reduce_scatter_tensor") if hasattr(dist, name))
"""What FSDP2 calls; it has another name in newer torch."""


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """How often each collective was called."""
    calls: Counter[str] = Counter()
    originals = {name: getattr(dist, name) for name in (REDUCE_SCATTER, "all_reduce")}

    def counting(name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            calls[name] += 1
            return originals[name](*args, **kwargs)

        return call

    for name in originals:
        setattr(dist, name, counting(name))
    try:
        yield calls
    finally:
        for name, original in originals.items():
            setattr(dist, name, original)


def accumulate(module: Any, parts: list[torch.Tensor], silent: Any) -> None:
    for part in parts[:-1]:
        with silent():
            (module(part).square().mean() / len(parts)).backward()
    (module(parts[-1]).square().mean() / len(parts)).backward()


def accumulates_with_one_reduction(replicate_size: int) -> None:
    batch = rows(NUM_ROWS)
    parts = [mine(part) for part in batch.chunk(3)]
    module, oracle, twin = sharded(build(), replicate_size=replicate_size), fsdp1(build()), build()
    twin(batch).square().mean().backward()
    accumulate(oracle, parts, oracle.no_sync)
    with torch.no_grad():
        module(batch)  # before the first forward the ranks compare their parameters, which takes an all-reduce as well
    with counted() as calls:
        accumulate(module, parts, lambda: no_sync(module))
    num_groups = len(fsdp_groups(module))
    assert num_groups == 4
    is_cut = dist.get_world_size() > replicate_size
    assert calls[REDUCE_SCATTER] == num_groups * is_cut, calls
    # One for each group over the replicas, and one for the 0-dim parameter.
    assert calls["all_reduce"] == 1 + num_groups * (replicate_size > 1), calls
    assert_same(gradients(module), gradients(twin))
    assert_same(gradients(module), fsdp1_gradients(oracle))
    with counted() as calls:
        accumulate(module, parts, lambda: no_sync(module.blocks[0]))  # a part of it: the others reduce each time
    assert calls[REDUCE_SCATTER] == (3 * (num_groups - 1) + 1) * is_cut


def puts_the_flags_back() -> None:
    module = sharded(build())

    def fail() -> None:
        with no_sync(module), no_sync(module):
            assert not syncs_gradients(module)
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert syncs_gradients(module)
    module.set_requires_gradient_sync(False)
    with no_sync(module):
        pass
    assert not syncs_gradients(module)
    with pytest.raises(ValueError, match="nothing in this Net is sharded"), no_sync(build()):
        pass


def gives_up_an_accumulation() -> None:
    """Gradients that were never reduced do not come back in a later step."""
    batch = mine(rows(NUM_ROWS))
    for precision in (None, "bf16"):
        module, twin = sharded(build(), mixed_precision=precision), sharded(build(), mixed_precision=precision)
        with no_sync(module):
            module(batch).square().mean().backward()
        module.zero_grad()
        drop_unreduced_gradients(module)
        for each in (module, twin):
            each(batch).square().mean().backward()
        assert_same(gradients(module), gradients(twin), rtol=0, atol=0)


# --- replicated parameters ------------------------------------------------------------------------------------------


class Sometimes(nn.Module):
    """A 0-dim parameter that only some ranks' rows use, and outputs in a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, x: torch.Tensor, use: bool) -> dict[str, torch.Tensor]:
        hidden = self.line(x)
        return {"first": hidden, "second": hidden * self.scale if use else hidden * 2.0}


def averages_by_itself(replicate_size: int) -> None:
    """Two backward passes add up, as in one process; each copy holds the same."""
    batch = rows(NUM_ROWS)
    module = sharded(build(), replicate_size=replicate_size, activation_checkpointing=True)
    twin = build()
    for part in batch.chunk(2):
        module(mine(part)).square().mean().backward()
        twin(part).square().mean().backward()
    assert_same(gradients(module), gradients(twin))
    # Asking for it once more changes nothing in value.
    torch.autograd.grad(module(mine(batch)).sum(), module.scale)
    assert_same(gradients(module), gradients(twin))


def some_ranks_do_not_use_it() -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    module = sharded(build(Sometimes), wrap="none")
    batch = rows(world_size)[rank : rank + 1]
    output = module(batch, use=rank == 0)
    output["second"].sum().backward()
    seen = [torch.zeros_like(module.scale.grad) for _ in range(world_size)]
    dist.all_gather(seen, module.scale.grad)
    twin = build(Sometimes)
    twin(rows(world_size)[:1], use=True)["second"].sum().backward()
    for value in seen:
        assert torch.allclose(value.cpu(), twin.scale.grad / world_size)


class Sealed:
    def __init__(self, value: torch.Tensor) -> None:
        self.value = value


class Opaque(Sometimes):
    def forward(self, x: torch.Tensor, use: bool = True) -> Any:
        return Sealed(super().forward(x, use)["second"])


def warns_of_what_it_cannot_see() -> None:
    module = sharded(build(Opaque), wrap="none")
    with pytest.warns(
        UserWarning, match=r"output, a Sealed: call raysharding\.distributed\.reduce_replicated_gradients\("
    ):
        module(rows(2))
    module(rows(2))


def run_all() -> None:
    for replicate_size in meshes(all_of_them=True):
        clips_as_fsdp1(replicate_size)
        norms_equal_one_process(replicate_size)
        accumulates_with_one_reduction(replicate_size)
        averages_by_itself(replicate_size)
    odd_gradients()
    refuses_a_part()
    puts_the_flags_back()
    gives_up_an_accumulation()
    some_ranks_do_not_use_it()
    warns_of_what_it_cannot_see()


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("device", "world_size"), device_grid(3, full=(1, 2, 4)))
def test_gradients(device: str, world_size: int) -> None:
    run_ranks(world_size, run_all, timeout_s=110, device=device)


@pytest.mark.timeout(60)
def test_torch_itself_fails_on_an_empty_shard() -> None:
    """Why the function exists: rank 1 raises in torch's, rank 0 would wait for it. Ours, before it, went well."""
    with pytest.raises(RanksFailedError, match=r"(?s)rank 1 raised:.*in torch_clips_by_the_largest\n    nn\.utils"):
        run_ranks(2, torch_clips_by_the_largest, timeout_s=40)


def test_net_has_what_the_checks_need() -> None:
    names = {name for name, item in Net().named_parameters() if item.ndim == 0 or len(item) == 1}
    assert names == {"few", "scale"}
