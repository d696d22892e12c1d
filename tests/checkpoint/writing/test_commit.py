"""A destination holds the old checkpoint or the new one, whole, whatever happens to the save."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from raysharding.checkpoint import FileReader, open_checkpoint
from raysharding.checkpoint.format import new_token, staging_path
from raysharding.checkpoint.format.index import FileSet, resolve_files
from raysharding.checkpoint.storage.remote import Storage
from raysharding.checkpoint.writing import (
    check_destination,
    commit,
    commit_staging,
    create_staging,
    remove_staging,
    write_file,
    write_index,
)
from raysharding.errors import CheckpointError
from tests.checkpoint.build import save
from tests.checkpoint.staged import StagedDirectory


def save_value(final: Path, value: int, *, overwrite: bool = False) -> None:
    with StagedDirectory(final, overwrite=overwrite) as staged:
        tensors = {"a": torch.full((1000,), value), "b": torch.tensor(value)}
        save(Path(staged.path) / "model.safetensors", tensors, {"value": str(value)})
        write_file(staged.path, "config.json", b'{"value": %d}' % value)
        staged.commit()


def load_value(final: Path) -> int:
    """The value that the checkpoint holds; fails where its parts disagree."""
    checkpoint = open_checkpoint(final)
    with FileReader(checkpoint.files) as reader:
        values = reader.read_tensor(checkpoint.tensors["a"])
        value = int(reader.read_tensor(checkpoint.tensors["b"]))
    assert values.eq(value).all()
    assert checkpoint.config == {"value": value}
    return value


def names(directory: Path) -> list[str]:
    return sorted(os.listdir(directory))


def test_a_save_makes_parents_and_leaves_nothing_else(tmp_path: Path) -> None:
    check_destination(tmp_path / "out" / "deep" / "ckpt", overwrite=False)
    assert names(tmp_path) == []
    save_value(tmp_path / "out" / "deep" / "ckpt", 1)
    assert load_value(tmp_path / "out" / "deep" / "ckpt") == 1
    assert names(tmp_path / "out" / "deep") == ["ckpt"]


def test_an_existing_checkpoint_is_kept_unless_overwrite_is_set(tmp_path: Path) -> None:
    (tmp_path / "ckpt").mkdir()  # an empty directory is free
    save_value(tmp_path / "ckpt", 1)
    with pytest.raises(CheckpointError, match="exists already: pass overwrite=True") as caught:
        save_value(tmp_path / "ckpt", 2)
    assert caught.value.path == str(tmp_path / "ckpt")
    assert load_value(tmp_path / "ckpt") == 1
    save_value(tmp_path / "ckpt", 2, overwrite=True)
    assert load_value(tmp_path / "ckpt") == 2
    save_value(tmp_path / "new", 3, overwrite=True)
    assert load_value(tmp_path / "new") == 3
    assert names(tmp_path) == ["ckpt", "new"]


@pytest.mark.parametrize("kind", ["work", "config only", "git", "file"])
def test_what_is_not_a_checkpoint_is_never_replaced(tmp_path: Path, kind: str) -> None:
    final = tmp_path / "place"
    if kind == "file":
        final.write_text("precious")
    else:
        final.mkdir()
        (final / {"work": "thesis.tex", "config only": "config.json", "git": "model.safetensors"}[kind]).write_text(
            "{}"
        )
    if kind == "git":
        (final / ".git").mkdir()
    with pytest.raises(CheckpointError, match=r"replace it: remove it yourself|what no save wrote|is not a directory"):
        save_value(final, 1, overwrite=True)
    assert final.exists()
    assert names(tmp_path) == ["place"]


def test_a_symlink_keeps_leading_to_the_checkpoint(tmp_path: Path) -> None:
    save_value(tmp_path / "disk" / "step-1", 1)
    (tmp_path / "latest").symlink_to(tmp_path / "disk" / "step-1")
    save_value(tmp_path / "latest", 2, overwrite=True)
    assert (tmp_path / "latest").is_symlink()
    assert load_value(tmp_path / "disk" / "step-1") == 2
    assert names(tmp_path / "disk") == ["step-1"]


def test_a_failed_save_removes_what_it_wrote(tmp_path: Path) -> None:
    save_value(tmp_path / "ckpt", 1)

    def fail() -> None:
        with StagedDirectory(tmp_path / "ckpt", overwrite=True) as staged:
            save(Path(staged.path) / "model.safetensors", {"a": torch.zeros(2)})
            assert len(names(tmp_path)) == 2
            raise RuntimeError("boom")

    with pytest.raises(RuntimeError, match="boom"):
        fail()
    assert names(tmp_path) == ["ckpt"]
    assert load_value(tmp_path / "ckpt") == 1
    with StagedDirectory(tmp_path / "other"):
        pass  # left without commit
    assert names(tmp_path) == ["ckpt"]


def test_ranks_share_one_staging_directory(tmp_path: Path) -> None:
    token = new_token()
    staging = create_staging(tmp_path / "ckpt", overwrite=False, token=token)
    assert staging == staging_path(tmp_path / "ckpt", token)  # what the other ranks work out
    save(Path(staging) / "model.safetensors", {"a": torch.zeros(2)})
    with pytest.raises(CheckpointError, match="cannot make a directory: File exists"):
        create_staging(tmp_path / "ckpt", overwrite=False, token=token)
    commit_staging(staging, tmp_path / "ckpt", overwrite=False)
    assert names(tmp_path / "ckpt") == ["model.safetensors"]
    remove_staging(staging)  # gone already: fine


def test_of_two_saves_to_one_place_the_second_is_refused(tmp_path: Path) -> None:
    first, second = StagedDirectory(tmp_path / "ckpt"), StagedDirectory(tmp_path / "ckpt")
    for staged in (first, second):
        save(Path(staged.path) / "model.safetensors", {"a": torch.zeros(2)})
    first.commit()
    with second, pytest.raises(CheckpointError, match="was made by another save meanwhile"):
        second.commit()
    assert names(tmp_path) == ["ckpt"]


def test_a_save_killed_between_two_renames_is_found_by_the_loader(tmp_path: Path) -> None:
    save_value(tmp_path / "ckpt", 1)
    (tmp_path / "ckpt").rename(tmp_path / ".ckpt.old-0abc")
    with pytest.raises(CheckpointError, match=r"interrupted save left the previous checkpoint in .*\.ckpt\.old-0abc"):
        open_checkpoint(tmp_path / "ckpt")


def test_without_exchange_two_renames_do_and_the_second_one_failing_puts_the_old_checkpoint_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commit, "_exchange", lambda first, second: False)
    for value in (0, 1):
        save_value(tmp_path / "ckpt", value, overwrite=True)
        assert load_value(tmp_path / "ckpt") == value
    rename = os.rename

    def fail(source: str, target: str) -> None:
        if ".tmp-" in source and ".tmp-" not in target:
            raise OSError(5, "Input/output error")
        rename(source, target)

    monkeypatch.setattr(os, "rename", fail)
    with pytest.raises(CheckpointError, match=r"cannot commit .*: Input/output error"):
        save_value(tmp_path / "ckpt", 2, overwrite=True)
    assert load_value(tmp_path / "ckpt") == 1
    assert names(tmp_path) == ["ckpt"]


def test_a_reader_sees_the_old_checkpoint_or_the_new_one(tmp_path: Path) -> None:
    final = tmp_path / "ckpt"
    save_value(final, 0)
    seen: set[str] = set()
    problems: list[str] = []
    done = threading.Event()

    def read() -> None:
        while not done.is_set():
            try:
                checkpoint = open_checkpoint(final)
            except CheckpointError as error:
                problems.append(str(error))
                continue
            assert checkpoint.config is not None
            if checkpoint.metadata["value"] != str(checkpoint.config["value"]):
                problems.append(f"{checkpoint.metadata} with {checkpoint.config}")
            seen.add(checkpoint.metadata["value"])

    thread = threading.Thread(target=read)
    thread.start()
    for value in range(1, 40):
        save_value(final, value, overwrite=True)
        time.sleep(0.02)  # saves without a pause would leave a reader on a loaded machine no time between two
    done.set()
    thread.join()
    assert not problems
    assert len(seen) > 1


@pytest.mark.parametrize("num_saves", [1, 100])
def test_a_checkpoint_replaced_while_it_is_opened_is_opened_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_saves: int
) -> None:
    final = tmp_path / "ckpt"
    save_value(final, 1)
    saves = iter(range(num_saves))

    def resolve_then_replace(storage: Storage, path: str) -> FileSet:
        files = resolve_files(storage, path)
        if next(saves, None) is not None:
            with StagedDirectory(final, overwrite=True) as staged:  # under another file name
                other = "model.safetensors" if files.index_path else "model-00001-of-00001.safetensors"
                save(Path(staged.path) / other, {"c": torch.zeros(1)})
                if not files.index_path:
                    write_index(staged.path, {"c": other}, 4)
                staged.commit()
        return files

    monkeypatch.setattr("raysharding.checkpoint.format.checkpoint.resolve_files", resolve_then_replace)
    if num_saves == 1:
        assert list(open_checkpoint(final).tensors) == ["c"]
    else:
        with pytest.raises(CheckpointError, match="was replaced 10 times while it was opened"):
            open_checkpoint(final)


@pytest.mark.timeout(60)
def test_a_save_killed_at_any_moment_leaves_a_whole_checkpoint(tmp_path: Path) -> None:
    final = tmp_path / "ckpt"
    save_value(final, 0)
    moments = random.Random(0)
    seen = []
    for _ in range(20):
        last = load_value(final)
        child = os.fork()
        if child == 0:
            # The child must never get back into pytest.
            try:
                for value in range(last + 1, last + 10_000):
                    save_value(final, value, overwrite=True)
            finally:
                os._exit(1)
        time.sleep(moments.uniform(0.002, 0.08))
        os.kill(child, signal.SIGKILL)
        assert os.WIFSIGNALED(os.waitpid(child, 0)[1])
        seen.append(load_value(final))
        assert seen[-1] >= last
    assert seen[-1] > 0
    # What the killed saves left behind hinders no one.
    save_value(final, 100_000, overwrite=True)
    assert load_value(final) == 100_000


@pytest.fixture(params=["tmpfs", "bind"])
def volume(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """A mount point, as a container's volume is one."""
    path, source = tmp_path / "volume", tmp_path / "source"
    path.mkdir()
    source.mkdir()
    what = ["--bind", str(source)] if request.param == "bind" else ["-t", "tmpfs", "-o", "size=64k", "tmpfs"]
    if os.geteuid() or subprocess.call(["mount", *what, str(path)]):
        pytest.skip("this machine does not let us mount")
    try:
        yield path
    finally:
        subprocess.check_call(["umount", str(path)])


def test_a_mount_point_is_refused_before_a_byte_is_written(volume: Path) -> None:
    """A rename that replaced it would fail, when all was written beside it: to another disk."""
    for overwrite in (False, True):
        with pytest.raises(
            CheckpointError, match=r"is a mount point, .*: save to a directory in it, such as .*/volume/"
        ):
            create_staging(volume, overwrite=overwrite)
        assert names(volume.parent) == ["source", "volume"]
        (volume / "model.safetensors").touch()
    save_value(volume / "model", 1)
    save_value(volume / "model", 2, overwrite=True)
    assert load_value(volume / "model") == 2
    assert names(volume) == ["model", "model.safetensors"]
