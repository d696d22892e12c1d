"""The wrap plan: sound groups for every architecture, checked by running them under FSDP2 on a group of one rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from raysharding.config import Sharding
from raysharding.errors import PlanError
from raysharding.models import unfreed_groups, wrap_groups
from tests.models.architectures import ARCHITECTURES

# torch warns where a model's output is a view, which matters only to in-place operations on it.
pytestmark = pytest.mark.filterwarnings("ignore:FSDP2-wrapped module:UserWarning")


def shard(module: nn.Module, mesh: DeviceMesh, wrap: Any) -> nn.Module:
    """As `shard_module` does it."""
    ignored = {parameter for parameter in module.parameters() if parameter.ndim == 0}
    for names in wrap_groups(module, Sharding(wrap=wrap)):
        members = [module.get_submodule(name) for name in names]
        fully_shard(members, mesh=mesh, ignored_params=ignored)
    fully_shard(module, mesh=mesh, ignored_params=ignored)
    return module


def backward(output: torch.Tensor) -> None:
    loss: Any = output.float().square().mean()
    loss.backward()


def outputs(module: nn.Module, inputs: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    result = module(**inputs)
    return [value for value in result.to_tuple() if isinstance(value, torch.Tensor) and value.is_floating_point()]


def check_gradients(sharded: nn.Module, plain: nn.Module) -> None:
    gradients = {fqn: parameter.grad for fqn, parameter in sharded.named_parameters()}
    for fqn, parameter in plain.named_parameters():
        gradient: Any = gradients[fqn]
        assert (gradient is None) == (parameter.grad is None), fqn
        if parameter.grad is not None:
            full = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
            torch.testing.assert_close(full, parameter.grad)


@pytest.mark.parametrize("wrap", ["auto", "none"])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_sharded_forward_and_backward_equal_the_plain_model(name: str, wrap: str, mesh: DeviceMesh) -> None:
    architecture = ARCHITECTURES[name]
    plain, sharded = architecture.make(), architecture.make()
    expected = outputs(plain, architecture.inputs())
    backward(expected[0])

    shard(sharded, mesh, wrap)
    # Twice: after the first forward the groups have been gathered and freed once.
    for _ in range(2):
        found = outputs(sharded, architecture.inputs())
    backward(found[0])

    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)
    check_gradients(sharded, plain)


LAYERS = (("model.layers.0",), ("model.layers.1",))


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("llama", (*LAYERS, ("model.embed_tokens",), ("model.norm", "lm_head"))),
        ("llama-tied", LAYERS),
        ("gpt2", (("transformer.h.0",), ("transformer.h.1",))),
        ("bert", (("bert.encoder.layer.0",), ("bert.encoder.layer.1",))),
        ("mamba", (("backbone.layers.0",), ("backbone.layers.1",))),
        ("llava", tuple((f"model.language_model.{name}",) for name in ("layers.0", "layers.1", "embed_tokens"))),
    ],
)
def test_auto_follows_the_plan_then_the_class_names_then_the_lists(name: str, expected: Any) -> None:
    assert wrap_groups(ARCHITECTURES[name].make(), Sharding()) == expected


@pytest.mark.parametrize(
    ("name", "fields", "expected"),
    [
        ("llama", {}, {("model.norm", "lm_head")}),
        ("llama-tied", {}, set()),  # the root keeps it
        ("gpt2", {}, set()),
        ("llama", {"reshard_after_forward": True}, set()),
        ("llama", {"reshard_after_forward": 2}, set()),
        ("llama", {"wrap": ["LlamaDecoderLayer", "Linear"]}, set()),
    ],
)
def test_what_ends_the_forward_is_kept_for_backward_where_the_plan_says_so(
    name: str, fields: dict[str, Any], expected: Any
) -> None:
    model, sharding = ARCHITECTURES[name].make(), Sharding(**fields)
    assert unfreed_groups(model, sharding, wrap_groups(model, sharding)) == expected


def test_large_modules_kept_in_float32_get_groups_of_their_own(
    mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("raysharding.models.wrap.MAX_WHOLE_BYTES", 0)  # all count as large
    model = ARCHITECTURES["t5"].make(torch.float16)
    for fqn, parameter in model.named_parameters():
        if "wo." in fqn:
            parameter.data = parameter.data.float()
    groups = wrap_groups(model, Sharding())
    split = {name for (name,) in groups if name.endswith(".wo")}
    assert split == {name for name, _ in model.named_modules() if name.endswith(".wo")}
    position = {name: index for index, (name,) in enumerate(groups)}
    assert all(position[name] < position[name.partition(".layer.")[0]] for name in split)
    shard(model, mesh, "auto")
    backward(outputs(model, ARCHITECTURES["t5"].inputs())[0])


class Block(nn.Module):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return self.two(self.one(value))


class Pair(nn.Module):
    """Runs no forward of its own: a holder of parts."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = Block(), Block()


class Stack(nn.Module):
    blocks: Any
    pairs: Any

    def __init__(self, share: str = "") -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block() for _ in range(3)])
        self.pairs = nn.ModuleList([Pair()])
        self.attention = nn.MultiheadAttention(4, 2)
        self.head = nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.tensor(1.0))
        if share == "blocks":
            self.blocks[2].two.weight = self.blocks[0].one.weight
        elif share == "root":
            self.blocks[1].one.weight = self.head.weight
        elif share == "module":
            self.blocks[2] = self.blocks[0]

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            value = block(value)
        value, _ = self.attention(value, value, value)
        return self.head(self.pairs[0].right(self.pairs[0].left(value))) * self.scale


B0, B1, B2 = "blocks.0", "blocks.1", "blocks.2"


@pytest.mark.parametrize(
    ("share", "wrap", "expected"),
    [
        ("", "auto", ((B0,), (B1,), (B2,))),
        ("", "none", ()),
        ("blocks", "auto", ((B0, B2), (B1,))),
        ("root", "auto", ((B0,), (B2,))),
        ("module", "auto", ((B0,), (B1,))),
        ("", ["Block"], (("pairs.0.left",), ("pairs.0.right",), (B0,), (B1,), (B2,))),
        ("root", ["Block", "Linear"], None),
        ("", lambda module: isinstance(module, (Pair, nn.ModuleList, nn.MultiheadAttention)), (("attention",),)),
        ("blocks", lambda module: True, None),
    ],
)
def test_groups_of_a_plain_module(share: str, wrap: Any, expected: Any, mesh: DeviceMesh) -> None:
    torch.manual_seed(0)
    plain, sharded = Stack(share), Stack(share)
    sharded.load_state_dict(plain.state_dict())
    groups = wrap_groups(sharded, Sharding(wrap=wrap))
    if expected is not None:
        assert groups == expected
    value = torch.randn(5, 4)
    backward(plain(value))
    shard(sharded, mesh, wrap)
    for _ in range(2):
        result = sharded(value)
    torch.testing.assert_close(result, plain(value))
    backward(result)
    check_gradients(sharded, plain)


def test_size_wraps_the_innermost_modules_that_are_large_enough() -> None:
    groups = wrap_groups(Stack(), Sharding(wrap="size", min_num_params=40))
    # A block has 2 × (16 + 4) parameters; attention has 80, and its parts are not looked into.
    assert set(groups) == {(B0,), (B1,), (B2,), ("pairs.0.left",), ("pairs.0.right",), ("attention",)}
    assert wrap_groups(Stack(), Sharding(wrap="size", min_num_params=10_000)) == ()


def test_an_unknown_class_name_lists_the_classes() -> None:
    with pytest.raises(PlanError, match=r"'Layer'.*Block.*Linear"):
        wrap_groups(Stack(), Sharding(wrap=["Block", "Layer"]))


def test_parameters_that_are_not_cut_count_for_nothing() -> None:
    stack = Stack()
    groups = wrap_groups(stack, Sharding())
    for owner in (stack, stack.blocks[0]):
        owner.register_parameter("empty", nn.Parameter(torch.empty(0, 4, dtype=torch.float16)))
    stack.blocks[1].register_parameter("shared", stack.blocks[0].empty)
    stack.pairs[0].right.register_parameter("tiny", nn.Parameter(torch.empty((), dtype=torch.float16)))
    assert wrap_groups(stack, Sharding()) == groups
    hollow = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4))
    hollow[0].weight = nn.Parameter(torch.empty(0, 4))
    assert wrap_groups(hollow, Sharding(wrap=["Linear"])) == (("1",),)


def test_another_dtype_is_split_off_or_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("raysharding.models.wrap.MAX_WHOLE_BYTES", 0)  # all count as large
    stack = Stack()
    stack.blocks[1].one.double()
    # Of two equal halves the one in the wider dtype leaves.
    assert wrap_groups(stack, Sharding()) == (("blocks.1.one",), (B0,), (B1,), (B2,))
    stack.blocks[1].two.weight.data = stack.blocks[1].two.weight.data.double()
    stack.blocks[2].one.bias.data = stack.blocks[2].one.bias.data.double()
    with pytest.raises(PlanError, match=r"blocks\.[12]\.(one|two)\.\w+ is torch\.float(32|64) and blocks"):
        wrap_groups(stack, Sharding())
    for parameter in stack.parameters():
        parameter.requires_grad = parameter.dtype == torch.float32
    assert wrap_groups(stack, Sharding()) == ((B0,), (B1,), (B2,))


def test_a_module_with_modules_of_another_dtype_gets_a_group_with_theirs_beside_it() -> None:
    """A large table of its own in the wider dtype; what is called in it leaves, and the table does."""

    class Scaled(Block):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Parameter(torch.ones(1 << 16, 4, dtype=torch.float64))
            self.scale = nn.Parameter(torch.ones(4, dtype=torch.float64))

        def forward(self, value: torch.Tensor) -> torch.Tensor:
            return super().forward(value) * (self.table[:1] * self.scale).float()

    stack = Stack()
    stack.blocks[1].two = Scaled()
    stack.blocks[1].one = nn.Linear(4, 1 << 16)  # most elements of the block are of the narrow dtype
    inner = [("blocks.1.two.one",), ("blocks.1.two.two",), ("blocks.1.two",)]
    assert wrap_groups(stack, Sharding()) == (*inner, (B0,), (B1,), (B2,))
    stack.blocks[1].two.register_parameter("bias", nn.Parameter(torch.ones(4)))
    with pytest.raises(PlanError, match=r"two\.table is torch\.float64 and blocks\.1\.\S+ is torch\.float32, but"):
        wrap_groups(stack, Sharding())
