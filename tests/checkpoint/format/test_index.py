"""From the user's path to the files: what is found, what is refused, and that no name or symlink leads outside."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from raysharding.checkpoint import open_checkpoint
from raysharding.checkpoint.format import new_token, staging_path
from tests.checkpoint.build import refused, save, save_sharded, sidecar_files

ONE = {"a": torch.arange(4)}
TWO = {"b": torch.arange(6.0).reshape(2, 3)}
FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    return save_sharded(tmp_path / "ckpt", {FIRST: ONE, SECOND: TWO})


def write_index(directory: Path, index: Any) -> None:
    text = index if isinstance(index, str) else json.dumps(index)
    (directory / "model.safetensors.index.json").write_text(text)


def test_every_way_to_name_a_checkpoint(sharded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    index = sharded / "model.safetensors.index.json"
    spaced = tmp_path / "with space"
    sharded.rename(spaced)
    (tmp_path / "ckpt").symlink_to(spaced)
    monkeypatch.chdir(tmp_path)
    uris = (f"file://{index}", spaced.as_uri(), f"file://localhost{sharded}")
    for path in (sharded, str(sharded), index, "ckpt", *uris):
        checkpoint = open_checkpoint(path)
        assert checkpoint.path == str(path)
        assert list(checkpoint.tensors) == ["a", "b"]
        assert [os.path.basename(file.path) for file in checkpoint.files] == [FIRST, SECOND]
        assert all(os.path.isabs(file.path) for file in checkpoint.files)
    single = open_checkpoint(sharded / SECOND)
    assert list(single.tensors) == ["b"]


def test_a_directory_with_one_file(tmp_path: Path) -> None:
    save(tmp_path / "weights.safetensors", ONE)
    assert list(open_checkpoint(tmp_path).tensors) == ["a"]
    save(tmp_path / "model.safetensors", TWO)
    assert list(open_checkpoint(tmp_path).tensors) == ["b"]  # the standard name comes first
    save(tmp_path / ".hidden.tmp", ONE)
    assert list(open_checkpoint(tmp_path).tensors) == ["b"]


def test_an_index_of_another_name_and_one_that_names_the_single_file(tmp_path: Path) -> None:
    save(tmp_path / "model.safetensors", ONE)
    write_index(tmp_path, {"weight_map": {"a": "model.safetensors"}})
    assert list(open_checkpoint(tmp_path).tensors) == ["a"]
    other = save_sharded(tmp_path / "other", {FIRST: ONE, SECOND: TWO})
    (other / "model.safetensors.index.json").rename(other / "diffusion.safetensors.index.json")
    assert list(open_checkpoint(other).tensors) == ["a", "b"]
    save(other / "adapter_model.safetensors", TWO)
    assert list(open_checkpoint(other).tensors) == ["a", "b"]
    (other / "adapter_config.json").write_text("{}")
    assert list(open_checkpoint(other).tensors) == ["b"]  # a LoRA save into that directory


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ([], "holds no .safetensors file; it holds nothing: give the directory or index of the weights"),
        (["notes.txt"], "holds no .safetensors file; it holds notes.txt"),
        (["pytorch_model.bin", "config.json"], r"only pickled weights, .*holds pytorch_model.bin: .*save_pretrained"),
        (["x.safetensors", "y.safetensors"], "holds 2 .safetensors files .*give one file, or restore the index"),
    ],
)
def test_a_directory_without_a_checkpoint_is_described(tmp_path: Path, files: list[str], message: str) -> None:
    for name in files:
        (tmp_path / name).write_text("{}")
    assert refused(tmp_path, message).path == str(tmp_path)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("", "path '' is none"),
        ("meta-llama/Llama-3.2-1B", "HF_HUB_OFFLINE is set, and the Hugging Face cache .* does not hold it"),
        ("nowhere/at/all", "no such file or directory$"),
        ("s4://bucket/ckpt", "Unrecognized filesystem type in URI"),
        ("file://otherhost/ckpt", "is not a local file URI"),
        ("weights.bin", "pickled weights are never read"),
        ("readme.md", "is neither a directory"),
        ("with\0nul", "is none: give a directory"),
    ],
)
def test_a_path_to_something_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, message: str) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    for name in ("weights.bin", "readme.md"):
        (tmp_path / name).write_text("")
    refused(path, message)


def test_both_an_index_and_another_single_file_are_ambiguous(sharded: Path) -> None:
    save(sharded / "model.safetensors", ONE)
    refused(sharded, "give the path of the one you mean")
    assert list(open_checkpoint(sharded / "model.safetensors").tensors) == ["a"]


def test_an_unfinished_save_is_ignored_beside_and_refused_when_named(sharded: Path) -> None:
    partial = Path(staging_path(sharded, new_token()))
    partial.mkdir()
    save(partial / "model.safetensors", ONE)
    assert list(open_checkpoint(sharded).tensors) == ["a", "b"]
    refused(partial, "unfinished save")


@pytest.mark.parametrize(
    ("index", "tensor", "message"),
    [
        ("[]", None, "index is a JSON list"),
        ("{", None, "index is not JSON"),
        ("{}", None, "index has no weight_map"),
        ({"weight_map": {}}, None, "index has no weight_map"),
        ({"weight_map": ["a"]}, None, "index has no weight_map"),
        ({"weight_map": {"a": 1}}, "a", "index maps it to 1"),
        (f'{{"weight_map":{{"a":"{FIRST}","a":"{SECOND}"}}}}', None, "index gives the key 'a' twice"),
        (f'{{"weight_map":{{"a":"{FIRST}"}},"weight_map":{{}}}}', None, "index gives the key 'weight_map' twice"),
        ('{"x":' + "[" * 100_000, None, "index is nested too deep"),
        ({"weight_map": {"a": ".."}}, "a", "nothing that leaves its directory"),
        ({"weight_map": {"a": "../x.safetensors"}}, "a", "nothing that leaves its directory"),
        ({"weight_map": {"a": "/etc/x.safetensors"}}, "a", "nothing that leaves its directory"),
        ({"weight_map": {"a": "sub/x.safetensors"}}, "a", "nothing that leaves its directory"),
        ({"weight_map": {"a": "sub\\x.safetensors"}}, "a", "nothing that leaves its directory"),
        ({"weight_map": {"a": "x\0.safetensors"}}, "a", "nothing that leaves its directory"),
        ({"weight_map": {"a": ""}}, "a", "not a .safetensors file"),
        ({"weight_map": {"a": "pytorch_model.bin"}}, "a", "not a .safetensors file"),
        ({"weight_map": {"a": "\ud800.safetensors"}}, None, "string that is not Unicode text"),
        ({"weight_map": {"a": "x" * 5000 + ".safetensors"}}, "a", "nothing that leaves its directory"),
        ({"weight_map": {"a": FIRST, "b": "model-3.safetensors"}}, "b", "'model-3.safetensors', which is missing"),
        ({"weight_map": {"a": FIRST, "b": SECOND, "z": FIRST}}, "z", "index says it is in .*, but no file holds it"),
        ({"weight_map": {"a": SECOND, "b": SECOND}}, "a", "but no file holds it"),
        ({"weight_map": {"a": SECOND, "b": FIRST}}, "a", f"index says it is in {SECOND}, but it is in {FIRST}"),
    ],
)
def test_a_wrong_index_is_refused(sharded: Path, index: Any, tensor: str | None, message: str) -> None:
    write_index(sharded, index)
    error = refused(sharded, message)
    assert (error.path, error.tensor) == (str(sharded / "model.safetensors.index.json"), tensor)


def test_a_tensor_that_the_index_does_not_list(tmp_path: Path) -> None:
    save(tmp_path / FIRST, ONE | TWO)
    write_index(tmp_path, {"weight_map": {"a": FIRST}})
    assert refused(tmp_path, f"is in {FIRST}, but the index does not list it").tensor == "b"


def test_a_tensor_in_two_files(tmp_path: Path) -> None:
    save(tmp_path / FIRST, ONE)
    save(tmp_path / SECOND, ONE | TWO)
    write_index(tmp_path, {"weight_map": {"a": FIRST, "b": SECOND}})
    error = refused(tmp_path, f"in this file and in {FIRST} too")
    assert (error.path, error.tensor) == (str(tmp_path / SECOND), "a")


@pytest.mark.parametrize("how", ["index", "directory", "config", "index itself"])
def test_a_symlink_out_of_the_directory_is_refused(sharded: Path, tmp_path: Path, how: str) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    if how == "directory":
        save(elsewhere / "blob", ONE)
        sharded = tmp_path / "single"
        sharded.mkdir()
        link = sharded / "model.safetensors"
    else:
        names = {"index": FIRST, "config": "config.json", "index itself": "model.safetensors.index.json"}
        link = sharded / names[how]
        (elsewhere / "blob").write_bytes(link.read_bytes() if link.exists() else b"{}")
        link.unlink(missing_ok=True)
    link.symlink_to(elsewhere / "blob")
    assert refused(sharded, r"is a symlink to .*elsewhere/blob, outside the checkpoint").path == str(link)


def test_symlinks_inside_and_one_that_the_user_names_are_followed(sharded: Path, tmp_path: Path) -> None:
    (sharded / FIRST).rename(sharded / "blob")
    (sharded / FIRST).symlink_to("blob")
    assert list(open_checkpoint(sharded).tensors) == ["a", "b"]
    (tmp_path / "link.safetensors").symlink_to(sharded / SECOND)
    assert list(open_checkpoint(tmp_path / "link.safetensors").tensors) == ["b"]


def test_the_layout_of_the_hub_cache_is_followed_but_not_out_of_it(sharded: Path, tmp_path: Path) -> None:
    cache = tmp_path / "hub" / "models--org--name"
    snapshot = cache / "snapshots" / "0123"
    (cache / "blobs").mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for number, source in enumerate(sorted(sharded.iterdir())):
        source.rename(cache / "blobs" / str(number))
        (snapshot / source.name).symlink_to(Path("../../blobs") / str(number))
    (cache / "blobs" / "c").write_text('{"model_type": "bert"}')
    (snapshot / "config.json").symlink_to("../../blobs/c")
    checkpoint = open_checkpoint(snapshot)
    assert list(checkpoint.tensors) == ["a", "b"]
    assert checkpoint.config == {"model_type": "bert"}
    assert sidecar_files(checkpoint) == ("config.json",)

    other = tmp_path / "hub" / "models--org--other"
    other.mkdir()
    (cache / "blobs" / "0").rename(other / "0")
    (snapshot / FIRST).unlink()
    (snapshot / FIRST).symlink_to(other / "0")
    refused(snapshot, "outside the checkpoint")


@pytest.mark.timeout(10)
@pytest.mark.parametrize("name", [FIRST, "model.safetensors.index.json", "config.json"])
def test_a_named_pipe_is_refused_and_not_waited_for(sharded: Path, name: str) -> None:
    (sharded / name).unlink(missing_ok=True)
    os.mkfifo(sharded / name)
    refused(sharded, "not a regular file")


def test_dangling_symlinks(sharded: Path) -> None:
    (sharded / "config.json").symlink_to("gone")
    assert refused(sharded, "cannot be read: No such file").path == str(sharded / "config.json")
    (sharded / FIRST).unlink()
    (sharded / FIRST).symlink_to("gone")
    refused(sharded, "cannot be read: No such file")
