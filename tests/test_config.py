"""The configuration: every field is described, the defaults are valid, bad values name the field and the cure."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import pickle
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import BackwardPrefetch, MixedPrecisionPolicy

from raysharding import config
from raysharding.config import Loading, Placement, Sharding, Timeouts
from raysharding.distributed.fully_shard import mixed_precision_policy

CONFIGS = (Sharding, Loading, Placement, Timeouts)


def described_fields(class_name: str) -> dict[str, bool]:
    """Field → whether a docstring stands under it, read from the source."""
    tree = ast.parse(inspect.getsource(config))
    body = next(node.body for node in tree.body if isinstance(node, ast.ClassDef) and node.name == class_name)
    found: dict[str, bool] = {}
    for node, below in zip(body, [*body[1:], None], strict=True):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            is_text = isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant)
            found[node.target.id] = is_text
    return found


DEADLINES = [field.name for field in dataclasses.fields(Timeouts) if field.name != "lease_s"]


@pytest.mark.parametrize("config_type", CONFIGS)
def test_fields_are_described_and_defaults_are_valid_frozen_and_picklable(config_type: type[Any]) -> None:
    fields = described_fields(config_type.__name__)
    assert list(fields) == [field.name for field in dataclasses.fields(config_type)]
    assert all(fields.values()), fields
    value = config_type()
    assert pickle.loads(pickle.dumps(value)) == value
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(value, next(iter(fields)), None)


BAD_PORT_RANGES = (29500, (29500,), (29500, 29400), (0, 80), (65535, 65536), (1.0, 2.0), [29500, 29599], (True, 2))


@pytest.mark.parametrize(
    ("config_type", "name", "value", "cure"),
    [
        (Sharding, "wrap", "layers", "a list of class names"),
        (Sharding, "min_num_params", 0, "positive"),
        (Sharding, "replicate_size", 0, "1 (no replicas) or more"),
        (Sharding, "mixed_precision", "fp8", "'fp32' or 'float32', 'bf16' or 'bfloat16', 'fp16' or 'float16'"),
        (Loading, "transport", "carrier pigeon", "'scatter'"),
        (Loading, "bucket_bytes", 100, "at least 4096"),
        (Loading, "verify", "everything", "'header'"),
        (Loading, "dtype", torch.int8, "floating dtype such as torch.bfloat16"),
        (Sharding, "wrap", 3, "a list of class names"),
        (Sharding, "wrap", [1], "a list of class names"),
        (Sharding, "mixed_precision", torch.int8, "or a torch.distributed.fsdp.MixedPrecisionPolicy, or None"),
        (Loading, "dtype", "bloat16", "'fp32' or 'float32', 'bf16' or 'bfloat16', 'fp16' or 'float16'"),
        (Sharding, "reshard_after_forward", "yes", "True, False, None"),
        (Sharding, "replicate_size", 2.0, "1 (no replicas) or more"),
        (Sharding, "cpu_offload", "no", "True or False"),
        (Sharding, "ignored_modules", 3, "regular expressions on module names"),
        (Sharding, "ignored_modules", "(", "re.escape"),
        (Sharding, "average_ignored_gradients", "no", "True or False"),
        (Sharding, "activation_checkpointing", "Block", "a list of class names"),
        (Sharding, "activation_checkpointing", [1], "a list of class names"),
        (Sharding, "activation_checkpointing_offload", "yes", "True or False"),
        (Sharding, "activation_checkpointing_offload", True, "set activation_checkpointing too"),
        (Sharding, "forward_prefetch", -1, "a number of groups"),
        (Sharding, "forward_prefetch", "yes", "a number of groups"),
        (Sharding, "backward_prefetch", "before", "use 'backward_pre'"),
        (Sharding, "backward_prefetch", 1, "use 'backward_pre'"),
        (Sharding, "param_init_fn", "zeros", "a function of one module"),
        (Sharding, "sync_module_states", 1, "True or False"),
        (Sharding, "keep_low_precision_grads", True, "set mixed_precision too"),
        (Loading, "bucket_bytes", "32MiB", "32 << 20"),
        (Loading, "strict", "yes", "True or False"),
        (Loading, "seed", None, "whole number"),
        (Loading, "key_mapping", {"a": 1}, "regular expressions"),
        (Placement, "strategy", "SCATTER", "STRICT_SPREAD"),
        (Placement, "labels", ["a"], "a dict of label names"),
        (Placement, "runtime_env", "env.yaml", "a dict"),
        (Placement, "cpus_per_rank", "1", "0 or more"),
        *((Placement, "port_range", bad, "(first, last) out of 1 to 65535") for bad in BAD_PORT_RANGES),
        (Timeouts, "call_s", None, "positive number of seconds"),
        (Timeouts, "call_s", "5", "positive number of seconds"),
        (Timeouts, "call_s", float("inf"), "a deadline is finite"),
        (Placement, "cpus_per_rank", -1.0, "0 or more"),
        (Placement, "gpus_per_rank", 0, "a part of a GPU"),
        (Placement, "gpus_per_rank", 1.5, "a part of a GPU"),
        (Placement, "gpus_per_rank", True, "a part of a GPU"),
        (Placement, "gpus_per_rank", float("nan"), "a part of a GPU"),
        (Placement, "gpus_per_rank", "0.5", "a part of a GPU"),
        (Timeouts, "lease_s", 0.5, "1 second or more"),
        *((Timeouts, name, 0.0, "positive number of seconds") for name in DEADLINES),
    ],
)
def test_bad_value_is_refused_with_the_cure(config_type: type[Any], name: str, value: object, cure: str) -> None:
    with pytest.raises(ValueError, match=name) as caught:
        config_type(**{name: value})
    assert repr(value) in str(caught.value)
    assert cure in str(caught.value)


def test_a_pattern_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match=r"key_mapping='\('.*re\.escape"):
        Loading(key_mapping={"(": ""})


def test_good_values_are_taken() -> None:
    linear = torch.nn.Linear(1, 1)
    Sharding(wrap=["LlamaDecoderLayer"], replicate_size=2, mixed_precision="bf16")
    Sharding(wrap=lambda module: module is linear, mixed_precision=MixedPrecisionPolicy())
    Sharding(ignored_modules=["head", linear], activation_checkpointing=["Block"], forward_prefetch=2)
    Sharding(ignored_modules=linear, backward_prefetch=None, param_init_fn=print)
    Sharding(backward_prefetch=BackwardPrefetch.BACKWARD_POST, sync_module_states=True)
    Loading(transport="broadcast", dtype=torch.float16, strict=False, key_mapping={"^bert\\.": ""})
    Placement(strategy="STRICT_SPREAD", cpus_per_rank=0, labels={"zone": "a"}, port_range=(65535, 65535))
    Timeouts(drain_s=1, call_s=0.5)


def test_a_dtype_has_the_same_names_everywhere() -> None:
    names = {
        torch.bfloat16: (torch.bfloat16, "bf16", "bfloat16", "torch.bfloat16"),
        torch.float16: (torch.float16, "fp16", "float16", "torch.float16"),
        torch.float32: (torch.float32, "fp32", "float32", "torch.float32"),
    }
    for dtype, given in names.items():
        assert {Loading(dtype=name).dtype for name in given} == {dtype}
        assert {mixed_precision_policy(Sharding(mixed_precision=name)).param_dtype for name in given} == {dtype}
        policies = [MixedPrecisionPolicy(param_dtype=name, reduce_dtype=name) for name in given]  # type: ignore[arg-type]
        wanted = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=dtype)
        assert all(Sharding(mixed_precision=policy).mixed_precision == wanted for policy in policies)
