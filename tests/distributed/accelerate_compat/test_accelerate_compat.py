"""accelerate's FSDP2 functions beside accelerate's own, on the same models in the same process group."""

from __future__ import annotations

import copy
import functools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate.utils import FullyShardedDataParallelPlugin as OraclePlugin
from accelerate.utils.fsdp_utils import fsdp2_apply_ac as oracle_apply_ac
from accelerate.utils.fsdp_utils import fsdp2_prepare_auto_wrap_policy as oracle_policy
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    ActivationWrapper,
    CheckpointWrapper,
    OffloadWrapper,
)
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
from torch.distributed.fsdp.wrap import (
    CustomPolicy,
    ModuleWrapPolicy,
    _or_policy,
    always_wrap_policy,
    lambda_auto_wrap_policy,
    size_based_auto_wrap_policy,
    transformer_auto_wrap_policy,
)

from raysharding.distributed import FullyShardedDataParallelPlugin, fsdp2_apply_ac, fsdp2_prepare_auto_wrap_policy
from raysharding.errors import PlanError
from tests.models.architectures import ARCHITECTURES

PREPARES: tuple[Any, ...] = (
    (OraclePlugin, oracle_policy),
    (FullyShardedDataParallelPlugin, fsdp2_prepare_auto_wrap_policy),
)
MODELS = ("llama", "llama-tied", "gpt2", "bert", "t5", "mamba", "clip", "mixtral", "resnet")
POLICIES: tuple[dict[str, Any], ...] = (
    {"auto_wrap_policy": "transformer_based_wrap"},
    {"auto_wrap_policy": "transformer_based_wrap", "transformer_cls_names_to_wrap": ["Linear", "LayerNorm"]},
    {"auto_wrap_policy": "transformer_based_wrap", "transformer_cls_names_to_wrap": []},
    {"auto_wrap_policy": "size_based_wrap", "min_num_params": 500},
    {"auto_wrap_policy": "size_based_wrap", "min_num_params": 5000},
    {"auto_wrap_policy": "size_based_wrap", "min_num_params": 10**9},
    {"auto_wrap_policy": "size_based_wrap", "min_num_params": 0},
    {"auto_wrap_policy": "no_wrap"},
)


def accelerator_with(plugin: Any) -> Any:
    return SimpleNamespace(state=SimpleNamespace(fsdp_plugin=plugin))


def picked(model: nn.Module, policy: Any) -> set[str]:
    return {name for name, module in model.named_modules() if policy(module)}


@pytest.fixture(scope="module")
def models() -> dict[str, nn.Module]:
    return {name: ARCHITECTURES[name].make() for name in MODELS}


# --- B8: wrap policies ------------------------------------------------------------------------------------------------


@pytest.mark.timeout(60)
@pytest.mark.parametrize("is_completed", [True, False])
def test_policies_answer_as_accelerate_on_every_module(models: dict[str, nn.Module], is_completed: bool) -> None:
    num_picked = num_none = num_errors = 0
    for model in models.values():
        for arguments in POLICIES:
            answers: list[Any] = []
            for kind, prepare in PREPARES:
                plugin: Any = kind(fsdp_version=2, **arguments)
                try:
                    if is_completed:
                        plugin.set_auto_wrap_policy(model)
                    policy = prepare(plugin, model)
                    answers.append(None if policy is None else picked(model, policy))
                    # Each one's function on the other's plugin, too.
                    policy = fsdp2_prepare_auto_wrap_policy(plugin, model)
                    assert answers[-1] == (None if policy is None else picked(model, policy))
                except ValueError as error:
                    answers.append(type(error).__bases__ and "ValueError")
            assert answers[0] == answers[1], (type(model), arguments)
            num_none += answers[0] is None
            num_errors += answers[0] == "ValueError"
            num_picked += len(answers[0]) if isinstance(answers[0], set) else 0
    assert (num_picked > 200, num_none >= len(MODELS), num_errors > 2) == (True, True, True)


@pytest.mark.timeout(30)
def test_policies_look_through_checkpoint_wrappers(models: dict[str, nn.Module]) -> None:
    plugin: Any = OraclePlugin(fsdp_version=2, auto_wrap_policy="transformer_based_wrap")
    model = copy.deepcopy(models["llama"])
    plugin.set_auto_wrap_policy(model)
    fsdp2_apply_ac(accelerator_with(plugin), model)
    ours, theirs = fsdp2_prepare_auto_wrap_policy(plugin, model), oracle_policy(plugin, model)
    assert len(picked(model, ours)) == 4, "each layer and its wrapper"
    assert picked(model, ours) == picked(model, theirs)


@pytest.mark.timeout(30)
def test_a_default_that_the_model_lacks_is_passed_over() -> None:
    """LLaVA names a class of the text half of CLIP, which it is built without."""
    model = ARCHITECTURES["llava"].make()
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="transformer_based_wrap")
    with pytest.raises(ValueError, match="CLIPTextEmbeddings"):
        oracle_policy(plugin, model)
    policy = fsdp2_prepare_auto_wrap_policy(plugin, model)
    assert "model.language_model.layers.1" in picked(model, policy)


class Block(nn.Module):
    """Two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 16)
        self.drop = nn.Dropout(0.5)
        self.down = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.drop(torch.tanh(self.up(x))))


class Stack(nn.Module):
    """Blocks in a list, one of them in two places."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.again = self.blocks[0]
        self.head = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(self.again(x))


def by_predicate(module: nn.Module) -> bool:
    return isinstance(module, Block)


def by_size(module: nn.Module, recurse: bool, nonwrapped_numel: int) -> bool:
    return recurse or nonwrapped_numel > 60


def always(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear)


CALLABLES: tuple[Any, ...] = (
    by_size,
    always_wrap_policy,
    functools.partial(lambda_auto_wrap_policy, lambda_fn=by_predicate),
    functools.partial(_or_policy, policies=[functools.partial(lambda_auto_wrap_policy, lambda_fn=by_predicate)]),
    ModuleWrapPolicy({Block, nn.Linear}),
    CustomPolicy(always),
)


def fsdp1_choice(model: nn.Module, policy: Any, root: Path) -> set[str]:
    """Names of what FSDP1 wraps under a policy, the root left out."""
    import torch.distributed as dist
    from torch._C._distributed_c10d import FileStore

    store = FileStore(str(root / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    options: dict[str, Any] = {"sharding_strategy": ShardingStrategy.NO_SHARD, "device_id": torch.device("cpu")}
    try:
        wrapped = FullyShardedDataParallel(model, auto_wrap_policy=policy, **options)
        names = {
            name.replace("_fsdp_wrapped_module.", "").replace("._fsdp_wrapped_module", "")
            for name, module in wrapped.named_modules()
            if isinstance(module, FullyShardedDataParallel)
        }
    finally:
        dist.destroy_process_group()
    return names - {""}


@pytest.mark.timeout(60)
@pytest.mark.filterwarnings("ignore:FSDP will not all-gather parameters for containers")
@pytest.mark.parametrize("index", range(len(CALLABLES)))
def test_other_policies_pick_what_fsdp1_wraps(index: int, tmp_path: Path) -> None:
    policy = CALLABLES[index]
    model = Stack()
    del model.again  # FSDP1 would wrap it a second time
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy=policy)
    assert oracle_policy(plugin, model) is None, "accelerate has learnt this: compare again"
    found = fsdp2_prepare_auto_wrap_policy(plugin, model)
    expected = fsdp1_choice(copy.deepcopy(model), policy, tmp_path)
    assert len(expected) >= 3
    assert picked(model, found) - {""} == expected


@pytest.mark.timeout(30)
def test_predicates_partials_and_ignored_modules() -> None:
    model = Stack()
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy=by_predicate)
    assert picked(model, fsdp2_prepare_auto_wrap_policy(plugin, model)) == {"blocks.0", "blocks.1", "blocks.2"}
    plugin.ignored_modules = r"blocks\.[12]"
    assert picked(model, fsdp2_prepare_auto_wrap_policy(plugin, model)) == {"blocks.0"}
    # What a user's own partial says counts, where accelerate looks at the plugin's other fields only.
    classes = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={Block})
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy=classes)
    assert picked(model, fsdp2_prepare_auto_wrap_policy(plugin, model)) == {"blocks.0", "blocks.1", "blocks.2"}
    assert picked(model, oracle_policy(plugin, model)) == set(), "accelerate has learnt this: compare again"
    size = functools.partial(size_based_auto_wrap_policy, min_num_params=100)
    found = fsdp2_prepare_auto_wrap_policy(FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy=size), model)
    assert picked(model, found) == {"", "blocks", "blocks.0", "blocks.1", "blocks.2"}
    options = CustomPolicy(lambda module: {"sharding_strategy": 1} if isinstance(module, Block) else False)
    with pytest.warns(UserWarning, match="options of their own"):
        fsdp2_prepare_auto_wrap_policy(FullyShardedDataParallelPlugin(auto_wrap_policy=options), model)


# --- B9: activation checkpointing -------------------------------------------------------------------------------------


def wrapped_names(model: nn.Module, kind: type[nn.Module]) -> list[str]:
    """Clean names of what a wrapper class holds; lists left out, which accelerate wraps although nobody calls them."""
    found = []
    for name, module in model.named_modules():
        inner = module
        while isinstance(inner, ActivationWrapper):
            inner = inner._checkpoint_wrapped_module
        if isinstance(module, kind) and not isinstance(inner, nn.ModuleList):
            found.append(name.replace("._checkpoint_wrapped_module", ""))
    return sorted(found)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("offload", [False, True])
def test_the_same_modules_are_checkpointed(models: dict[str, nn.Module], offload: bool) -> None:
    num_wrapped = 0
    for name in ("llama", "gpt2", "bert", "t5", "mamba"):
        for arguments in (POLICIES[0], POLICIES[3]):
            found = []
            for kind, apply in ((OraclePlugin, oracle_apply_ac), (FullyShardedDataParallelPlugin, fsdp2_apply_ac)):
                model = copy.deepcopy(models[name])
                options = arguments | {"activation_checkpointing_offload": offload}
                plugin: Any = kind(fsdp_version=2, activation_checkpointing=True, **options)
                plugin.set_auto_wrap_policy(model)
                assert apply(accelerator_with(plugin), model) is model
                found.append([wrapped_names(model, wrapper) for wrapper in (CheckpointWrapper, OffloadWrapper)])
                assert set(model.state_dict()) == set(models[name].state_dict())
            if offload:
                # accelerate's goes from an offload wrapper to the checkpoint wrapper inside it: one name, clean.
                assert found[1][0] == found[1][1]
            assert found[0] == found[1], (name, arguments)
            num_wrapped += len(found[1][0])
    assert num_wrapped > 80


def gradients(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    model.zero_grad()
    torch.manual_seed(7)
    model(x).square().sum().backward()
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


@pytest.mark.timeout(30)
@pytest.mark.parametrize("offload", [False, True])
def test_checkpointed_gradients_with_dropout(offload: bool) -> None:
    """The second forward drops what the first one dropped; in accelerate's it drops something else."""
    torch.manual_seed(0)
    model, x = Stack(), torch.rand(6, 4)
    plain = gradients(model, x)
    arguments: dict[str, Any] = {"auto_wrap_policy": "transformer_based_wrap", "activation_checkpointing": True}
    arguments |= {"transformer_cls_names_to_wrap": ["Block"], "activation_checkpointing_offload": offload}
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, **arguments)
    theirs = copy.deepcopy(model)
    del theirs.again  # it would be wrapped twice
    theirs.again = theirs.blocks[0]
    oracle_apply_ac(accelerator_with(plugin), theirs)
    fsdp2_apply_ac(accelerator_with(plugin), model)
    assert model.again is model.blocks[0]
    for _ in range(2):
        assert all(map(torch.equal, gradients(model, x), plain))
        fsdp2_apply_ac(accelerator_with(plugin), model)  # wraps nothing twice
    assert wrapped_names(model, CheckpointWrapper) == ["blocks.0", "blocks.1", "blocks.2"]
    assert not all(map(torch.allclose, gradients(theirs, x), plain)), "accelerate has mended this: compare again"


@pytest.mark.timeout(30)
def test_checkpointing_without_a_policy() -> None:
    accelerator = accelerator_with(FullyShardedDataParallelPlugin(fsdp_version=2, activation_checkpointing=True))
    with pytest.raises(TypeError):
        oracle_apply_ac(accelerator, Stack())
    with pytest.raises(PlanError, match="set auto_wrap_policy"):
        fsdp2_apply_ac(accelerator, Stack())
