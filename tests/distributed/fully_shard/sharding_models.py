"""Small models for the tests of `Sharding`, and FSDP1 as the oracle."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, ShardingStrategy
from torch.distributed.fsdp._common_utils import clean_tensor_name
from torch.distributed.fsdp.wrap import ModuleWrapPolicy, lambda_auto_wrap_policy
from torch.distributed.tensor import DTensor

from raysharding.config import Sharding
from raysharding.distributed import init_mesh, shard_module
from raysharding.distributed.comm.json_collectives import all_gather_json
from tests.distributed.models import Odd, filled
from tests.spawn import device_type


class Block(nn.Module):
    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width + 1)
        self.down = nn.Linear(2 * width + 1, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Net(nn.Module):
    """Odd row counts, a parameter of one row (empty shards), a frozen one, an unused one, and a 0-dim one."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(4, 6)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.few = nn.Parameter(torch.ones(1, 6))
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.unused = nn.Linear(3, 3)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.head = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x) * self.few
        for block in self.blocks:
            x = block(x)
        return self.head(self.frozen(x)) * self.scale


def build(make: Callable[[], nn.Module] = Net, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return make()


def rows(num_rows: int, width: int = 4, seed: int = 1) -> torch.Tensor:
    return torch.randn(num_rows, width, generator=torch.Generator().manual_seed(seed))


def mine(batch: torch.Tensor) -> torch.Tensor:
    """This rank's rows; as many on each rank."""
    return batch.chunk(dist.get_world_size())[dist.get_rank()]


def meshes(*, all_of_them: bool = False) -> list[int]:
    """Sizes of the replicate axis to test: HSDP where the ranks make 2x2, 1-D elsewhere, or there too."""
    return ([1, 2] if all_of_them else [2]) if dist.get_world_size() == 4 else [1]


def sharded(module: nn.Module, sharding: Sharding | None = None, **fields: Any) -> Any:
    sharding = sharding or Sharding(**{"wrap": ["Block"], **fields})
    return shard_module(copy.deepcopy(module), init_mesh(device_type(), sharding), sharding)


def fsdp1(module: nn.Module, wrap: Iterable[type[nn.Module]] = (Block,), **overrides: Any) -> Any:
    """The same module under FSDP1, on gloo; 0-dim parameters, which it refuses, are 1-dim there."""
    module = copy.deepcopy(module)
    for inner in module.modules():
        for name, item in inner.named_parameters(recurse=False):
            if item.ndim == 0:
                setattr(inner, name, nn.Parameter(item.detach().reshape(1)))
    options: dict[str, Any] = {"sharding_strategy": ShardingStrategy.FULL_SHARD, "use_orig_params": True}
    options |= {"auto_wrap_policy": ModuleWrapPolicy(set(wrap)), "device_id": torch.device("cpu"), **overrides}
    return FullyShardedDataParallel(module, **options)


def full(tensor: torch.Tensor) -> torch.Tensor:
    """The full tensor, in host memory."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.detach().clone()).cpu()


def gradients(module: nn.Module) -> dict[str, torch.Tensor]:
    """FQN → full gradient of one that is sharded by us, or of a plain module."""
    return {name: full(item.grad) for name, item in module.named_parameters() if item.grad is not None}


def fsdp1_gradients(module: Any) -> dict[str, torch.Tensor]:
    with FullyShardedDataParallel.summon_full_params(module, with_grads=True):
        return {name: item.grad.clone() for name, item in theirs_named(module).items() if item.grad is not None}


def assert_same(
    mine: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor], rtol: float = 1e-5, atol: float = 1e-6
) -> None:
    """Equal values; a missing gradient and zeros are the same. FSDP1 gives a 0-dim gradient one dim."""
    for name in mine.keys() | theirs.keys():
        one, other = mine.get(name), theirs.get(name)
        if one is None or other is None:
            left = one if one is not None else other
            assert left is not None
            assert not left.any(), name
            continue
        same = torch.allclose(one.float(), other.float().view_as(one), rtol, atol, equal_nan=True)
        assert same, f"{name}: {one} against {other}"


IDS = torch.arange(24).view(6, 4)
"""Token ids."""


def shardings() -> list[Sharding]:
    """1-D in full and in low precision, and HSDP where the ranks make it."""
    replicas = [Sharding(replicate_size=2)] if dist.get_world_size() == 4 else []
    return [Sharding(), Sharding(mixed_precision="bf16"), *replicas]


def ours(sharding: Sharding | None = None, seed: int = 0) -> Any:
    """`filled(seed)`, sharded; the root and each block are groups."""
    sharding = sharding or Sharding()
    return shard_module(filled(seed), init_mesh(device_type(), sharding), sharding)


def theirs(sharding: Sharding | None = None, seed: int = 0) -> Any:
    """The same under FSDP1, which refuses 0-dim parameters: there `scale` has one element."""
    sharding = sharding or Sharding()

    def is_block(module: nn.Module) -> bool:
        return isinstance(module, nn.Linear) and module.bias is not None

    options: dict[str, Any] = {"auto_wrap_policy": partial(lambda_auto_wrap_policy, lambda_fn=is_block)}
    if sharding.replicate_size > 1:
        options["device_mesh"] = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        options["sharding_strategy"] = ShardingStrategy.HYBRID_SHARD
    if sharding.mixed_precision:
        options["mixed_precision"] = MixedPrecision(torch.bfloat16, torch.float32, cast_forward_inputs=True)
    return fsdp1(filled(seed), **options)


def theirs_named(module: nn.Module) -> dict[str, nn.Parameter]:
    """Clean FQN → parameter of an FSDP1 module."""
    return {clean_tensor_name(name): parameter for name, parameter in module.named_parameters()}


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Equal, on whatever devices, whether a scalar has 0 dims or 1."""
    return one.dtype == other.dtype and torch.equal(one.cpu().reshape(other.shape), other.cpu())


def own_rows() -> torch.Tensor:
    """Other rows on every rank."""
    return IDS[dist.get_rank() :][:2]


def outcomes(fn: Callable[[], object]) -> list[str]:
    """Run `fn` on every rank; rank → what it raised, as type and message, or an empty string."""
    try:
        fn()
        outcome = ""
    except Exception as error:
        outcome = f"{type(error).__name__}: {error}"
    return all_gather_json(outcome)


def bump(module: nn.Module, by: float = 1.0) -> None:
    """Change every parameter, each row by another amount."""
    with torch.no_grad():
        for parameter in module.parameters():
            rows = torch.arange(float(parameter.numel()), device=parameter.device)
            parameter.add_(rows.reshape(parameter.shape).mul_(1e-3).add_(by))


def bumped(by: float = 1.0, seed: int = 0) -> Odd:
    """What a single process has after `bump`."""
    model = filled(seed)
    bump(model, by)
    return model
