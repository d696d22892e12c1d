"""`save(dtype=)`: the files of a model that was loaded in that dtype, written from a model in another."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from raysharding import GroupError, Loading, ShardedModelGroup
from raysharding.checkpoint import open_checkpoint
from raysharding.distributed import init_mesh, load_checkpoint, save_checkpoint, shard_module
from raysharding.distributed.saving import AsyncSaver, Destination
from raysharding.distributed.saving import file_writers as file_writing
from raysharding.models import build_module
from tests.conftest import make_group
from tests.distributed.models import filled
from tests.grid import world_sizes
from tests.models.tiny import tiny_models
from tests.spawn import device_type, run_ranks

pytestmark = [pytest.mark.all_ranks, pytest.mark.timeout(120)]


def held(path: Path) -> dict[str, torch.Tensor]:
    return {key: tensor for file in sorted(path.glob("*.safetensors")) for key, tensor in load_file(file).items()}


def require_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for key, tensor in expected.items():
        assert found[key].dtype == tensor.dtype, key
        assert torch.equal(found[key], tensor), key


def export(root: Path) -> None:
    """Into one file and into many, from the shards and from copies; the module stays as it is."""
    opened = open_checkpoint(root / "source")
    module = shard_module(build_module(None, opened, None), init_mesh(device_type()))
    load_checkpoint(module, opened, loading=Loading(dtype="float32"))
    for name, small in (("one", 256 << 20), ("many", 0)):
        file_writing.SMALL_BYTES = small
        report = save_checkpoint(module, root / name, dtype="bfloat16")
        assert report.num_bytes == sum(tensor.nbytes for tensor in held(root / name).values())
    saver = AsyncSaver()
    number = saver.save(module, Destination(str(root / "background"), dtype=torch.bfloat16))
    saver.wait()
    status = saver.status(number)
    assert status is not None
    assert status.report is not None, status.error
    assert status.bytes_done == status.bytes_total == status.report.num_bytes
    assert {parameter.dtype for parameter in module.parameters()} == {torch.float32}
    optimizer = torch.optim.SGD(module.parameters())
    with pytest.raises(ValueError, match=r"rounded weights.*optimizer=False"):
        save_checkpoint(module, root / "refused", dtype="bf16", optimizer=optimizer)
    with pytest.raises(ValueError, match="dtype='int8'"):
        save_checkpoint(module, root / "refused", dtype="int8")


@pytest.mark.parametrize("world_size", world_sizes(1, 3, full=(2,)))
def test_an_export_is_what_a_model_loaded_in_the_dtype_saves(world_size: int, tmp_path: Path) -> None:
    """Experts that are packed in the module, and a router that stays in float32."""
    model = next(iter(tiny_models("Ernie4_5_MoeForCausalLM")))
    model.save_pretrained(tmp_path / "source")
    low = type(model).from_pretrained(tmp_path / "source", dtype=torch.bfloat16)
    low.save_pretrained(tmp_path / "theirs")
    run_ranks(world_size, export, tmp_path)
    theirs = held(tmp_path / "theirs")
    assert {tensor.dtype for tensor in theirs.values()} == {torch.bfloat16, torch.float32}
    for name in ("one", "many", "background"):
        require_same(held(tmp_path / name), theirs)
        assert json.loads((tmp_path / name / "config.json").read_text())["dtype"] == "bfloat16"
    assert not (tmp_path / "refused").exists()


def export_a_plain_module(root: Path) -> None:
    module = shard_module(filled(), init_mesh(device_type()))
    save_checkpoint(module, root / "saved")
    save_checkpoint(module, root / "low", dtype=torch.float16)


def test_what_is_no_floating_tensor_stays(tmp_path: Path) -> None:
    run_ranks(2, export_a_plain_module, tmp_path)
    saved = held(tmp_path / "saved")
    require_same(
        held(tmp_path / "low"),
        {key: one.half() if one.is_floating_point() else one for key, one in saved.items()},
    )


def test_a_group_exports_and_goes_on(cluster: None, checkpoint: Path, tmp_path: Path) -> None:
    group: ShardedModelGroup = make_group(checkpoint)
    with group:
        group.set_optimizer(torch.optim.SGD, lr=0.1)
        with pytest.raises(ValueError, match=r"optimizer=False"):
            group.save(tmp_path / "low", dtype="bfloat16")
        with pytest.raises(ValueError, match=r"dtype='bf17'"):
            group.save(tmp_path / "low", dtype="bf17", optimizer=False)
        group.save(tmp_path / "low", dtype="bfloat16", optimizer=False, async_save=True)
        group.wait_for_save()
        state = group.state_dict()
        require_same(held(tmp_path / "low"), {key: one.bfloat16() for key, one in state.items()})
        # A restart would lose the bits that the export has not.
        os.kill(group.ranks[1].pid, signal.SIGKILL)
        with pytest.raises(GroupError):
            group.state_dict()
        assert group.restart().checkpoint == str(checkpoint)
