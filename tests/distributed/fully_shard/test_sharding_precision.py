"""BatchNorm under mixed precision: kept in full precision as FSDP1 keeps it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecision, MixedPrecisionPolicy

from raysharding.config import Sharding
from raysharding.distributed import clip_grad_norm_
from raysharding.models import wrap_groups
from tests.distributed.checks import on_ranks
from tests.distributed.fully_shard.sharding_models import (
    Net,
    assert_same,
    build,
    fsdp1,
    fsdp1_gradients,
    gradients,
    mine,
    rows,
    sharded,
)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)
        self.plain = nn.BatchNorm1d(8, affine=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.plain(torch.tanh(self.norm(self.line(x))))
        return out + x


class Normed(nn.Module):
    """BatchNorm inside blocks and in the root, and a buffer of its own."""

    table: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.last = nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 3)
        self.register_buffer("table", torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        out: torch.Tensor = self.head(self.last(x))
        return out


def watch(module: nn.Module) -> dict[str, list[torch.dtype]]:
    """Name → dtypes of what goes in, the weight, the statistics, and what comes out, in forward."""
    seen: dict[str, list[torch.dtype]] = {}
    for name, inner in module.named_modules():
        clean = name.replace("_fsdp_wrapped_module.", "").removesuffix("._fsdp_wrapped_module")
        if not isinstance(inner, nn.Linear | nn.BatchNorm1d):
            continue

        def before(inner: Any, args: Any, clean: str = clean) -> None:
            tensors = [args[0], inner.weight, getattr(inner, "running_mean", None)]
            seen[clean] = [tensor.dtype for tensor in tensors if tensor is not None]

        def after(inner: Any, args: Any, output: torch.Tensor, clean: str = clean) -> None:
            seen[clean].append(output.dtype)

        inner.register_forward_pre_hook(before)
        inner.register_forward_hook(after)
    return seen


@on_ranks(1, 2, full=(4,))
def test_batch_norm_as_fsdp1(replicate_size: int) -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    theirs = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    batch = rows(24, 8)
    for precision in ("bf16", policy):
        module = sharded(build(Normed), wrap=["Layer"], mixed_precision=precision, replicate_size=replicate_size)
        with pytest.warns(UserWarning, match="BatchNorm"):
            oracle = fsdp1(build(Normed), wrap=(Layer,), mixed_precision=theirs)
        seen, expected = watch(module), watch(oracle)
        for step in range(2):
            losses = [each(mine(batch) + step).float().square().mean() for each in (module, oracle)]
            assert torch.allclose(losses[0], losses[1], rtol=1e-3), losses
            for loss in losses:
                loss.backward()
        assert seen == expected, (seen, expected)
        assert seen["layers.0.norm"] == [torch.float32, torch.float32, torch.float32, torch.bfloat16]
        assert seen["layers.0.line"][:2] == [torch.bfloat16] * 2
        assert_same(gradients(module), fsdp1_gradients(oracle), rtol=2e-2, atol=2e-3)
        clean = {name.replace("_fsdp_wrapped_module.", ""): item for name, item in oracle.named_buffers()}
        for name, buffer in module.named_buffers():
            assert buffer.dtype == clean[name].dtype, name
            assert torch.allclose(buffer.float(), clean[name].float(), rtol=1e-3, atol=1e-4), name


@on_ranks(1, 2, full=(4,))
def test_checkpointing_counts_statistics_once() -> None:
    """The second forward of an activation checkpoint leaves the running statistics alone; nested groups or not."""
    batch = mine(rows(24, 8))
    for precision in (None, "bf16"):
        module = sharded(build(Normed), wrap=["Layer"], mixed_precision=precision, activation_checkpointing=True)
        twin = sharded(build(Normed), wrap=["Layer"], mixed_precision=precision)
        for each in (module, twin):
            for _ in range(2):
                each(batch).float().square().mean().backward()
        assert int(module.layers[0].norm.num_batches_tracked) == 2
        assert_same(dict(module.named_buffers()), dict(twin.named_buffers()), rtol=0, atol=0)
        assert_same(gradients(module), gradients(twin), rtol=0, atol=0)


@on_ranks(1, 2, full=(4,))
def test_low_precision_gradients_are_kept(replicate_size: int) -> None:
    """As FSDP1's `keep_low_precision_grads`, from backward to backward; a load on the way changes nothing."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    theirs = MixedPrecision(torch.bfloat16, torch.float32, keep_low_precision_grads=True)
    fields: dict[str, Any] = {"mixed_precision": policy, "keep_low_precision_grads": True}
    module, batch = sharded(build(Net), replicate_size=replicate_size, **fields), mine(rows(24))
    twin = sharded(build(Net), replicate_size=replicate_size, mixed_precision=policy)
    oracle = fsdp1(build(Net), mixed_precision=theirs)
    for _ in range(2):
        for each in (module, twin, oracle):
            each(batch).float().square().mean().backward()
        require_low_precision_gradients(module)
        if dist.get_world_size() > 1:  # with one rank FSDP1 switches to NO_SHARD, which casts them all the same
            assert {item.grad.dtype for item in oracle.parameters() if item.grad is not None} == {torch.bfloat16}
        # FSDP1 cannot summon such gradients, so the values are those without the option.
        assert_same(gradients(module), gradients(twin), rtol=1e-2, atol=1e-3)
    before = float(clip_grad_norm_(module, 0.5))
    assert float(clip_grad_norm_(module, None)) == pytest.approx(min(before, 0.5), rel=1e-2)
    torch.optim.SGD(module.parameters(), lr=0.1).step()
    module.load_state_dict(dict(module.state_dict()), assign=True)  # new parameters, without gradients
    module(batch).float().square().mean().backward()
    require_low_precision_gradients(module)


def require_low_precision_gradients(module: nn.Module) -> None:
    """In bf16, but for 0-dim parameters, which FSDP does not manage; FSDP1 refuses those."""
    found = {name: item.grad for name, item in module.named_parameters() if item.grad is not None}
    used = {name for name, item in Net().named_parameters() if item.requires_grad and not name.startswith("unused")}
    assert found.keys() == used
    assert all(grad.dtype == (torch.bfloat16 if grad.ndim else torch.float32) for grad in found.values())


@on_ranks(2)
def test_batch_norm_stored_in_low_precision() -> None:
    """Full precision is what the module is stored in."""
    module = sharded(build(Normed).to(torch.bfloat16), wrap=["Layer"], mixed_precision="fp16")
    seen = watch(module)
    module(mine(rows(24, 8))).float().square().mean().backward()
    assert seen["last"] == [torch.bfloat16, torch.bfloat16, torch.bfloat16, torch.float16]


def test_batch_norms_are_groups_only_under_mixed_precision() -> None:
    low = wrap_groups(Normed(), Sharding(wrap=["Layer"], mixed_precision="bf16"))
    assert low == (("layers.0.norm",), ("layers.1.norm",), ("layers.0",), ("layers.1",), ("last",))
    for precision in (None, MixedPrecisionPolicy(reduce_dtype=torch.float32)):
        assert wrap_groups(Normed(), Sharding(wrap="none", mixed_precision=precision)) == ()
