"""Packed models are saved as transformers saves them, whoever holds which expert."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from raysharding.checkpoint import open_checkpoint
from raysharding.distributed import init_mesh, load_checkpoint, save_checkpoint, shard_module
from raysharding.distributed.saving import file_writers as file_writing
from raysharding.distributed.transfer import gather as gathering
from raysharding.models import build_module, saved_layout
from tests.models.architectures import ARCHITECTURES
from tests.spawn import device_type, run_ranks

NAMES = ("mixtral", "qwen2-vl", "swin")


def save_on_ranks(root: Path, in_order: bool) -> None:
    """Load each model and save it, in one file and in one for each rank; as to an object store, where asked."""
    if in_order:
        made = gathering.Gather
        setattr(file_writing, "Gather", lambda *args, **options: made(*args, **options | {"in_order": True}))  # noqa: B010 - mypy
    for name in NAMES:
        opened = open_checkpoint(root / name)
        module = shard_module(build_module(None, opened, None), init_mesh(device_type()))
        load_checkpoint(module, opened)
        for kind, small in (("one", 256 << 20), ("many", 0)):
            file_writing.SMALL_BYTES = small
            save_checkpoint(module, root / f"{name}-{kind}-{dist.get_world_size()}-{in_order}")


def test_what_a_store_is_sent_comes_in_the_order_of_the_file(tmp_path: Path) -> None:
    """A stream takes bytes in order: experts that lie side by side in the model must do so in the file."""
    ARCHITECTURES["mixtral"].make().save_pretrained(tmp_path)
    module = build_module(None, open_checkpoint(tmp_path), None)
    layout = saved_layout(module, dict(module.named_parameters()))
    names = file_writing._in_source_order(list(layout), layout)
    assert sorted(names) == sorted(layout)
    reached: dict[str, int] = {}
    for run in (run for name in names for run in layout[name].runs):
        assert run.source_start == reached.get(run.source, 0)
        reached[run.source] = run.source_start + run.num_elements


@pytest.mark.parametrize(
    ("world_size", "in_order"), [(3, False), pytest.param(2, True, marks=pytest.mark.full)], ids=["columns", "in order"]
)
def test_packed_models_are_saved_as_transformers_saves_them(world_size: int, in_order: bool, tmp_path: Path) -> None:
    for name in NAMES:
        ARCHITECTURES[name].make().save_pretrained(tmp_path / name)
    run_ranks(world_size, save_on_ranks, tmp_path, in_order)
    for name in NAMES:
        theirs = load_file(tmp_path / name / "model.safetensors")
        for kind in ("one", "many"):
            files = sorted((tmp_path / f"{name}-{kind}-{world_size}-{in_order}").glob("*.safetensors"))
            assert len(files) == (1 if kind == "one" else world_size)
            ours = {key: tensor for file in files for key, tensor in load_file(file).items()}
            assert ours.keys() == theirs.keys()
            for key, tensor in theirs.items():
                assert torch.equal(ours[key], tensor), f"{name}: {key}"
