"""What is in a save's directory and no save wrote outlasts every save, every removal, and every kill."""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from raysharding.checkpoint import SaveRecord, open_checkpoint
from raysharding.checkpoint.writing import (
    commit_staging,
    create_staging,
    remove_older,
    remove_staging,
    remove_unfinished,
    write_file,
)
from raysharding.checkpoint.writing.carry_over import carry_over, hand_back, swap_directories
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


@pytest.fixture
def final(tmp_path: Path) -> Path:
    """A save, and the user's things in its directory."""
    fill(tmp_path / "out", OURS | USERS)
    return tmp_path / "out"


@pytest.mark.parametrize("can_exchange", [True, False])
def test_an_overwrite_removes_a_save_and_nothing_else(
    final: Path, monkeypatch: pytest.MonkeyPatch, can_exchange: bool
) -> None:
    if not can_exchange:
        for module in ("commit", "carry_over"):
            monkeypatch.setattr(f"raysharding.checkpoint.writing.{module}.exchange", lambda first, second: False)
    (final / "runs" / "latest").symlink_to("a/b")
    (final / "dangling").symlink_to("nowhere")
    (final / "runs" / "a").chmod(0o750)
    os.utime(final / "runs" / "a", (1e9, 1e9))
    before = (final / "runs").stat().st_ino, (final / "train.py").stat().st_ino
    save_one(final)
    new = {"model.safetensors", "raysharding.save.json"}
    assert {name: data for name, data in files_of(final).items() if name not in new} == USERS
    assert new < files_of(final).keys()
    assert os.readlink(final / "runs" / "latest") == "a/b"
    assert os.readlink(final / "dangling") == "nowhere"
    assert ((final / "runs" / "a").stat().st_mode & 0o777, (final / "runs" / "a").stat().st_mtime) == (0o750, 1e9)
    assert (final / "train.py").stat().st_ino == before[1], "who writes to it goes on"
    assert ((final / "runs").stat().st_ino == before[0]) == can_exchange
    assert os.listdir(final.parent) == ["out"]
    assert list(open_checkpoint(final).tensors) == ["a"]


def test_a_folder_that_only_bears_the_name_of_a_saves_is_the_users(tmp_path: Path) -> None:
    theirs = {"optimizer/state.pt": b"theirs", "training/data.csv": b"theirs"}
    fill(tmp_path / "out", {"model.safetensors": b""} | theirs)
    save_one(tmp_path / "out")
    assert files_of(tmp_path / "out").items() >= theirs.items()


def test_small_files_that_a_save_copied_are_replaced_until_they_are_changed(tmp_path: Path) -> None:
    save_one(tmp_path / "out", 1.0, {"tokenizer.json": b"first", "vocab.txt": b"first", "special.json": b"first"})
    (tmp_path / "out" / "vocab.txt").write_bytes(b"edited")
    save_one(tmp_path / "out", 2.0, {"tokenizer.json": b"second", "vocab.txt": b"second"})
    found = files_of(tmp_path / "out")
    assert found["tokenizer.json"] == b"second", "it goes with the weights"
    assert found["vocab.txt"] == b"edited"
    assert found["special.json"] == b"first", "the new save has none"


@pytest.mark.parametrize("can_exchange", [True, False])
def test_folders_that_a_save_copied_are_replaced_and_the_users_files_in_them_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, can_exchange: bool
) -> None:
    if not can_exchange:
        for module in ("commit", "carry_over"):
            monkeypatch.setattr(f"raysharding.checkpoint.writing.{module}.exchange", lambda first, second: False)
    modules = {"modules.json": b'[{"path": "2_Dense"}]'}
    names = ("1_Pooling/config.json", "2_Dense/model.safetensors", "2_Dense/a/b.json", "x/edited.json", "y/kept.json")
    save_one(tmp_path / "out", 1.0, modules | dict.fromkeys(names, b"first"))
    mine = {"1_Pooling/notes.txt": b"mine", "x/edited.json": b"mine", "2_Dense/mine/config.json": b"mine"}
    fill(tmp_path / "out", mine)
    save_one(tmp_path / "out", 2.0, modules | dict.fromkeys(names[:3], b"second"))
    found = files_of(tmp_path / "out")
    assert found.items() >= (mine | dict.fromkeys(names[:3], b"second")).items()
    assert found["y/kept.json"] == b"first", "the new save has none"
    fill(tmp_path / "step-1", found | {"raysharding.manifest.json": b"{}"})
    remove_older(tmp_path / "step-2", 1)
    assert files_of(tmp_path / "step-1") == mine | {"y/kept.json": b"first"}, "no longer a save's"


def test_a_folder_that_a_save_copied_may_become_a_file(tmp_path: Path) -> None:
    save_one(tmp_path / "out", 1.0, {"tokenizer/vocab.txt": b"first"})
    save_one(tmp_path / "out", 2.0, {"tokenizer": b"second"})
    assert files_of(tmp_path / "out")["tokenizer"] == b"second"


@pytest.fixture
def mounted(final: Path) -> Iterator[Path]:
    """Another file system in the directory."""
    path = final / "volume"
    path.mkdir()
    if os.geteuid() or subprocess.call(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(path)]):
        pytest.skip("this machine does not let us mount a small file system")
    try:
        yield path
    finally:
        subprocess.check_call(["umount", str(path)])


def refused(final: Path, match: str) -> None:
    before = files_of(final)
    with pytest.raises(CheckpointError, match=match) as caught:
        create_staging(final, overwrite=True)
    assert "move that elsewhere, or save to another path" in str(caught.value)
    assert files_of(final) == before
    assert os.listdir(final.parent) == ["out"], "nothing is written"


def test_what_cannot_go_along_is_refused_with_a_list(final: Path, mounted: Path) -> None:
    (mounted / "file").write_bytes(b"x")
    refused(final, r"volume \(a mount point\), volume/file \(cannot be hard-linked: Invalid cross-device link\)")


def test_what_stands_in_the_place_of_a_saves_is_refused(tmp_path: Path) -> None:
    fill(tmp_path / "out", {"model.safetensors": b"", "config.json/mine": b"", "optimizer/model.safetensors": b"mine"})
    refused(tmp_path / "out", r"config.json \(not a save's.*optimizer/model.safetensors \(not a save's")


def test_a_file_system_without_links_is_seen_before_a_byte_is_written(
    final: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", fail)
    refused(final, r"README.md \(cannot be hard-linked: Operation not permitted\), .* and 2 more")
    save_one(final.parent / "plain", 1.0, {"tokenizer.json": b"{}"})
    save_one(final.parent / "plain", 2.0)  # of its own save there is nothing to link
    assert files_of(final.parent / "plain")["tokenizer.json"] == b"{}"


def test_a_disk_that_is_full_by_then_is_what_the_error_says(final: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    staging = create_staging(final, overwrite=True)
    monkeypatch.setattr(os, "link", fail)
    with pytest.raises(CheckpointError, match=r"cannot commit .*: No space left on device$"):
        commit_staging(staging, final, overwrite=True)
    remove_staging(staging)
    assert os.listdir(final.parent) == ["out"]


def test_what_comes_while_a_save_is_written_stays(final: Path) -> None:
    with StagedDirectory(final, overwrite=True) as staged:
        save(Path(staged.path) / "model.safetensors", {"a": torch.zeros(3)})
        fill(final, {"late.txt": b"late", "runs/late": b"late", "README.md": b"edited"})
        with (final / "train.py").open("ab") as file:
            staged.commit()
            file.write(b"\n# later")
    found = files_of(final)
    assert (found["late.txt"], found["runs/late"], found["README.md"]) == (b"late", b"late", b"edited")
    assert found["train.py"] == USERS["train.py"] + b"\n# later"


def test_what_changes_after_the_rename_stays_changed(final: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The new checkpoint is in its place, and what it replaced is not yet removed."""

    def slow_swap(old: str, directory: str) -> set[str]:
        (final / "runs" / "a" / "early").write_bytes(b"early")
        return swap_directories(old, directory)

    def slow(old: str, directory: str, **moved: set[str]) -> None:
        (final / "runs" / "late").write_bytes(b"late")
        (final / "checkpoint-500" / "model.safetensors").unlink()
        hand_back(old, directory, **moved)

    monkeypatch.setattr("raysharding.checkpoint.writing.commit.swap_directories", slow_swap)
    monkeypatch.setattr("raysharding.checkpoint.writing.commit.hand_back", slow)
    save_one(final)
    found = files_of(final)
    assert found.get("runs/a/early") == b"early"
    assert found.get("runs/late") == b"late"
    assert "checkpoint-500/model.safetensors" not in found
    assert USERS.keys() - found.keys() == {"checkpoint-500/model.safetensors"}


def test_what_its_user_removes_while_a_save_commits_is_gone(final: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a trainer does that rotates its checkpoints there."""
    link = os.link

    def slow(source: str, target: str, **options: Any) -> None:
        if "checkpoint-500" in source and (final / "checkpoint-500").exists():
            shutil.rmtree(final / "checkpoint-500")
        link(source, target, **options)

    monkeypatch.setattr(os, "link", slow)
    save_one(final)
    kept = {name: data for name, data in USERS.items() if not name.startswith("checkpoint-500")}
    assert files_of(final).items() >= kept.items()
    assert not list(final.glob("checkpoint-500/**/*.safetensors"))
    assert os.listdir(final.parent) == ["out"]


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


def test_directories_that_nobody_may_write_to_leave_nothing_behind(without_rights: Path) -> None:
    final = without_rights / "out"
    fill(final, OURS | {"frozen/a": b"a", "runs/frozen/b": b"b", "secret": b"c"})
    (final / "frozen").chmod(0o555)
    (final / "runs" / "frozen").chmod(0o555)
    (final / "secret").chmod(0)
    for value in range(2):
        save_one(final, value)
        assert os.listdir(without_rights) == ["out"]
    with StagedDirectory(final, overwrite=True) as staged:
        carry_over(str(final), staged.path)  # and then the disk fails
    assert os.listdir(without_rights) == ["out"]
    assert [(final / "frozen" / "a").read_bytes(), (final / "runs" / "frozen" / "b").read_bytes()] == [b"a", b"b"]
    assert [(final / name).stat().st_mode & 0o777 for name in ("frozen", "runs/frozen", "secret")] == [0o555, 0o555, 0]
    fill(without_rights / "step-1", OURS | {"frozen/a": b"a"})
    (without_rights / "step-1" / "frozen").chmod(0o555)
    remove_older(without_rights / "step-2", 1)
    assert sorted(os.listdir(without_rights)) == ["out", "step-1"]


def test_a_parent_that_nobody_may_write_to_is_named_with_the_cure(without_rights: Path) -> None:
    save_one(without_rights / "out")
    without_rights.chmod(0o555)
    with pytest.raises(CheckpointError, match=f"Permission denied; .*so {without_rights} must be writable.*: save to"):
        save_one(without_rights / "out")
    remove_unfinished(str(without_rights / "out"), "0" * 12)
    without_rights.chmod(0)
    remove_unfinished(str(without_rights / "out"), "0" * 12)  # out of sight: nothing is known of it
    without_rights.chmod(0o755)


@pytest.mark.timeout(60)
def test_killed_at_any_moment_it_loses_nothing(final: Path) -> None:
    save_one(final, 0)
    moments = random.Random(0)
    for _ in range(20):
        child = os.fork()
        if child == 0:
            # The child must never get back into pytest.
            try:
                for value in range(10_000):
                    save_one(final, value)
            finally:
                os._exit(1)
        time.sleep(moments.uniform(0.002, 0.08))
        os.kill(child, signal.SIGKILL)
        assert os.WIFSIGNALED(os.waitpid(child, 0)[1])
        assert files_of(final).items() >= USERS.items()
        assert list(open_checkpoint(final).tensors) == ["a"]
    save_one(final, 1)
    assert files_of(final).items() >= USERS.items()


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
        save_one(tmp_path / "out")
        assert (tmp_path / "secret.json").exists()
        assert (tmp_path / "out" / "a.json").exists()
