"""Clipping, no_sync, the averaging of replicated gradients, frozen parameters: as FSDP1, one process, a new module."""

from __future__ import annotations

import itertools
import math
import re
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from raysharding.batch import RankBatch, Split, deal
from raysharding.distributed import clip_grad_norm_, no_sync, reduce_replicated_gradients, using_group
from raysharding.distributed.fully_shard.internals import drop_unreduced_gradients, fsdp_groups, syncs_gradients
from raysharding.distributed.optim.factories import make_optimizer
from raysharding.distributed.training.step import train_step
from raysharding.errors import PlanError
from tests.distributed.checks import on_ranks
from tests.distributed.fully_shard.sharding_models import (
    assert_same,
    build,
    fsdp1,
    fsdp1_gradients,
    full,
    gradients,
    mine,
    rows,
    sharded,
)
from tests.models.architectures import ARCHITECTURES
from tests.spawn import RanksFailedError, part_of_ranks, run_ranks

NUM_ROWS = 72
"""Rows that 1, 2, 3 and 4 ranks divide, also in three micro-batches."""


# --- clip_grad_norm_ ------------------------------------------------------------------------------------------------


@on_ranks(3, full=(1, 2, 4), sim=(2,))
def test_clipping_as_fsdp1(replicate_size: int) -> None:
    batch = mine(rows(NUM_ROWS))
    module, oracle = sharded(build(), replicate_size=replicate_size), fsdp1(build())
    for norm_type, share in itertools.product((1, 2.0, math.inf), (0.3, 0.0, 10.0)):
        for each in (module, oracle):
            each.zero_grad()
            each(batch).square().sum().backward()
        expected = oracle.clip_grad_norm_(math.inf, norm_type)
        bound = share * float(expected)
        oracle.clip_grad_norm_(bound, norm_type)
        norm = clip_grad_norm_(module, bound, norm_type)
        assert torch.allclose(norm.cpu(), expected, rtol=1e-5), (norm_type, norm, expected)
        assert_same(gradients(module), fsdp1_gradients(oracle), rtol=1e-4)


@on_ranks(3, full=(1, 2, 4), sim=(2,))
def test_norms_equal_one_process(replicate_size: int) -> None:
    batch = rows(NUM_ROWS)
    module, twin = sharded(build(), replicate_size=replicate_size), build()
    for norm_type in (0.5, 1.0, 2.0, 3.0, math.inf):
        for each, part in ((module, mine(batch)), (twin, batch)):
            each.zero_grad()
            each(part).square().mean().backward()
        expected = nn.utils.clip_grad_norm_(twin.parameters(), 0.1, norm_type)
        measured = clip_grad_norm_(module, math.inf, norm_type)
        assert measured.dtype == torch.float32
        assert torch.allclose(measured.cpu(), expected, rtol=1e-5), norm_type
        assert torch.equal(clip_grad_norm_(module, 0.1, norm_type), measured)
        assert_same(gradients(module), gradients(twin), rtol=1e-4)


class Uneven(nn.Module):
    """Odd row counts, fewer rows than ranks (empty shards), and 0-dim parameters of two dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.odd = nn.Linear(3, 7)
        self.few = nn.Parameter(torch.ones(1, 5))
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.wide = nn.Parameter(torch.tensor(0.5, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = (self.odd(x).sum() + (self.few * x[0, 0]).sum()) * self.scale
        return out + self.wide.to(out) * x.square().sum()


@on_ranks(4)
def test_norms_of_uneven_shards_and_of_replicas() -> None:
    """Of the gradients that the module holds; a bound scales them all, in their own dtypes."""
    for replicate_size, norm_type in itertools.product((1, 2), (0.5, 1.0, 2.0, 3.0, math.inf)):
        module = sharded(Uneven(), wrap="none", replicate_size=replicate_size)
        batch = torch.rand(dist.get_world_size(), 3, generator=torch.Generator().manual_seed(1))
        module(mine(batch)).backward()
        before = gradients(module)
        flat = torch.cat([grad.double().flatten() for grad in before.values()])
        expected = torch.linalg.vector_norm(flat, norm_type)
        measured = clip_grad_norm_(module, None, norm_type)
        assert measured.dtype == torch.float32
        assert torch.allclose(measured.double(), expected, rtol=1e-6), (norm_type, measured, expected)
        assert torch.equal(clip_grad_norm_(module, math.inf, norm_type), measured)
        assert torch.equal(clip_grad_norm_(module, 0.25 * expected.item(), norm_type), measured)
        assert_same(gradients(module), {name: (old * 0.25).to(old) for name, old in before.items()}, rtol=1e-4)


@on_ranks(3, full=(1, 2, 4), sim=(2,))
def test_odd_gradients() -> None:
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


@on_ranks(3, full=(1, 2, 4), sim=(2,))
def test_a_part_is_refused() -> None:
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


@on_ranks(3, full=(1, 2, 4), sim=(2,))
def test_accumulation_with_one_reduction(replicate_size: int) -> None:
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


@on_ranks(3, full=(1, 2, 4), sim=(2,))
def test_no_sync_puts_the_flags_back() -> None:
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


@on_ranks(3, full=(1, 2, 4), sim=(2,))
def test_an_accumulation_that_is_given_up() -> None:
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


@on_ranks(3, full=(1, 2, 4), sim=(2,))
def test_replicated_gradients_are_averaged(replicate_size: int) -> None:
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


@on_ranks(3, full=(1, 2, 4), sim=(2,))
def test_a_parameter_that_some_ranks_do_not_use() -> None:
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


@on_ranks(3, full=(1, 2, 4), sim=(2,))
def test_outputs_without_tensors_warn() -> None:
    module = sharded(build(Opaque), wrap="none")
    said = r"output, a Sealed: call raysharding\.distributed\.reduce_replicated_gradients\("
    with pytest.warns(UserWarning, match=said):
        module(rows(2))
    module(rows(2))


class Scalars(nn.Module):
    """0-dim parameters of two dtypes, and one row: empty shards on all ranks but the first."""

    def __init__(self) -> None:
        super().__init__()
        self.row = nn.Parameter(torch.ones(1, 5))
        self.scale, self.idle = (nn.Parameter(torch.tensor(value)) for value in (2.0, 1.0))
        self.wide = nn.Parameter(torch.tensor(0.5, dtype=torch.float64))


@on_ranks(3, full=(2, 4))
def test_missing_gradients_count_as_zeros() -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    module = sharded(Scalars(), wrap="none")
    scale, wide, idle = module.scale, module.wide, module.idle
    if rank == 1:  # the others have no gradient: they count as zeros
        scale.grad = torch.tensor(6.0)
    wide.grad = torch.tensor(float(rank), dtype=torch.float64)
    reduce_replicated_gradients(module)
    assert scale.grad.item() == pytest.approx(6.0 / world_size)
    assert wide.grad.dtype == torch.float64
    assert wide.grad.item() == pytest.approx((world_size - 1) / 2)
    assert idle.grad is None, "a parameter without a gradient anywhere must stay without: weight decay would move it"


@on_ranks(3, full=(2, 4))
def test_norms_without_gradients() -> None:
    """No gradient on any rank, then on one rank alone: a zero norm and no deadlock."""
    module = sharded(Scalars(), wrap="none")
    assert clip_grad_norm_(module, 1.0).item() == 0.0
    assert clip_grad_norm_(module, 1.0, math.inf).item() == 0.0
    if dist.get_rank() == 1:
        weight = module.get_parameter("row")
        weight.grad = torch.zeros_like(weight)
    assert clip_grad_norm_(module, 1.0).item() == 0.0
    for bad in (-1.0, math.nan):
        with pytest.raises(ValueError, match="max_norm"):
            clip_grad_norm_(module, bad)
    for bad in (0.0, -1.0, math.nan):
        with pytest.raises(ValueError, match="norm_type"):
            clip_grad_norm_(module, 1.0, bad)


@pytest.mark.timeout(60)
def test_torch_itself_fails_on_an_empty_shard() -> None:
    """Why the function exists: rank 1 raises in torch's, rank 0 would wait for it. Ours, before it, went well."""
    with pytest.raises(RanksFailedError, match=r"(?s)rank 1 raised:.*in torch_clips_by_the_largest\n    nn\.utils"):
        run_ranks(2, torch_clips_by_the_largest, timeout_s=40)


FROZEN_ROWS = 12
SGD = partial(torch.optim.SGD, lr=0.2)


class Adapted(nn.Module):
    """A layer with a low-rank adapter."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.base = nn.Linear(6, 6, dtype=dtype)
        self.low = nn.Linear(6, 2, bias=False)
        self.high = nn.Linear(2, 6, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.base(x) + self.high(self.low(x)))


def adapted(dtype: torch.dtype = torch.float32) -> nn.Module:
    return nn.Sequential(Adapted(dtype), Adapted(dtype), nn.Linear(6, 3))


def distance(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output.float() - target).square().mean(dim=1).mean()


def vectors() -> dict[str, torch.Tensor]:
    return {"input": rows(FROZEN_ROWS, 6), "target": rows(FROZEN_ROWS, 3, seed=2)}


def tokens() -> dict[str, torch.Tensor]:
    ids = torch.randint(0, 31, (FROZEN_ROWS, 5), generator=torch.Generator().manual_seed(3))
    return {"input_ids": ids, "labels": ids}


def batch_of(data: Mapping[str, torch.Tensor]) -> RankBatch:
    return deal((), {key: Split(value) for key, value in data.items()}, dist.get_world_size())[dist.get_rank()]


def train_only(module: nn.Module, pattern: str) -> Any:
    """Freeze all parameters but those whose names match."""
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(re.search(pattern, name) is not None)
    return module


def weights(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: full(parameter).detach().clone() for name, parameter in module.named_parameters()}


Model = tuple[Callable[[], nn.Module], Callable[[], dict[str, torch.Tensor]], Callable[..., torch.Tensor] | None]
ADAPTED: Model = (adapted, vectors, distance)
LLAMA: Model = (ARCHITECTURES["llama-tied"].make, tokens, None)
SCHEDULES: list[tuple[Model, list[str]]] = [
    (ADAPTED, ["^2", "", "low|high", "^2", ""]),
    (ADAPTED, ["low|high", "base", "^0"]),
    (LLAMA, ["norm", "", "embed_tokens", "q_proj", ""]),
]


def equals_fresh_ones(model: Model, patterns: list[str], dtype: torch.dtype, num_parts: int, **fields: Any) -> None:
    """Each step equals that of a module which is sharded with the same weights and the same frozen parameters."""
    make, data, loss = model
    batch = batch_of({key: value.to(dtype) if value.is_floating_point() else value for key, value in data().items()})
    step = partial(train_step, batch=batch, loss=loss, max_grad_norm=0.7, gradient_accumulation_steps=num_parts)
    module = sharded(train_only(build(make).to(dtype), patterns[0]), **fields)
    optimizer, found = SGD(module.parameters()), weights(module)
    for pattern in patterns:
        # After an evaluation, full parameters are registered in place of the root's shards.
        train_only(module, pattern)
        fresh = build(make).to(dtype)
        fresh.load_state_dict(found, strict=False)
        fresh = sharded(train_only(fresh, pattern), **fields)
        metrics, expected = step(module, optimizer), step(fresh, SGD(fresh.parameters()))
        assert metrics == expected, (pattern, metrics, expected)
        found = weights(module)
        for name, value in weights(fresh).items():
            assert torch.equal(found[name], value), (pattern, name)
        trained = [[name for name, one in each.named_parameters() if one.grad is not None] for each in (module, fresh)]
        assert trained[0] == trained[1], pattern
        with torch.no_grad():
            module(**{key: value for key, value in batch.kwargs.items() if key != "target"})


@on_ranks(2, 3, full=(4,))
def test_others_in_another_dtype() -> None:
    """Adapters in fp32 on a base in bf16: either may be trained, but one FSDP group has one dtype of gradients."""
    fields: dict[str, Any] = {"wrap": ["Adapted"], "mixed_precision": "bf16"}
    make = partial(adapted, torch.bfloat16)
    module, batch = sharded(train_only(build(make), "low|high"), **fields), batch_of(vectors())
    optimizer = SGD(module.parameters())
    train_step(module, optimizer, batch, loss=distance)
    before = weights(module)
    train_only(module, "low|high|base")
    with torch.no_grad():
        module(batch.kwargs["input"])
    with pytest.raises(PlanError, match=r"(?s)freeze those of one dtype.*is torch\.bfloat16.*is torch\.float32"):
        train_step(module, optimizer, batch, loss=distance)
    train_only(module, "base")
    fresh = build(make)
    fresh.load_state_dict(before)
    fresh = sharded(train_only(fresh, "base"), **fields)
    for each in (module, fresh):
        train_step(each, SGD(each.parameters()), batch, loss=distance)
    found, expected = weights(module), weights(fresh)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert not torch.equal(found["0.base.weight"], before["0.base.weight"])


@on_ranks(2, 3, full=(4,))
def test_requires_grad_set_while_full_parameters_are_registered() -> None:
    """By names, on the full parameters, or by the shards that a list holds: the later one counts."""
    module, batch = sharded(build(adapted), wrap="none"), mine(rows(FROZEN_ROWS, 6))
    shards = list(module.parameters())
    for of_shards, is_trained in ((False, False), (True, True), (True, False), (False, True), (False, True)):
        with torch.no_grad():
            module(batch)
        for parameter in shards if of_shards else module.parameters():
            parameter.requires_grad_(is_trained)
        assert module(batch).requires_grad == is_trained
        module.reshard()
        assert all(parameter.requires_grad == is_trained for parameter in shards), (of_shards, is_trained)


@on_ranks(2, 3, full=(4,))
def test_freezing_and_thawing(replicate_size: int) -> None:
    low = MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16)
    fields: dict[str, Any] = {"replicate_size": replicate_size}
    for model, patterns in SCHEDULES:
        fields |= {"wrap": "auto" if model is LLAMA else ["Adapted"], "mixed_precision": "bf16"}
        equals_fresh_ones(model, patterns, torch.float32, 1, **fields)
    reduced = MixedPrecisionPolicy(reduce_dtype=torch.float32)
    for precision, dtype in ((low, torch.float32), (reduced, torch.bfloat16)):
        fields |= {"wrap": ["Adapted"], "mixed_precision": precision}
        equals_fresh_ones(ADAPTED, ["^2", ""], dtype, 2, **fields)


def test_an_optimizer_without_the_thawed_parameters() -> None:
    def made(trained: str) -> tuple[Any, torch.optim.Optimizer]:
        module = train_only(build(adapted), trained)
        return module, make_optimizer(module, SGD)

    module, optimizer = made("low|high")
    train_only(module, "")
    with pytest.warns(UserWarning, match=r"6 parameters that were frozen .*\(0\.base\.weight, .*add_param_group"):
        optimizer.step()
    module, optimizer = made("base")
    optimizer.step()
    train_only(module, "base|^2")
    optimizer.add_param_group({"params": module[2].parameters()})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.step()
