"""The wrap plan: sound groups for every architecture, checked by running them under FSDP2 on a group of one rank."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

from raysharding.config import Sharding
from raysharding.errors import PlanError
from raysharding.models import wrap_groups
from tests.models.architectures import ARCHITECTURES

# torch warns where a model's output is a view, which matters only to in-place operations on it.
pytestmark = pytest.mark.filterwarnings("ignore:FSDP2-wrapped module:UserWarning")


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def shard(module: nn.Module, mesh: DeviceMesh, wrap: Any) -> nn.Module:
    """As `shard_module` does it."""
    ignored = {parameter for parameter in module.parameters() if parameter.ndim == 0}
    for names in wrap_groups(module, Sharding(wrap=wrap)):
        members = [module.get_submodule(name) for name in names]
        fully_shard(members, mesh=mesh, ignored_params=ignored)
    return fully_shard(module, mesh=mesh, ignored_params=ignored)


def outputs(module: nn.Module, inputs: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    result = module(**inputs)
    return [value for value in result.to_tuple() if isinstance(value, torch.Tensor) and value.is_floating_point()]


@pytest.mark.parametrize("wrap", ["auto", "none"])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_sharded_forward_and_backward_equal_the_plain_model(name: str, wrap: str, mesh: DeviceMesh) -> None:
    architecture = ARCHITECTURES[name]
    plain, sharded = architecture.make(), architecture.make()
    expected = outputs(plain, architecture.inputs())
    expected[0].float().square().mean().backward()

    shard(sharded, mesh, wrap)
    # Twice: after the first forward the groups have been gathered and freed once.
    for _ in range(2):
        found = outputs(sharded, architecture.inputs())
    found[0].float().square().mean().backward()

    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)
    gradients = {fqn: parameter.grad for fqn, parameter in sharded.named_parameters()}
    for fqn, parameter in plain.named_parameters():
        gradient: Any = gradients[fqn]
        assert (gradient is None) == (parameter.grad is None), fqn
        if parameter.grad is not None:
            full = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
            torch.testing.assert_close(full, parameter.grad)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_block_is_a_group(name: str) -> None:
    model = ARCHITECTURES[name].make()
    groups = wrap_groups(model, Sharding())
    print(name, groups)
    assert groups
