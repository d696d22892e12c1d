"""Unknown keywords are answered by ours, and signatures stay as they are written."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path
from typing import Any

import pytest

from raysharding import Loading, ShardedModelGroup, Sharding
from raysharding.arguments import with_hints

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.parametrize(
    ("function", "keyword", "said"),
    [
        ("from_checkpoint", "torch_dtype", "give loading=Loading(dtype=...)"),
        ("from_checkpoint", "dtype", "give loading=Loading(dtype=...)"),
        ("from_checkpoint", "device_map", "give device=..."),
        ("from_checkpoint", "num_workers", "give world_size=..."),
        ("from_checkpoint", "tensor_parallel_size", "give world_size=..."),
        ("from_checkpoint", "low_cpu_mem_usage", "omit it: no rank ever holds a full state dict"),
        ("from_checkpoint", "trust_remote_code", "code from a checkpoint is never run: give model="),
        (
            "from_checkpoint",
            "num_labels",
            "give model='AutoModelFor...', config_overrides={'num_labels': ...}",
        ),
        ("from_checkpoint", "strict", "give loading=Loading(strict=...)"),
        ("from_checkpoint", "attn_implementation", "give config_overrides={'attn_implementation': ...}"),
        ("from_checkpoint", "tokenizer", "omit it: data holds ids"),
        ("from_checkpoint", "ranks", "give world_size=..."),
        ("from_checkpoint", "bf16", "give sharding=Sharding(mixed_precision='bf16')"),
        ("from_checkpoint", "cpu_offload", "give sharding=Sharding(cpu_offload=...)"),
        ("from_checkpoint", "timeout", "give timeouts=Timeouts(...)"),
        ("from_checkpoint", "batch_size", "give it to fit: fit(batch_size=...)"),
        ("from_checkpoint", "world_sise", "did you mean world_size=...?"),
        ("from_checkpoint", "load_stall", "did you mean timeouts=Timeouts(load_stall_s=...)?"),
        ("plan", "num_gpus", "give world_size=..."),
        ("plan", "xyzzy", "it takes checkpoint, revision, model, peft_config, base, world_size"),
    ],
)
def test_unknown_keyword_is_answered_by_ours(function: str, keyword: str, said: str) -> None:
    call: Any = getattr(ShardedModelGroup, function)
    with pytest.raises(TypeError) as caught:
        call("nowhere", **{keyword: 1})
    assert str(caught.value).startswith(f"{function}() takes no {keyword!r}: {said}")


@pytest.mark.parametrize(
    ("keyword", "said"),
    [
        ("learning_rate", "give it to the optimizer: set_optimizer(torch.optim.AdamW, lr=...)"),
        ("warmup_steps", "make a schedule: set_scheduler(...)"),
        ("num_train_epochs", "give epochs=..."),
        ("num_epochs", "give epochs=..."),
        ("per_device_train_batch_size", "give batch_size=per_device_batch_size*world_size"),
        ("train_dataset", "give data=..."),
        ("num_workers", "give prefetch=..."),
        ("bf16", "give it to from_checkpoint: from_checkpoint(sharding=Sharding(mixed_precision='bf16'))"),
        ("world_size", "give it to from_checkpoint: from_checkpoint(world_size=...)"),
    ],
)
def test_fit_knows_trainers_keywords(keyword: str, said: str) -> None:
    group: Any = object.__new__(ShardedModelGroup)  # without ranks: the call does not come so far
    with pytest.raises(TypeError) as caught:
        group.fit([], batch_size=1, **{keyword: 1})
    assert str(caught.value) == f"fit() takes no {keyword!r}: {said}"


def test_load_says_who_takes_an_option_of_loads() -> None:
    group: Any = object.__new__(ShardedModelGroup)
    said = (
        r"load\(\) takes no 'strict': give it to from_checkpoint: from_checkpoint\(loading=Loading\(strict=\.\.\.\)\)"
    )
    with pytest.raises(TypeError, match=said):
        group.load("nowhere", strict=False)


def test_a_hint_follows_the_signature() -> None:
    @with_hints
    def train(*, eval_every: int | None = None) -> None: ...

    unhinted: Any = train
    with pytest.raises(TypeError, match=r"takes no 'eval_steps': give eval_every=\.\.\."):
        unhinted(eval_steps=5)


def test_an_option_of_a_dataclass_is_answered_too() -> None:
    loading: Any = Loading
    with pytest.raises(TypeError, match=r"Loading\(\) takes no 'torch_dtype': give dtype=\.\.\."):
        loading(torch_dtype="bf16")
    sharding: Any = Sharding
    with pytest.raises(TypeError, match=r"Sharding\(\) takes no 'mixed_precison': did you mean mixed_precision=\.\.\."):
        sharding(mixed_precison="bf16")


def test_signatures_stay_as_they_are_written() -> None:
    source = (ROOT / "raysharding/group/group.py").read_text()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef) and node.name in ("from_checkpoint", "plan"):
            written = [one.arg for one in (*node.args.args, *node.args.kwonlyargs) if one.arg != "cls"]
            assert list(inspect.signature(getattr(ShardedModelGroup, node.name)).parameters) == written
    assert next(iter(inspect.signature(Loading).parameters)) == "transport"
