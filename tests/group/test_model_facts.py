"""`config`, `num_parameters`, `dtype` and `device` of a group are those of the whole model in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from raysharding import Loading, ShardedModelGroup, Sharding
from tests.group.conftest import make_group

pytestmark = [pytest.mark.usefixtures("nothing_left", "cluster"), pytest.mark.full]


def test_facts_are_those_of_one_process_after_attach_and_restart(tmp_path: Path) -> None:
    # Tied parameters count once, and 63 rows do not divide by two.
    sizes = {"vocab_size": 63, "n_positions": 8, "n_embd": 10, "n_layer": 2, "n_head": 2}
    GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)).save_pretrained(tmp_path)
    model = GPT2LMHeadModel.from_pretrained(tmp_path, dtype=torch.bfloat16)
    expected = (model.config.to_dict(), model.num_parameters(), model.dtype)

    def facts(group: ShardedModelGroup) -> tuple[object, int, torch.dtype | None]:
        assert isinstance(group.config, GPT2Config)
        assert group.device == torch.device("cpu")
        return group.config.to_dict(), group.num_parameters, group.dtype

    options: Any = {"loading": Loading(dtype="bf16"), "sharding": Sharding(mixed_precision="float32"), "name": "facts"}
    made = ShardedModelGroup.from_checkpoint(tmp_path, world_size=2, **options)
    with made, ShardedModelGroup.attach("facts") as group:
        assert facts(group) == expected
        group.restart(world_size=1)
        assert facts(group) == expected


def test_a_callables_model_has_no_config(checkpoint: Path) -> None:
    with make_group(checkpoint, world_size=1) as group:
        assert group.config is None
        assert group.num_parameters == sum(value.numel() for value in group.state_dict().values())
        assert group.dtype == torch.float32
