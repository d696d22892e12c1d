"""`merge_fsdp_weights` beside accelerate's: the same keys, dtypes and bits, little memory, and never half an output."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from accelerate import PartialState
from accelerate.utils import merge_fsdp_weights as accelerate_merge
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from raysharding.checkpoint import open_checkpoint
from raysharding.checkpoint.torch_formats import dcp_reader as dcp
from raysharding.checkpoint.writing.manifest import check_manifest, read_manifest
from raysharding.distributed import merge_fsdp_weights
from raysharding.distributed.saving import merge_dcp as merging
from raysharding.errors import CheckpointError
from raysharding.units import MIB
from tests.checkpoint.torch_formats.dcp_files import assert_same_bits, cut, read_with_torch, save_with_torch, write_dcp
from tests.distributed.saving import merge_checks
from tests.spawn import run_ranks

pytestmark = [pytest.mark.all_ranks, pytest.mark.timeout(120)]
ROOT = Path(__file__).resolve().parents[3]
STATE = {"model": {"a.weight": torch.randn(40, 7).bfloat16(), "a.steps": torch.tensor(3)}}


class Saved(NamedTuple):
    """What so many ranks saved, and what each rank returned."""

    root: Path
    results: list[dict[str, Any]]


def saved_by(world_size: int, factory: pytest.TempPathFactory) -> Saved:
    """Run `save_all`."""
    root = factory.mktemp(f"saved-by-{world_size}")
    return Saved(root, run_ranks(world_size, merge_checks.save_all, root, timeout_s=100))


@pytest.fixture(scope="module")
def saved_by_two(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """By accelerate itself."""
    return saved_by(2, tmp_path_factory)


@pytest.fixture(scope="module")
def saved_by_four(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """On two meshes."""
    return saved_by(4, tmp_path_factory)


@pytest.fixture(scope="module", params=[1, 2, 3, 4], ids=lambda world_size: f"W={world_size}")
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """At every world size."""
    names = {2: "saved_by_two", 4: "saved_by_four"}
    if request.param in names:
        return request.getfixturevalue(names[request.param]).root
    return saved_by(request.param, tmp_path_factory).root


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces of 64 bytes: every tensor has many."""
    monkeypatch.setattr(dcp, "PIECE_BYTES", 64)


def by_accelerate(source: Path, output: Path, safe_serialization: bool = True) -> None:
    """The oracle."""
    PartialState(cpu=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        accelerate_merge(str(source), str(output), safe_serialization)


def assert_same_state(found: Any, expected: Any) -> None:
    """Two nested states, to the bit."""
    assert type(found) is type(expected)
    if isinstance(expected, torch.Tensor):
        assert_same_bits({"": found}, {"": expected})
    elif isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            assert_same_state(found[key], value)
    elif isinstance(expected, list):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert_same_state(one, other)
    else:
        assert found == expected


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("version", [1, 2])
def test_weights_are_accelerates(saved: Path, version: int, tmp_path: Path) -> None:
    source = saved / f"fsdp{version}" / "pytorch_model_fsdp_0"
    by_accelerate(source, tmp_path / "theirs")
    merge_fsdp_weights(source, tmp_path / "ours")
    ours, theirs = (tmp_path / side / "model.safetensors" for side in ("ours", "theirs"))
    assert_same_bits(load_file(ours), load_file(theirs))
    with safe_open(ours, "pt") as one, safe_open(theirs, "pt") as other:
        assert one.metadata() == other.metadata()
    if version == 2:
        assert load_file(ours).keys() == merge_checks.Odd().state_dict().keys()
    by_accelerate(source, tmp_path / "theirs", False)
    merge_fsdp_weights(source, tmp_path / "ours", safe_serialization=False)
    states = [torch.load(tmp_path / side / "pytorch_model.bin", weights_only=True) for side in ("ours", "theirs")]
    assert_same_state(*states)


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("version", [1, 2])
def test_optimizer_state_is_accelerates(saved: Path, version: int, tmp_path: Path) -> None:
    source = saved / f"fsdp{version}" / "optimizer_0"
    by_accelerate(source, tmp_path / "theirs", False)
    merge_fsdp_weights(source, tmp_path / "ours", safe_serialization=False)
    states = [torch.load(tmp_path / side / "pytorch_model.bin", weights_only=True) for side in ("ours", "theirs")]
    assert_same_state(*states)
    assert states[0]["param_groups"][0]["lr"] == 0.1
    # A file of tensors has no place for that: accelerate fails with an AttributeError or a ValueError.
    with pytest.raises((ValueError, AttributeError)):
        by_accelerate(source, tmp_path / "theirs")
    with pytest.raises(CheckpointError, match=r"nested state.*safe_serialization=False"):
        merge_fsdp_weights(source, tmp_path / "none")
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize("name", ["llama", "tied"])
def test_transformers_opens_it(saved_by_two: Saved, name: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    source, output = saved_by_two.root / name, saved_by_two.root / f"{name}-merged"
    merge_fsdp_weights(source, output)
    assert sorted(os.listdir(output)) == ["config.json", "model.safetensors", "raysharding.manifest.json"]
    opened = AutoModelForCausalLM.from_pretrained(output, dtype=torch.bfloat16)
    assert_same_bits(opened.state_dict(), merge_checks.tiny_llama(name == "tied").state_dict())
    by_accelerate(source, tmp_path)
    assert_same_bits(load_file(output / "model.safetensors"), load_file(tmp_path / "model.safetensors"))


@pytest.mark.usefixtures("small_pieces")
def test_tensors_cut_along_two_dimensions(saved_by_four: Saved, tmp_path: Path) -> None:
    source = saved_by_four.root / "meshes"
    by_accelerate(source, tmp_path / "theirs")
    merge_fsdp_weights(source, tmp_path / "ours")
    ours = load_file(tmp_path / "ours" / "model.safetensors")
    assert_same_bits(ours, load_file(tmp_path / "theirs" / "model.safetensors"))
    for index, name in enumerate(merge_checks.MESHES):
        assert torch.equal(ours[name], merge_checks.mesh_tensor(index)), name


def test_ranks_together(saved_by_two: Saved) -> None:
    root, (first, second) = saved_by_two
    assert first["files"] == second["files"] == ["model.safetensors", "raysharding.manifest.json"]
    named = f"pass the directory that is: {root}/fsdp2/optimizer_0 or {root}/fsdp2/pytorch_model_fsdp_0"
    assert first["wrong"].endswith(named)
    assert second["wrong"] == f"{first['wrong']} (on rank 0)"
    assert not (root / "nothing").exists()
    assert min(first["seconds"], second["seconds"]) > 3, "less than a message may take: the test tests nothing"
    assert_same_bits(load_file(root / "slow" / "model.safetensors"), merge_checks.tiny_llama(tie=False).state_dict())


def test_large_weights_are_a_set_with_an_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = {f"layers.{index}.weight": torch.randn(10, 10) for index in range(5)} | {"n": torch.tensor(3)}
    save_with_torch(tmp_path / "source", {"model": tensors})
    output = tmp_path / "output"
    save_file({"old": torch.ones(2)}, tmp_path / "old.safetensors")
    output.mkdir()
    (tmp_path / "old.safetensors").rename(output / "model.safetensors")
    for name in ("model-00005-of-00005.safetensors", "README.md", "consolidated.safetensors"):
        (output / name).touch()
    monkeypatch.setattr(merging, "MAX_FILE_BYTES", 1000)
    merge_fsdp_weights(tmp_path / "source", output)
    names = [f"model-0000{index}-of-00003.safetensors" for index in (1, 2, 3)]
    extra = ["model.safetensors.index.json", "raysharding.manifest.json", "README.md", "consolidated.safetensors"]
    assert sorted(os.listdir(output)) == sorted([*names, *extra]), "the old model.safetensors would be opened instead"
    index = json.loads((output / extra[0]).read_text())
    assert index["metadata"] == {"total_size": 2008}
    assert index["weight_map"].keys() == tensors.keys()
    assert_same_bits({k: v for name in names for k, v in load_file(output / name).items()}, tensors)
    opened = open_checkpoint(output)
    check_manifest(read_manifest(opened), opened)  # type: ignore[arg-type]
    # And back: the index is gone, so that one file is the checkpoint.
    monkeypatch.undo()
    merge_fsdp_weights(tmp_path / "source", output)
    assert not (output / extra[0]).exists()
    opened = open_checkpoint(output)
    assert [file.name for file in opened.files] == ["model.safetensors"]
    check_manifest(read_manifest(opened), opened)  # type: ignore[arg-type]


def test_other_files_stay_and_weights_are_replaced(tmp_path: Path) -> None:
    save_with_torch(tmp_path / "source", STATE)
    output = tmp_path / "new" / "parents" / "output"
    output.mkdir(parents=True)
    (output / "config.json").write_text("{}")
    (output / "model.safetensors").write_text("old")
    merge_fsdp_weights(tmp_path / "source", output)
    merge_fsdp_weights(str(tmp_path / "source"), str(output), safe_serialization=False)
    expected = ["config.json", "model.safetensors", "pytorch_model.bin", "raysharding.manifest.json"]
    assert sorted(os.listdir(output)) == expected
    assert_same_bits(load_file(output / "model.safetensors"), STATE["model"])
    assert (output / "config.json").read_text() == "{}"
    merge_fsdp_weights(tmp_path / "source", tmp_path / "a" / "b")
    assert (tmp_path / "a" / "b" / "model.safetensors").exists()


def test_what_is_no_tensor_is_left_out_and_said(tmp_path: Path) -> None:
    state = {"model": STATE["model"] | {"a._extra_state": "abc", "scale": 0.5}, "step": 5}
    save_with_torch(tmp_path / "source", state)
    with pytest.raises((ValueError, AttributeError)):
        by_accelerate(tmp_path / "source", tmp_path / "theirs")
    with pytest.warns(UserWarning, match=r"left out of model.safetensors.*: model.a._extra_state, model.scale, step$"):
        merge_fsdp_weights(tmp_path / "source", tmp_path / "ours")
    assert_same_bits(load_file(tmp_path / "ours" / "model.safetensors"), STATE["model"])
    merge_fsdp_weights(tmp_path / "source", tmp_path / "ours", safe_serialization=False)
    assert_same_state(torch.load(tmp_path / "ours" / "pytorch_model.bin", weights_only=True), state)


def test_values_that_only_a_pickle_holds_are_left_out_of_the_bin(tmp_path: Path) -> None:
    save_with_torch(tmp_path / "source", STATE["model"] | {"path": Path("x"), "step": 5})
    with pytest.warns(UserWarning, match=r"left out of pytorch_model.bin.*: path$"):
        merge_fsdp_weights(tmp_path / "source", tmp_path / "ours", safe_serialization=False)
    found = torch.load(tmp_path / "ours" / "pytorch_model.bin", weights_only=True)
    assert_same_state(found, STATE["model"] | {"step": 5})


def test_every_dtype_in_a_bin_and_in_place(tmp_path: Path) -> None:
    from tests.checkpoint.build import random_tensors

    tensors = random_tensors() | {"C128": torch.randn(3, dtype=torch.complex128)}
    save_with_torch(tmp_path / "source", tensors)
    merge_fsdp_weights(tmp_path / "source", tmp_path / "ours", safe_serialization=False)
    file = tmp_path / "ours" / "pytorch_model.bin"
    assert_same_bits(torch.load(file, weights_only=True), tensors)
    mapped = torch.load(file, weights_only=True, mmap=True)
    assert_same_bits(mapped, tensors)
    assert {tensor.data_ptr() % 64 for tensor in mapped.values()} == {0}, "aligned in the file as torch aligns"
    import zipfile

    assert zipfile.ZipFile(file).testzip() is None
    with pytest.raises(CheckpointError, match=r"'C128': safetensors has no torch\.complex128"):
        merge_fsdp_weights(tmp_path / "source", tmp_path / "ours")
    assert os.listdir(tmp_path / "ours") == ["pytorch_model.bin"]


@pytest.mark.parametrize("safe_serialization", [True, False])
def test_one_tensor_alone_keeps_its_name(safe_serialization: bool, tmp_path: Path) -> None:
    save_with_torch(tmp_path / "source", {"weight": torch.ones(3)})
    merge_fsdp_weights(tmp_path / "source", tmp_path / "ours", safe_serialization)
    if safe_serialization:
        assert_same_bits(load_file(tmp_path / "ours" / "model.safetensors"), {"weight": torch.ones(3)})
        with pytest.raises((ValueError, AttributeError)):  # it takes the tensor for the state dict
            by_accelerate(tmp_path / "source", tmp_path / "theirs")
    else:
        found = torch.load(tmp_path / "ours" / "pytorch_model.bin", weights_only=True)
        assert_same_bits(found, {"weight": torch.ones(3)})


def test_nothing_to_merge(tmp_path: Path) -> None:
    save_with_torch(tmp_path / "source", {"step": 3})
    with pytest.raises(CheckpointError, match="holds no tensor"):
        merge_fsdp_weights(tmp_path / "source", tmp_path / "ours")


@pytest.mark.parametrize("state", [{"a": {"w": 1}, "b": {"w": 1}}, {"a": {"b": {"w": 1}}}, {"a": [1]}], ids=str)
def test_nested_state_is_refused(state: dict[str, Any], tmp_path: Path) -> None:
    def filled(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: filled(inner) for key, inner in value.items()}
        return [filled(inner) for inner in value] if isinstance(value, list) else torch.ones(2)

    save_with_torch(tmp_path / "source", filled(state))
    with pytest.raises(CheckpointError, match="nested state"):
        merge_fsdp_weights(tmp_path / "source", tmp_path / "ours")
    by_accelerate(tmp_path / "source", tmp_path / "theirs", False)
    merge_fsdp_weights(tmp_path / "source", tmp_path / "ours", safe_serialization=False)
    states = [torch.load(tmp_path / side / "pytorch_model.bin", weights_only=True) for side in ("ours", "theirs")]
    if isinstance(state["a"], dict):
        assert_same_state(*states)
    else:
        assert_same_state(states[0], filled(state))


def test_removal(tmp_path: Path) -> None:
    for name in ("source", "kept"):
        save_with_torch(tmp_path / name, STATE)
    for output in (tmp_path / "kept", tmp_path / "kept" / "inner"):
        with pytest.raises(CheckpointError, match="which remove_checkpoint_dir=True removes"):
            merge_fsdp_weights(tmp_path / "kept", output, remove_checkpoint_dir=True)
    assert sorted(os.listdir(tmp_path / "kept")) == [".metadata", "__0_0.distcp"]
    merge_fsdp_weights(tmp_path / "kept", tmp_path / "kept")
    merge_fsdp_weights(tmp_path / "source", tmp_path / "output", remove_checkpoint_dir=True)
    assert not (tmp_path / "source").exists()
    assert_same_bits(load_file(tmp_path / "output" / "model.safetensors"), STATE["model"])
    (tmp_path / "kept" / "notes.txt").touch()
    merge_fsdp_weights(tmp_path / "kept", tmp_path / "output", remove_checkpoint_dir=True)
    merged = ["model.safetensors", "notes.txt", "raysharding.manifest.json"]
    assert sorted(os.listdir(tmp_path / "kept")) == merged, "what is no sharded checkpoint stays"


@pytest.mark.parametrize("safe_serialization", [True, False])
def test_a_full_disk_leaves_all_as_it_was(safe_serialization: bool, tmp_path: Path) -> None:
    tensors = {"a": torch.randn(1000), "b": torch.randn(100_000), "c": torch.randn(10)}
    save_with_torch(tmp_path / "source", {"model": tensors})
    output = tmp_path / "output"
    output.mkdir()
    name = "model.safetensors" if safe_serialization else "pytorch_model.bin"
    (output / name).write_text("old")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
        for path in (output, tmp_path / "new"):
            with pytest.raises(CheckpointError, match=r"tensor '.*': cannot be written: File too large"):
                merge_fsdp_weights(tmp_path / "source", path, safe_serialization, remove_checkpoint_dir=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert os.listdir(output) == [name]
    assert (output / name).read_text() == "old"
    assert not (tmp_path / "new").exists()
    assert (tmp_path / "source" / ".metadata").exists()


def test_a_disk_that_is_full_while_torch_saves(tmp_path: Path) -> None:
    tensors = {str(index): torch.tensor(index) for index in range(100)}
    save_with_torch(tmp_path / "source", tensors)
    merge_fsdp_weights(tmp_path / "source", tmp_path / "whole", safe_serialization=False)
    assert os.listdir(tmp_path / "whole") == ["pytorch_model.bin"]
    assert_same_bits(torch.load(tmp_path / "whole" / "pytorch_model.bin", weights_only=True), tensors)
    # A small tensor costs more in the archive than in the file that is mapped: with these limits that one is complete.
    num_bytes = (tmp_path / "whole" / "pytorch_model.bin").stat().st_size
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    for limit in (*range(64 * 101, num_bytes, num_bytes // 16), num_bytes - 1):
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limits[1]))
            with pytest.raises(CheckpointError, match=r"pytorch_model.bin: cannot be written: File too large"):
                merge_fsdp_weights(tmp_path / "source", tmp_path / "new", safe_serialization=False)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert not (tmp_path / "new").exists()


def test_a_directory_with_no_metadata_names_those_that_have_it(tmp_path: Path) -> None:
    for name in ("pytorch_model_fsdp_0", "optimizer_0"):
        save_with_torch(tmp_path / "step" / name, STATE)
    with pytest.raises(ValueError, match=f"or {tmp_path}/step/pytorch_model_fsdp_0"):
        merge_fsdp_weights(tmp_path / "step", tmp_path / "ours")
    assert not (tmp_path / "ours").exists()
    # accelerate means to name them, but looks only where there is no directory at all.
    with pytest.raises(BaseException, match="metadata") as caught:
        by_accelerate(tmp_path / "step", tmp_path / "theirs")
    assert "pytorch_model_fsdp_0" not in str(caught.value)


MEASURE = """
import json, sys
from tests.bench.memory import MemorySampler
from raysharding.distributed import merge_fsdp_weights
with MemorySampler() as memory:
    merge_fsdp_weights(sys.argv[1], sys.argv[2], sys.argv[3] == "safe")
print(memory.extra_bytes)
"""


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """200 MiB: five tensors of 40, in one chunk, rows, columns, transposed, and transposed columns.

    What is smaller than 32 MiB, malloc may keep when it is free.
    """
    directory = tmp_path_factory.mktemp("large")
    whole = torch.arange(40 << 18, dtype=torch.float32).reshape(-1, 2048)
    turned = whole.t().contiguous().t()
    parts = {"whole": cut(whole), "rows": cut(whole, (100, 2000)), "columns": cut(whole, (), (700,))}
    columns = [((0, 0), turned[:, :1000].t().clone().t()), ((0, 1000), turned[:, 1000:].t().clone().t())]
    return write_dcp(directory, {**parts, "turned": [((0, 0), turned)], "turned columns": columns})


@pytest.mark.parametrize("form", ["safe", pytest.param("bin", marks=pytest.mark.full)])
def test_memory_is_one_tensor_and_one_chunk(large: Path, form: str, tmp_path: Path) -> None:
    command = [sys.executable, "-c", MEASURE, str(large), str(tmp_path), form]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100, check=True)
    assert int(done.stdout) <= (40 + 40 + 24) * MIB
    if form == "safe":
        merged = load_file(tmp_path / "model.safetensors")
        assert_same_bits(merged, read_with_torch(large))
