"""What is checked on the ranks of `test_accelerate_on_ranks.py`: the environment switch and optimizers."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate.utils.fsdp_utils import fsdp2_switch_optimizer_parameters as oracle_switch
from torch import nn
from torch.distributed.tensor import DTensor

from raysharding.config import Sharding
from raysharding.distributed import (
    disable_fsdp_ram_efficient_loading,
    enable_fsdp_ram_efficient_loading,
    fsdp2_switch_optimizer_parameters,
    init_mesh,
    shard_module,
)
from tests.spawn import device_type

LLAMA = "llama"
"""Directory of a tiny checkpoint."""


def check_ram_efficient_loading(root: Path) -> None:
    """transformers takes the switch: while it is on, only the host's first rank makes values.

    transformers 5.23 reads what the files hold on every rank, switch or not; the other ranks are spared what the
    files lack, here a new head.
    """
    from transformers import AutoModelForSequenceClassification
    from transformers.distributed.fsdp import is_fsdp_enabled

    def new_head_is_on_meta() -> bool:
        model = AutoModelForSequenceClassification.from_pretrained(root / LLAMA)
        return model.score.weight.is_meta

    kept = dict(os.environ)
    os.environ["LOCAL_RANK"] = str(dist.get_rank())
    try:
        assert not is_fsdp_enabled()
        enable_fsdp_ram_efficient_loading()
        assert is_fsdp_enabled()
        assert new_head_is_on_meta() == (dist.get_rank() != 0)
        disable_fsdp_ram_efficient_loading()
        assert not is_fsdp_enabled()
        assert os.environ["ACCELERATE_USE_FSDP"] == "True"
        assert not new_head_is_on_meta()
        os.environ["ACCELERATE_USE_FSDP"] = "false"
        enable_fsdp_ram_efficient_loading()
        assert not is_fsdp_enabled(), "what the user set stays"
    finally:
        os.environ.clear()
        os.environ.update(kept)


class Net(nn.Module):
    """Rows that the ranks do not divide, and a parameter that is not cut."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 7)
        self.second = nn.Linear(7, 3, bias=False)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.second(torch.tanh(self.first(x))) * self.scale
        return out.square().mean()


def net(seed: int = 0) -> Net:
    torch.manual_seed(seed)
    return Net()


def optimizer_of(model: nn.Module) -> torch.optim.AdamW:
    """Two groups with options of their own; the second knows its names."""
    named = dict(model.named_parameters())
    groups: list[dict[str, Any]] = [
        {"params": [("first.weight", named["first.weight"]), ("first.bias", named["first.bias"])], "lr": 0.1},
        {"params": [("second.weight", named["second.weight"]), ("scale", named["scale"])], "weight_decay": 0.3},
    ]
    return torch.optim.AdamW(groups, lr=0.02)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    """One step on rows that all ranks share."""
    optimizer.zero_grad()
    model(torch.rand(5, 4, generator=torch.Generator().manual_seed(seed))).backward()
    optimizer.step()


def full(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.detach()


def addresses(model: nn.Module) -> dict[str, int]:
    return {name: parameter.data_ptr() for name, parameter in model.named_parameters()}


def put_stand_ins(optimizer: torch.optim.Optimizer) -> None:
    """What accelerate's `_prepare_fsdp2` does before it shards: lets go of the parameters, keeps their addresses."""
    for group in optimizer.param_groups:
        for index, parameter in enumerate(group["params"]):
            group["params"][index] = torch.empty(1)
            group["params"][index].data_ptr = parameter.data_ptr()


def switched(model: nn.Module, optimizer: torch.optim.Optimizer, switch: Any, stand_ins: bool) -> None:
    before = addresses(model)
    if stand_ins:
        put_stand_ins(optimizer)
    shard_module(model, init_mesh(device_type(), SHARDING), SHARDING)
    switch(optimizer, {before[name]: parameter for name, parameter in model.named_parameters()})


SHARDING = Sharding(wrap=["Linear"])


def check_optimizer_switch(root: Path) -> None:
    """The optimizer goes on as one process would, before or after its first step, with stand-ins or without."""
    for num_before in (0, 2):
        for stand_ins in (False, True):
            reference, model = net(), net()
            expected, optimizer = optimizer_of(reference), optimizer_of(model)
            for seed in range(num_before):
                step(reference, expected, seed)
                step(model, optimizer, seed)
            switched(model, optimizer, fsdp2_switch_optimizer_parameters, stand_ins)
            names = {parameter: name for name, parameter in model.named_parameters()}
            order = [[names[parameter] for parameter in group["params"]] for group in optimizer.param_groups]
            assert order == [["first.weight", "first.bias"], ["second.weight", "scale"]]
            for key in ("lr", "weight_decay"):
                given = [[group[key] for group in each.param_groups] for each in (optimizer, expected)]
                assert given[0] == given[1]
            assert set(optimizer.state) == (set(names) if num_before else set())
            for seed in range(5, 8):
                step(reference, expected, seed)
                step(model, optimizer, seed)
            for name, parameter in model.named_parameters():
                torch.testing.assert_close(full(parameter), reference.get_parameter(name).detach(), msg=name)
                state, wanted = optimizer.state[parameter], expected.state[reference.get_parameter(name)]
                for key in ("step", "exp_avg", "exp_avg_sq"):
                    torch.testing.assert_close(full(state[key]), wanted[key], msg=f"{name} {key}")


def check_optimizer_switch_beside_accelerate(root: Path) -> None:
    """The same parameters in the same places; accelerate's takes only stand-ins, and forgets the state."""
    results = []
    for switch in (oracle_switch, fsdp2_switch_optimizer_parameters):
        model = net()
        optimizer = optimizer_of(model)
        step(model, optimizer, 0)
        switched(model, optimizer, switch, stand_ins=True)
        names = {parameter: name for name, parameter in model.named_parameters()}
        results.append([[names[parameter] for parameter in group["params"]] for group in optimizer.param_groups])
        known = sum(parameter in optimizer.state for group in optimizer.param_groups for parameter in group["params"])
        assert known == (1 if switch is oracle_switch else 4), "the 0-dim parameter is the same tensor still"
    assert results[0] == results[1]
    model = net()
    with pytest.raises(KeyError):
        switched(model, optimizer_of(model), oracle_switch, stand_ins=False)


def check_optimizer_without_partner(root: Path) -> None:
    """A KeyError that names what is missing, and an optimizer that is as it was; accelerate's is half switched."""
    for switch in (oracle_switch, fsdp2_switch_optimizer_parameters):
        model = net()
        optimizer = optimizer_of(model)
        step(model, optimizer, 0)
        before = addresses(model)
        put_stand_ins(optimizer)
        groups = [list(group["params"]) for group in optimizer.param_groups]
        states = dict(optimizer.state)
        del before["second.weight"]
        shard_module(model, init_mesh(device_type()), SHARDING)
        mapping = {address: model.get_parameter(name) for name, address in before.items()}
        with pytest.raises(KeyError) as caught:
            switch(optimizer, mapping)
        kept = [
            all(one is other for one, other in zip(group["params"], parameters, strict=True))
            for group, parameters in zip(optimizer.param_groups, groups, strict=True)
        ]
        if switch is oracle_switch:
            assert kept == [False, True], "accelerate has mended this: compare again"
            continue
        assert kept == [True, True]
        assert dict(optimizer.state) == states
        assert "second.weight (group 1, parameter 0, shape (1,))" in str(caught.value)


def check_optimizer_bad_state(root: Path) -> None:
    """State that cannot be carried over is an error before anything is switched."""
    model = net()
    optimizer = optimizer_of(model)
    step(model, optimizer, 0)
    before = addresses(model)
    put_stand_ins(optimizer)
    kept = [parameter.data for parameter in model.parameters()]  # so that no address is used again
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()  # as the cast to fp32 under mixed precision does
    shard_module(model, init_mesh(device_type()), SHARDING)
    mapping = {before[name]: parameter for name, parameter in model.named_parameters()}
    with pytest.raises(ValueError, match=r"exp_avg.*shape \(7, 4\) whose sharded partner is not known"):
        fsdp2_switch_optimizer_parameters(optimizer, mapping)
    assert not any(isinstance(item, DTensor) for group in optimizer.param_groups for item in group["params"])
    del kept
    same = torch.zeros(2, 2, requires_grad=True)
    twice = torch.optim.SGD([same, nn.Parameter(same.detach())], lr=1.0)
    with pytest.raises(KeyError, match=r"the same as another's sharded parameter"):
        fsdp2_switch_optimizer_parameters(twice, {same.data_ptr(): same})


def check_optimizer_dtype(root: Path) -> None:
    """State of a bf16 parameter follows it to fp32, and a plain parameter's is moved alike."""
    model = nn.Linear(3, 5, dtype=torch.bfloat16)
    with torch.no_grad():
        for index, parameter in enumerate(model.parameters()):
            parameter.copy_(torch.arange(parameter.numel()).view_as(parameter) + index)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0, momentum=0.5)
    model.weight.grad, model.bias.grad = model.weight.detach().clone(), model.bias.detach().clone()
    optimizer.step()
    sharded = shard_module(nn.Linear(3, 5), init_mesh(device_type()))
    mapping = {model.get_parameter(name).data_ptr(): parameter for name, parameter in sharded.named_parameters()}
    fsdp2_switch_optimizer_parameters(optimizer, mapping)
    for name, cut in sharded.named_parameters():
        buffer = optimizer.state[cut]["momentum_buffer"]
        assert buffer.dtype == torch.float32
        assert isinstance(cut, DTensor)
        assert buffer.placements == cut.placements
        assert buffer._local_tensor.shape == cut._local_tensor.shape
        assert torch.equal(buffer.full_tensor(), model.get_parameter(name).detach().float()), name
