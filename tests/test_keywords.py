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


GROUP: Any = object.__new__(ShardedModelGroup)  # without ranks: the calls do not come so far
START, FIT, LOAD = ShardedModelGroup.from_checkpoint, GROUP.fit, GROUP.load


@pytest.mark.parametrize(
    ("function", "keyword", "said"),
    [
        (START, "torch_dtype", "did you mean loading=Loading(dtype=...)?"),
        (START, "dtype", "give loading=Loading(dtype=...)"),
        (START, "device_map", "did you mean device=...?"),
        (START, "num_workers", "give world_size=..."),
        (START, "tensor_parallel_size", "give world_size=..."),
        (START, "low_cpu_mem_usage", "omit it: no rank ever holds a full state dict"),
        (START, "trust_remote_code", "code from a checkpoint is never run: give model="),
        (START, "num_labels", "give model='AutoModelFor...', config_overrides={'num_labels': ...}"),
        (START, "strict", "give loading=Loading(strict=...)"),
        (START, "attn_implementation", "give config_overrides={'attn_implementation': ...}"),
        (START, "ranks", "give world_size=..."),
        (START, "cpu_offload", "give sharding=Sharding(cpu_offload=...)"),
        (START, "tokenizer", "omit it: data holds ids"),
        (START, "bf16", "give from_checkpoint sharding=Sharding(mixed_precision='bf16')"),
        (START, "timeout", "did you mean timeouts=Timeouts(...)?"),
        (START, "batch_size", "give it to fit: fit(batch_size=...)"),
        (START, "world_sise", "did you mean world_size=...?"),
        (START, "load_stall", "did you mean timeouts=Timeouts(load_stall_s=...)?"),
        (ShardedModelGroup.plan, "num_gpus", "give world_size=..."),
        (ShardedModelGroup.plan, "xyzzy", "it takes checkpoint, revision, model, peft_config, base, world_size"),
        (FIT, "learning_rate", "give it to the optimizer: set_optimizer(torch.optim.AdamW, lr=...)"),
        (FIT, "warmup_steps", "make a schedule: set_scheduler(...)"),
        (FIT, "num_train_epochs", "give epochs=..."),
        (FIT, "num_epochs", "did you mean epochs=...?"),
        (FIT, "per_device_train_batch_size", "give batch_size=per_device_train_batch_size * world_size"),
        (FIT, "train_dataset", "give data=..."),
        (FIT, "num_workers", "give prefetch=..."),
        (FIT, "bf16", "give from_checkpoint sharding=Sharding(mixed_precision='bf16')"),
        (FIT, "output_dir", "give save_to=..."),
        (FIT, "world_size", "give it to from_checkpoint: from_checkpoint(world_size=...)"),
        (LOAD, "strict", "give it to from_checkpoint: from_checkpoint(loading=Loading(strict=...))"),
        (Loading, "torch_dtype", "did you mean dtype=...?"),
        (Sharding, "mixed_precison", "did you mean mixed_precision=...?"),
    ],
)
def test_unknown_keyword_is_answered_by_ours(function: Any, keyword: str, said: str) -> None:
    with pytest.raises(TypeError) as caught:
        function(**{keyword: 1})
    text = str(caught.value)
    assert text.startswith(f"{function.__name__}() takes no {keyword!r}: {said}")
    assert function != FIT or text.endswith(said)


def test_a_hint_follows_the_signature() -> None:
    @with_hints
    def train(*, eval_every: int | None = None) -> None: ...

    unhinted: Any = train
    with pytest.raises(TypeError, match=r"takes no 'eval_steps': give eval_every=\.\.\."):
        unhinted(eval_steps=5)


def test_signatures_stay_as_they_are_written() -> None:
    source = (ROOT / "raysharding/group/group.py").read_text()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef) and node.name in ("from_checkpoint", "plan"):
            written = [one.arg for one in (*node.args.args, *node.args.kwonlyargs) if one.arg != "cls"]
            assert list(inspect.signature(getattr(ShardedModelGroup, node.name)).parameters) == written
    assert next(iter(inspect.signature(Loading).parameters)) == "transport"
