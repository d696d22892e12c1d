"""What is in a save's directory and no save wrote: an overwrite is refused, and a removal leaves it."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from raysharding.checkpoint import SaveRecord
from raysharding.checkpoint.writing import (
    create_staging,
    remove_older,
    remove_unfinished,
    write_file,
)
from raysharding.errors import CheckpointError
from tests.checkpoint.build import save
from tests.checkpoint.staged import StagedDirectory

OURS = {
    "config.json": b"{}",
    "generation_config.json": b"{}",
    "adapter_config.json": b"{}",
    "adapter_model.safetensors": b"",
    "model-00001-of-00002.safetensors": b"",
    "model-00002-of-00002.safetensors": b"",
    "model.safetensors.index.json": b"{}",
    "raysharding.manifest.json": b"{}",
    "optimizer/raysharding.optimizer.json": b"{}",
    "optimizer/model.safetensors": b"",
    "optimizer/raysharding.manifest.json": b"{}",
    "training/raysharding.training.json": b"{}",
}
"""What an earlier save has written, with an optimizer, in other files than the next one."""
USERS = {
    "README.md": b"a model card",
    "tokenizer.json": b"{}",
    "train.py": b"import raysharding",
    ".gitattributes": b"*.safetensors",
    "consolidated.00.pth": b"pickled",
    "checkpoint-500/model.safetensors": b"somebody else's",
    "checkpoint-500/optimizer/model.safetensors": b"somebody else's",
    "runs/a/b/events": b"curve",
    "optimizer/notes.txt": b"mine",
    "training/log.txt": b"mine",
}


def fill(directory: Path, files: dict[str, bytes]) -> None:
    for name, data in files.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_bytes(data)


def files_of(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def save_one(final: Path, value: float = 1.0, sidecars: dict[str, bytes] | None = None) -> None:
    with StagedDirectory(final, overwrite=True) as staged:
        save(Path(staged.path) / "model.safetensors", {"a": torch.full((3,), value)})
        SaveRecord.of("0a1b", sidecars or {}).write(staged.path)
        for name, data in (sidecars or {}).items():
            write_file(staged.path, name, data)
        staged.commit()


@pytest.mark.parametrize(
    ("theirs", "match"),
    [
        (
            USERS,
            r"holds what no save wrote: .gitattributes, README.md, checkpoint-500, consolidated.00.pth, optimizer/",
        ),
        (
            USERS,
            r"optimizer/notes.txt, runs, tokenizer.json, train.py and 1 more; .*: move these elsewhere, or save to",
        ),
        ({"optimizer/state.pt": b"theirs", "training/data.csv": b""}, r"wrote: optimizer/state.pt, training/data.csv;"),
        ({".git/HEAD": b"ref"}, r"wrote: .git;"),
    ],
)
def test_an_overwrite_is_refused_with_a_list(tmp_path: Path, theirs: dict[str, bytes], match: str) -> None:
    fill(tmp_path / "out", OURS | theirs)
    with pytest.raises(CheckpointError, match=match):
        create_staging(tmp_path / "out", overwrite=True)
    assert files_of(tmp_path / "out") == OURS | theirs
    assert os.listdir(tmp_path) == ["out"], "nothing is written"


def test_all_that_saves_write_is_replaced(tmp_path: Path) -> None:
    fill(tmp_path / "out", OURS)
    save_one(tmp_path / "out")
    assert files_of(tmp_path / "out").keys() == {"model.safetensors", "raysharding.save.json"}
    assert os.listdir(tmp_path) == ["out"]


def test_small_files_that_a_save_copied_are_replaced_until_they_are_changed(tmp_path: Path) -> None:
    names = ("tokenizer.json", "1_Pooling/config.json", "2_Dense/model.safetensors", "2_Dense/a/b.json", "x/y.json")
    modules = {"modules.json": b'[{"path": "2_Dense"}]'}
    save_one(tmp_path / "out", 1.0, modules | dict.fromkeys(names, b"first"))
    save_one(tmp_path / "out", 2.0, modules | dict.fromkeys(names[:-1], b"second"))
    found = files_of(tmp_path / "out")
    assert {name: found.get(name) for name in names} == {**dict.fromkeys(names[:-1], b"second"), "x/y.json": None}
    (tmp_path / "out" / "tokenizer.json").write_bytes(b"edited")
    fill(tmp_path / "out", {"2_Dense/a/mine/config.json": b"mine"})
    with pytest.raises(CheckpointError, match=r"wrote: 2_Dense/a/mine, tokenizer.json;"):
        save_one(tmp_path / "out", 3.0)
    fill(tmp_path / "step-1", files_of(tmp_path / "out") | {"raysharding.manifest.json": b"{}"})
    remove_older(tmp_path / "step-2", 1)
    assert files_of(tmp_path / "step-1") == {"tokenizer.json": b"edited", "2_Dense/a/mine/config.json": b"mine"}


def test_a_folder_that_a_save_copied_may_become_a_file(tmp_path: Path) -> None:
    save_one(tmp_path / "out", 1.0, {"tokenizer/vocab.txt": b"first"})
    save_one(tmp_path / "out", 2.0, {"tokenizer": b"second"})
    assert files_of(tmp_path / "out")["tokenizer"] == b"second"


@pytest.mark.parametrize("theirs", ["optimizer", "training", "config.json/mine", "optimizer/model.safetensors/mine"])
def test_what_has_a_saves_name_and_another_kind_is_the_users(tmp_path: Path, theirs: str) -> None:
    fill(tmp_path / "out", {"model.safetensors": b"", theirs: b"mine"})
    with pytest.raises(CheckpointError, match=f"wrote: {theirs.removesuffix('/mine')};"):
        save_one(tmp_path / "out")


@pytest.fixture
def without_rights() -> Iterator[Path]:
    """A directory of a user without privileges, whose rights this process has meanwhile."""
    with tempfile.TemporaryDirectory() as made:
        user = os.geteuid()
        if not user:
            os.chown(made, 65534, 65534)
            os.seteuid(65534)
        try:
            yield Path(made)
        finally:
            os.seteuid(user)


def test_a_parent_that_nobody_may_write_to_is_named_with_the_cure(without_rights: Path) -> None:
    save_one(without_rights / "out")
    without_rights.chmod(0o555)
    with pytest.raises(CheckpointError, match=f"Permission denied; .*so {without_rights} must be writable.*: save to"):
        save_one(without_rights / "out")
    remove_unfinished(str(without_rights / "out"), "0" * 12)
    without_rights.chmod(0)
    remove_unfinished(str(without_rights / "out"), "0" * 12)  # out of sight: nothing is known of it
    without_rights.chmod(0o755)


def test_older_saves_go_and_what_was_put_beside_them_stays(tmp_path: Path) -> None:
    for number in (1, 2, 3):
        fill(tmp_path / f"step-{number}", OURS)
        copied = {"tokenizer.json": b"{}", "vocab.txt": b"words"}
        fill(tmp_path / f"step-{number}", copied)
        SaveRecord.of("0a1b", copied).write(str(tmp_path / f"step-{number}"))
    theirs = {"eval.json": b"[1]", "vocab.txt": b"edited", "runs/events": b"curve", "optimizer/notes.txt": b"mine"}
    fill(tmp_path / "step-2", theirs)
    remove_older(tmp_path / "step-3", 1)
    assert sorted(os.listdir(tmp_path)) == ["step-2", "step-3"]
    assert files_of(tmp_path / "step-2") == theirs
    remove_older(tmp_path / "step-3", 1)
    assert files_of(tmp_path / "step-2") == theirs


def test_a_record_that_cannot_be_trusted_names_nothing(tmp_path: Path) -> None:
    (tmp_path / "secret.json").write_bytes(b"{}")
    fill(tmp_path / "out", {"model.safetensors": b"", "a.json": b"{}"})
    digests = dict.fromkeys(("../secret.json", "a.json", "model.safetensors"), "0" * 64)
    for text in (json.dumps({"format_version": 1, "token": "", "sidecars": digests}), "[]", '{"sidecars": 3}', "\xff"):
        (tmp_path / "out" / "raysharding.save.json").write_text(text)
        with pytest.raises(CheckpointError, match=r"holds what no save wrote: a.json;"):
            save_one(tmp_path / "out")
        assert (tmp_path / "secret.json").exists()
        assert (tmp_path / "out" / "a.json").exists()
