"""`FullyShardedDataParallelPlugin` beside accelerate's: equal attributes from equal arguments and environments."""

from __future__ import annotations

import dataclasses
import functools
import os
import pickle
import warnings
from collections.abc import Iterator, Mapping
from itertools import product
from typing import Any

import accelerate.utils.dataclasses as oracle
import pytest
import torch
from accelerate.utils import FullyShardedDataParallelPlugin as OraclePlugin
from torch import nn
from torch.distributed.fsdp import (
    BackwardPrefetch,
    CPUOffload,
    CPUOffloadPolicy,
    FullStateDictConfig,
    MixedPrecision,
    MixedPrecisionPolicy,
    OffloadPolicy,
    ShardedStateDictConfig,
    ShardingStrategy,
    StateDictType,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy, size_based_auto_wrap_policy, transformer_auto_wrap_policy

from raysharding.config import Sharding
from raysharding.distributed import FullyShardedDataParallelPlugin
from raysharding.distributed.accelerate_compat import sharding as accelerate_sharding
from raysharding.distributed.fully_shard import module_hooks

pytestmark = pytest.mark.timeout(60)

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
VALUES: dict[str, tuple[Any, ...]] = {
    "sharding_strategy": (
        *("FULL_SHARD", "shard_grad_op", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2", "3", "9", "", "FULL"),
        ShardingStrategy.SHARD_GRAD_OP,
    ),
    "reshard_after_forward": (
        *(True, False, "true", "False", "no", "1", "maybe", "FULL_SHARD", "hybrid_shard_zero2", "2", 2, 1.5),
        ShardingStrategy.NO_SHARD,
    ),
    "backward_prefetch": (
        *("BACKWARD_PRE", "backward_post", "NO_PREFETCH", "no_prefetch", "1", "2", "3", 1, 2, 7, "later"),
        BackwardPrefetch.BACKWARD_POST,
    ),
    "mixed_precision_policy": (
        *("fp8", "fp16", "bf16", "fp32", "no", "bf17"),
        MixedPrecision(param_dtype=BF16),
        MixedPrecisionPolicy(param_dtype=FP16),
        {"param_dtype": BF16, "reduce_dtype": FP32, "buffer_dtype": FP32},
        {"param_dtype": BF16, "reduce_dtype": FP32, "output_dtype": FP16},
        {"param_dtype": BF16, "reduce_dtype": FP32},
        {"param_dtype": BF16, "reduce_dtype": FP32, "buffer_dtype": torch.int8},
        {"param_dtype": BF16, "reduce_dtype": FP32, "output_dtype": None},
        {},
    ),
    "auto_wrap_policy": (
        *("transformer_based_wrap", "SIZE_BASED_WRAP", "no_wrap", "NO_WRAP", "wrap_it", ""),
        transformer_auto_wrap_policy,
        size_based_auto_wrap_policy,
        ModuleWrapPolicy({nn.Linear}),
    ),
    "cpu_offload": (True, False, CPUOffload(True), CPUOffloadPolicy(), OffloadPolicy(), "yes", 1),
    "ignored_modules": ((), "decoder.*", [nn.Linear(1, 1)]),
    "state_dict_type": (
        *("full_state_dict", "SHARDED_STATE_DICT", "LOCAL_STATE_DICT", "1", "2", "3", "8", "half"),
        *StateDictType,
    ),
    "limit_all_gathers": (True, False),
    "use_orig_params": (True, False),
    "sync_module_states": (False,),
    "forward_prefetch": (True, False),
    "activation_checkpointing": (True, False),
    "activation_checkpointing_offload": (True, False),
    "cpu_ram_efficient_loading": (False,),
    "transformer_cls_names_to_wrap": ([], ["A", "B"]),
    "min_num_params": (0, 7, 1e3, "12"),
}
"""Field → values, good and bad. Where the two differ on purpose is in tests of its own."""

PAIRS: tuple[dict[str, Any], ...] = (
    {"auto_wrap_policy": "transformer_based_wrap", "transformer_cls_names_to_wrap": "A,B"},
    {"auto_wrap_policy": "transformer_based_wrap", "transformer_cls_names_to_wrap": ["A"], "min_num_params": 1.5},
    {"auto_wrap_policy": "size_based_wrap", "min_num_params": 7},
    {"auto_wrap_policy": "size_based_wrap", "min_num_params": "7"},
    {"sharding_strategy": "FULL_SHARD", "reshard_after_forward": False},
    {"sharding_strategy": "NO_SHARD", "reshard_after_forward": "NO_SHARD"},
    {"activation_checkpointing": True, "activation_checkpointing_offload": True},
    {"state_dict_type": "FULL_STATE_DICT", "state_dict_config": FullStateDictConfig(rank0_only=True)},
    {"state_dict_type": "SHARDED_STATE_DICT", "state_dict_config": ShardedStateDictConfig()},
    {"sync_module_states": False, "param_init_fn": nn.Identity},
)

ENVIRONMENTS: tuple[dict[str, str], ...] = (
    {},
    {"VERSION": "2"},
    {"VERSION": "1"},
    {"VERSION": "two"},
    *({"SHARDING_STRATEGY": value} for value in ("SHARD_GRAD_OP", "2", "5", "HYBRID_SHARD_ZERO2", "nothing")),
    *({"RESHARD_AFTER_FORWARD": value} for value in ("false", "TRUE", "0", "SHARD_GRAD_OP")),
    *({"OFFLOAD_PARAMS": value} for value in ("true", "0", "Y", "perhaps", "")),
    *({"BACKWARD_PREFETCH": value} for value in ("BACKWARD_PRE", "NO_PREFETCH", "2", "none")),
    *({"STATE_DICT_TYPE": value} for value in ("SHARDED_STATE_DICT", "full_state_dict", "LOCAL_STATE_DICT", "1", "x")),
    {"AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP"},
    {"AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP", "TRANSFORMER_CLS_TO_WRAP": "A"},
    {"AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP", "TRANSFORMER_CLS_TO_WRAP": "A,B"},
    {"AUTO_WRAP_POLICY": "SIZE_BASED_WRAP"},
    {"AUTO_WRAP_POLICY": "SIZE_BASED_WRAP", "MIN_NUM_PARAMS": "2000"},
    {"AUTO_WRAP_POLICY": "SIZE_BASED_WRAP", "MIN_NUM_PARAMS": "many"},
    {"AUTO_WRAP_POLICY": "SOME_WRAP"},
    *({"USE_ORIG_PARAMS": value} for value in ("true", "false", "?")),
    {"SYNC_MODULE_STATES": "false"},
    *({"FORWARD_PREFETCH": value} for value in ("true", "?")),
    *({"ACTIVATION_CHECKPOINTING": value} for value in ("true", "on", "?")),
    {"ACTIVATION_CHECKPOINTING_OFFLOAD": "true"},
    {"ACTIVATION_CHECKPOINTING": "1", "ACTIVATION_CHECKPOINTING_OFFLOAD": "true"},
    {"IGNORED_MODULES": "head"},
    {"CPU_RAM_EFFICIENT_LOADING": "false"},
    {"CPU_RAM_EFFICIENT_LOADING": "?"},
)


@pytest.fixture(autouse=True)
def environment() -> Iterator[None]:
    """No `FSDP_` variable at the start, and all of them as before at the end."""
    kept = dict(os.environ)
    for name in [name for name in os.environ if name.startswith("FSDP_") or name == "ACCELERATE_USE_FSDP"]:
        del os.environ[name]
    yield
    os.environ.clear()
    os.environ.update(kept)


def plain(value: Any) -> Any:
    """A value that compares by what it says."""
    if isinstance(value, functools.partial):
        return value.func, value.keywords
    return value


def made(kind: Any, arguments: Mapping[str, Any], variables: Mapping[str, str]) -> dict[str, Any] | Exception:
    """Attributes of a plugin and what it left in the environment, or what it raised."""
    kept = dict(os.environ)
    os.environ.update({f"FSDP_{name}": value for name, value in variables.items()})
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            plugin = kind(**arguments)
        attributes = {field.name: plain(getattr(plugin, field.name)) for field in dataclasses.fields(plugin)}
        return attributes | {"environment": {name: value for name, value in os.environ.items() if "FSDP" in name}}
    except Exception as error:
        return error
    finally:
        os.environ.clear()
        os.environ.update(kept)


def assert_alike(arguments: Mapping[str, Any], variables: Mapping[str, str]) -> bool:
    """Compare the two plugins; whether both were made."""
    expected, found = (
        made(OraclePlugin, arguments, variables),
        made(FullyShardedDataParallelPlugin, arguments, variables),
    )
    case = arguments, variables, expected, found
    if isinstance(expected, Exception):
        assert type(found).__name__ == "ValueError", case  # where accelerate has KeyError and others, too
        return False
    assert found == expected, case
    return True


def test_the_same_fields() -> None:
    expected = [(field.name, field.default) for field in dataclasses.fields(OraclePlugin)]
    found = [(field.name, field.default) for field in dataclasses.fields(FullyShardedDataParallelPlugin)]
    assert found == expected


@pytest.mark.parametrize("version", [1, 2, None])
def test_one_argument_at_a_time(version: int | None) -> None:
    cases = [{name: value} for name, values in VALUES.items() for value in values]
    outcomes = [
        assert_alike({"fsdp_version": version, **case}, {})
        for case in [*cases, *PAIRS]
        if not is_better_here(version or 1, case)
    ]
    assert outcomes.count(True) >= 50
    assert outcomes.count(False) >= 20


def is_better_here(version: int, case: Mapping[str, Any]) -> bool:
    """Cases in which accelerate takes a mistake for good, or a good value badly; see the tests below."""
    return version == 1 and (
        case.get("reshard_after_forward") in (2, 1.5) and isinstance(case["reshard_after_forward"], (int, float))
    )


@pytest.mark.parametrize("version", [1, 2, None])
def test_environments(version: int | None) -> None:
    outcomes = [assert_alike({"fsdp_version": version}, variables) for variables in ENVIRONMENTS]
    assert outcomes.count(True) >= 20
    assert outcomes.count(False) >= 7


def test_arguments_win_over_the_environment() -> None:
    chosen = [variables for variables in ENVIRONMENTS if len(variables) == 1]
    arguments: list[dict[str, Any]] = [
        {"sharding_strategy": "NO_SHARD", "fsdp_version": 1},
        {"reshard_after_forward": "SHARD_GRAD_OP", "fsdp_version": 1},
        {"reshard_after_forward": False, "fsdp_version": 2},
        {"cpu_offload": False, "activation_checkpointing": False},
        {"auto_wrap_policy": "size_based_wrap", "min_num_params": 5},
        {"auto_wrap_policy": "transformer_based_wrap", "transformer_cls_names_to_wrap": ["C"]},
        {"state_dict_type": "FULL_STATE_DICT", "backward_prefetch": "BACKWARD_POST"},
        {"use_orig_params": True, "cpu_ram_efficient_loading": False},
    ]
    outcomes = [assert_alike(given, variables) for given, variables in product(arguments, chosen)]
    assert outcomes.count(True) >= 150


def test_positional_order() -> None:
    values = (1, "NO_SHARD", None, "BACKWARD_PRE", "bf16", "no_wrap", False, "x", "FULL_STATE_DICT")
    expected, found = OraclePlugin(*values), FullyShardedDataParallelPlugin(*values)
    for field in dataclasses.fields(OraclePlugin):
        assert getattr(found, field.name) == getattr(expected, field.name), field.name


def test_ram_efficient_loading_with_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """accelerate finds no device here: shown one, its attributes are ours but for the function."""
    monkeypatch.setattr(oracle, "is_cuda_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    for version, given in product((1, 2), ({"cpu_ram_efficient_loading": True}, {"sync_module_states": True})):
        arguments: dict[str, Any] = {"fsdp_version": version, **given}
        expected, found = made(OraclePlugin, arguments, {}), made(FullyShardedDataParallelPlugin, arguments, {})
        assert isinstance(expected, dict)
        assert isinstance(found, dict)
        functions = expected.pop("param_init_fn"), found.pop("param_init_fn")
        assert found == expected
        assert [function is not None for function in functions] == [version == 1] * 2
    expected = made(OraclePlugin, {"fsdp_version": 1}, {"CPU_RAM_EFFICIENT_LOADING": "true"})
    found = made(FullyShardedDataParallelPlugin, {"fsdp_version": 1}, {"CPU_RAM_EFFICIENT_LOADING": "true"})
    assert isinstance(expected, dict)
    assert isinstance(found, dict)
    assert (found["sync_module_states"], found["environment"]) == (True, expected["environment"])


# --- better than accelerate -------------------------------------------------------------------------------------------


def test_sync_module_states_without_a_gpu() -> None:
    with pytest.raises(RuntimeError, match="no available devices"):
        OraclePlugin(sync_module_states=True)
    plugin = FullyShardedDataParallelPlugin(sync_module_states=True)
    assert plugin.param_init_fn is not None
    with torch.device("meta"):
        module = nn.Linear(2, 3)
    plugin.param_init_fn(module)
    assert not module.weight.is_meta


def test_own_param_init_fn_is_kept() -> None:
    own = nn.Module.half
    assert FullyShardedDataParallelPlugin(sync_module_states=True, param_init_fn=own).param_init_fn is own


def test_numbers_are_taken_for_enums() -> None:
    plugin = FullyShardedDataParallelPlugin(sharding_strategy=2, reshard_after_forward=2)
    assert plugin.sharding_strategy is plugin.reshard_after_forward is ShardingStrategy.SHARD_GRAD_OP
    with pytest.raises(ValueError, match=r"reshard_after_forward=1\.5: use one of FULL_SHARD"):
        FullyShardedDataParallelPlugin(reshard_after_forward=1.5)  # type: ignore[arg-type]


def test_blanks_around_class_names() -> None:
    plugin = FullyShardedDataParallelPlugin(
        auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap="A , B,"
    )
    assert plugin.transformer_cls_names_to_wrap == ["A", "B"]


def test_state_dict_type_takes_its_configurations_along() -> None:
    arguments: dict[str, Any] = {"fsdp_version": 2, "state_dict_type": "SHARDED_STATE_DICT"}
    before, plugin = OraclePlugin(**arguments), FullyShardedDataParallelPlugin(**arguments)
    before.set_state_dict_type("FULL_STATE_DICT")
    plugin.set_state_dict_type("FULL_STATE_DICT")
    assert isinstance(before.state_dict_config, ShardedStateDictConfig), "accelerate has mended this: compare again"
    fresh = OraclePlugin(fsdp_version=2, state_dict_type="FULL_STATE_DICT")
    assert plugin.state_dict_config == fresh.state_dict_config
    assert plugin.optim_state_dict_config == fresh.optim_state_dict_config
    with pytest.raises(ValueError, match="ShardedStateDictConfig does not belong"):
        FullyShardedDataParallelPlugin(state_dict_type="FULL_STATE_DICT", state_dict_config=ShardedStateDictConfig())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"fsdp_version": 3}, "fsdp_version=3: use 1 or 2"),
        ({"sharding_strategy": "FULL"}, "sharding_strategy='FULL': use one of FULL_SHARD, .*HYBRID_SHARD_ZERO2"),
        ({"fsdp_version": 2, "sharding_strategy": "FULL_SHARD"}, "takes True .FULL_SHARD. or False"),
        ({"fsdp_version": 2, "forward_prefetch": True}, "forward_prefetch=True: .*Sharding.forward_prefetch"),
        ({"fsdp_version": 2, "state_dict_type": "LOCAL_STATE_DICT"}, "FSDP2 has FULL_STATE_DICT"),
        ({"mixed_precision_policy": {"param_dtype": 1}}, "wrong param_dtype=1; missing reduce_dtype, buffer_dtype"),
        ({"auto_wrap_policy": 5}, "auto_wrap_policy=5"),
    ],
)
def test_errors_name_the_cure(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        FullyShardedDataParallelPlugin(**arguments)


def test_one_warning_lists_what_fsdp2_has_no_use_for() -> None:
    arguments: dict[str, Any] = {
        "reshard_after_forward": True,
        "sharding_strategy": "FULL_SHARD",
        "backward_prefetch": "BACKWARD_PRE",
        "use_orig_params": True,
        "sync_module_states": True,
        "limit_all_gathers": False,
    }
    with pytest.warns(UserWarning, match="of no meaning in FSDP2") as caught:
        FullyShardedDataParallelPlugin(fsdp_version=2, **arguments)
    assert len(caught) == 1
    assert caught[0].filename == __file__
    for name in set(arguments) - {"reshard_after_forward"}:
        assert f"{name}=" in str(caught[0].message)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        FullyShardedDataParallelPlugin(fsdp_version=2)
        FullyShardedDataParallelPlugin()


# --- methods ----------------------------------------------------------------------------------------------------------


class Block(nn.Linear):
    """Named in `_no_split_modules`."""


class Model(nn.Module):
    """Two kinds of blocks."""

    _no_split_modules = ("Block",)

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(2, 2), Block(2, 2)])
        self.head = nn.Linear(2, 2)


def test_set_auto_wrap_policy() -> None:
    transformer: dict[str, Any] = {"auto_wrap_policy": "transformer_based_wrap"}
    cases: tuple[dict[str, Any], ...] = (
        {},
        transformer,
        transformer | {"transformer_cls_names_to_wrap": ["Linear"]},
        transformer | {"transformer_cls_names_to_wrap": ["Linear", "Block"]},
        transformer | {"transformer_cls_names_to_wrap": []},
        transformer | {"transformer_cls_names_to_wrap": ["Missing"]},
        {"auto_wrap_policy": "size_based_wrap", "min_num_params": 6},
        {"auto_wrap_policy": "size_based_wrap", "min_num_params": 0},
        {"auto_wrap_policy": nn.Identity},
    )
    for model, case, version in product((Model(), nn.Linear(1, 1)), cases, (1, 2)):
        results: list[Any] = []
        for kind in (OraclePlugin, FullyShardedDataParallelPlugin):
            plugin: Any = kind(fsdp_version=version, **case)
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    plugin.set_auto_wrap_policy(model)
                    plugin.set_auto_wrap_policy(model)
                results.append((plain(plugin.auto_wrap_policy), plugin.transformer_cls_names_to_wrap))
            except ValueError as error:
                results.append("Missing" in str(error) or "Linear" in str(error) or "Block" in str(error))
        assert results[0] == results[1], (case, results)
    with pytest.warns(UserWarning, match="min_num_params=0 wraps nothing"):
        FullyShardedDataParallelPlugin(auto_wrap_policy="size_based_wrap").set_auto_wrap_policy(Model())


def test_set_mixed_precision() -> None:
    given: tuple[Any, ...] = ("fp8", "fp16", "bf16", "fp32", "no", BF16, FP16, FP32, torch.int8, torch.float64)
    first: tuple[Any, ...] = (None, "bf16")
    seen = 0
    for precision, buffers, override, version, start in product(
        given, (True, False), (True, False), (1, 2), (*first, {"param_dtype": BF16, "reduce_dtype": BF16})
    ):
        results: list[Any] = []
        for kind in (OraclePlugin, FullyShardedDataParallelPlugin):
            plugin: Any = kind(fsdp_version=version, mixed_precision_policy=None if isinstance(start, dict) else start)
            if isinstance(start, dict):
                last = "buffer_dtype" if version == 1 else "output_dtype"
                plugin.mixed_precision_policy = start | {last: FP16}
            try:
                plugin.set_mixed_precision(precision, buffer_autocast=buffers, override=override)
                results.append(plugin.mixed_precision_policy)
            except ValueError:
                results.append(ValueError)
        assert results[0] == results[1], (precision, buffers, override, version, start, results)
        seen += results[0] is not ValueError
    assert seen == 7 * 2 * 2 * 2 * 3


def test_set_state_dict_type() -> None:
    for value, version in product((None, "FULL_STATE_DICT", "1", StateDictType.FULL_STATE_DICT), (1,)):
        expected, found = OraclePlugin(fsdp_version=version), FullyShardedDataParallelPlugin(fsdp_version=version)
        expected.set_state_dict_type(value)
        found.set_state_dict_type(value)
        names = ("state_dict_type", "state_dict_config", "optim_state_dict_config")
        assert [getattr(found, name) for name in names] == [getattr(expected, name) for name in names]
    with pytest.raises(ValueError, match="FSDP2 has"):
        FullyShardedDataParallelPlugin(fsdp_version=2).set_state_dict_type("LOCAL_STATE_DICT")


def test_validation() -> None:
    for version in (1, 2):
        plugin = FullyShardedDataParallelPlugin(fsdp_version=version)
        plugin.mixed_precision_policy = MixedPrecisionPolicy() if version == 1 else MixedPrecision()
        with pytest.raises(ValueError, match=f"fsdp_version={version} takes a torch.distributed.fsdp.MixedPrecision"):
            plugin.validate_mixed_precision_policy()
        for offload in (True, False):
            expected: Any = OraclePlugin(fsdp_version=version)
            expected.cpu_offload = plugin.cpu_offload = offload
            with pytest.raises(ValueError, match="takes a bool or"):
                plugin.validate_cpu_offload()
            plugin.set_cpu_offload()
            expected.set_cpu_offload()
            plugin.validate_cpu_offload()
            assert plugin.cpu_offload == expected.cpu_offload


# --- to this library's Sharding ---------------------------------------------------------------------------------------


def initialise(module: nn.Module) -> None:
    """A user's function."""


def test_version_2_as_sharding() -> None:
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2)
    assert plugin.to_sharding() == Sharding(wrap="none")
    model = Model()
    policy = MixedPrecisionPolicy(param_dtype=BF16)
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        reshard_after_forward=False,
        mixed_precision_policy=policy,
        auto_wrap_policy="transformer_based_wrap",
        cpu_offload=True,
        ignored_modules="head",
        activation_checkpointing=True,
        activation_checkpointing_offload=True,
        cpu_ram_efficient_loading=True,
        transformer_cls_names_to_wrap=["Block"],
        param_init_fn=initialise,
    )
    found = plugin.to_sharding()
    assert found == Sharding(
        wrap=["Block"],
        reshard_after_forward=False,
        mixed_precision=policy,
        cpu_offload=True,
        ignored_modules="head",
        activation_checkpointing=["Block"],
        activation_checkpointing_offload=True,
        param_init_fn=initialise,
        sync_module_states=True,
    )
    found = plugin.to_sharding(model)
    assert callable(found.wrap)
    assert found.activation_checkpointing is found.wrap
    assert [name for name, module in model.named_modules() if found.wrap(module)] == ["blocks.0", "blocks.1"]
    assert pickle.loads(pickle.dumps(found.wrap))(model.blocks[0])  # travels to Ray's workers


def test_wrap_policies_as_sharding() -> None:
    model = Model()
    cases: tuple[tuple[dict[str, Any], Any, int], ...] = (
        ({"auto_wrap_policy": "transformer_based_wrap"}, "auto", 100_000_000),
        ({"auto_wrap_policy": "size_based_wrap", "min_num_params": 7}, "size", 7),
        ({"auto_wrap_policy": "size_based_wrap"}, "none", 100_000_000),
        ({"auto_wrap_policy": size_based_auto_wrap_policy}, "size", 100_000_000),
        ({"auto_wrap_policy": functools.partial(size_based_auto_wrap_policy, min_num_params=9)}, "size", 9),
        (
            {"auto_wrap_policy": functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={Block})},
            ["Block"],
            100_000_000,
        ),
    )
    for arguments, wrap, size in cases:
        for version in (1, 2):
            sharding = FullyShardedDataParallelPlugin(fsdp_version=version, **arguments).to_sharding()
            assert (sharding.wrap, sharding.min_num_params) == (wrap, size), arguments
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy=ModuleWrapPolicy({Block}))
    with pytest.raises(ValueError, match=r"give the model, to_sharding\(model\)"):
        plugin.to_sharding()
    sharding = plugin.to_sharding(model)
    assert callable(sharding.wrap)
    assert [name for name, module in model.named_modules() if sharding.wrap(module)] == ["blocks.0", "blocks.1"]


def test_version_1_as_sharding(monkeypatch: pytest.MonkeyPatch) -> None:
    cases: tuple[tuple[str, bool | None, int], ...] = (
        ("FULL_SHARD", None, 1),
        ("SHARD_GRAD_OP", False, 1),
        ("NO_SHARD", True, 8),
        ("HYBRID_SHARD", None, 2),
        ("HYBRID_SHARD_ZERO2", False, 2),
    )
    for name, resharded, replicas in cases:
        for arguments in ({"sharding_strategy": name}, {"reshard_after_forward": name}):
            plugin = FullyShardedDataParallelPlugin(**arguments)  # type: ignore[arg-type]
            sharding = plugin.to_sharding(world_size=8, ranks_per_node=4)
            assert (sharding.reshard_after_forward, sharding.replicate_size) == (resharded, replicas), arguments
            monkeypatch.setenv("WORLD_SIZE", "8")
            monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
            assert plugin.to_sharding() == sharding
            monkeypatch.undo()
    with pytest.raises(ValueError, match="ranks_per_node"):
        FullyShardedDataParallelPlugin(sharding_strategy="HYBRID_SHARD").to_sharding(world_size=8)
    with pytest.warns(UserWarning, match="reshard_after_forward='NO_SHARD' decides"):
        FullyShardedDataParallelPlugin(sharding_strategy="FULL_SHARD", reshard_after_forward="NO_SHARD")
    plugin = FullyShardedDataParallelPlugin(
        forward_prefetch=True, backward_prefetch="BACKWARD_PRE", cpu_offload=True, sync_module_states=True
    )
    sharding = plugin.to_sharding()
    assert (sharding.forward_prefetch, sharding.backward_prefetch) == (True, BackwardPrefetch.BACKWARD_PRE)
    assert (sharding.cpu_offload, sharding.sync_module_states, sharding.param_init_fn) == (True, True, None)
    assert FullyShardedDataParallelPlugin().to_sharding().backward_prefetch is None


def test_fsdp1_mixed_precision_as_sharding() -> None:
    module_hooks._warned.clear()
    given = MixedPrecision(
        param_dtype=BF16, buffer_dtype=BF16, keep_low_precision_grads=True, _module_classes_to_ignore=(nn.LayerNorm,)
    )
    plugin = FullyShardedDataParallelPlugin(mixed_precision_policy=given, limit_all_gathers=False)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            sharding = plugin.to_sharding()
    # FSDP1 reduces in the dtype of the parameters unless told otherwise, and leaves outputs as they are.
    assert sharding.mixed_precision == MixedPrecisionPolicy(BF16, BF16, None, True)
    said = [str(warning.message) for warning in caught]
    assert sharding.keep_low_precision_grads
    assert len(said) == 3, "each once"
    for word in ("buffer_dtype", "LayerNorm", "limit_all_gathers"):
        assert any(word in message for message in said), word
    plain = FullyShardedDataParallelPlugin(mixed_precision_policy=MixedPrecision(param_dtype=FP16, reduce_dtype=FP32))
    assert plain.to_sharding().mixed_precision == MixedPrecisionPolicy(FP16, FP32, None, True)


def test_accelerates_own_plugin_as_sharding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(oracle, "is_cuda_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    theirs = OraclePlugin(sync_module_states=True, auto_wrap_policy="size_based_wrap", min_num_params=3)
    sharding = accelerate_sharding.sharding_of(theirs)
    assert (sharding.param_init_fn, sharding.sync_module_states) == (None, True), "their function only allocates"
    assert (sharding.wrap, sharding.min_num_params) == ("size", 3)
