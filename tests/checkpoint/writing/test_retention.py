"""Older saves are removed and nothing else is: what no save wrote is left, and an overwrite of it refused."""

from __future__ import annotations

import json
import os
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from raysharding.checkpoint import SaveRecord, writing
from raysharding.checkpoint.format import MANIFEST_NAME, new_token
from raysharding.checkpoint.writing import create_staging
from raysharding.errors import CheckpointError
from tests.checkpoint.build import save
from tests.checkpoint.staged import StagedDirectory


def save_a(path: Path) -> None:
    path.mkdir()
    (path / MANIFEST_NAME).write_text("{}")
    (path / "optimizer").mkdir()
    (path / "optimizer" / "model.safetensors").write_bytes(b"")
    (path / "optimizer" / "raysharding.optimizer.json").write_text("{}")


def test_the_newest_save_is_found_and_nothing_else(tmp_path: Path) -> None:
    assert writing.newest_save(str(tmp_path / "nothing"), "step-") is None
    assert writing.newest_save(str(tmp_path), "step-") is None
    for name in ("step-9", "step-10", "other-11", "step-12"):
        save_a(tmp_path / name)
        (tmp_path / name / "model.safetensors").write_bytes(b"")
    (tmp_path / "step-12" / "model.safetensors").unlink()  # a copy that was cut off
    (tmp_path / "step-13").mkdir()  # no save_a of ours
    (tmp_path / "step-13" / "model.safetensors").write_bytes(b"")
    staging = Path(create_staging(str(tmp_path / "step-14"), overwrite=False))  # a save_a that was killed
    save_a(staging / "step-15")
    assert writing.newest_save(str(tmp_path), "step-") == str(tmp_path / "step-10")


def test_what_is_no_older_save_stays(tmp_path: Path) -> None:
    names = ["step-1", "step-01", "step-3", "step-2", "step-10", "other-1", "step-1b", "run2-step-1", "step-", "step-9"]
    for name in names:
        save_a(tmp_path / name)
    (tmp_path / "step-0").mkdir()  # no save_a of ours
    (tmp_path / "step-0" / "notes").write_text("keep")
    (tmp_path / "step-02").write_text("a file")
    writing.remove_older(tmp_path / "step-3", 2)  # a larger number, which has been gone back from, does not count
    assert sorted(os.listdir(tmp_path)) == sorted([*names[2:], "step-0", "step-02"])


def left(path: Path, age_s: float = 7200) -> None:
    """What a killed save_a of another host leaves, a while ago."""
    save_a(path)
    then = time.time() - age_s
    for each in (*path.rglob("*"), path):
        os.utime(each, (then, then))


def test_what_killed_processes_of_other_hosts_left_goes_by_age(tmp_path: Path) -> None:
    for number in (1, 2):
        save_a(tmp_path / f"step-{number}")
    stale = [".step-1.tmp-0a1b0a1b0a1b", ".step-2.tmp-ffffffffffff", ".step-2.tmp-eeeeeeeeeeee00000000"]
    stays = [f".{name}-0a1b0a1b0a1b" for name in ("step-3.tmp", "other-1.tmp", "step-1.old")] + [".step-1.tmp-20250101"]
    for name in (*stale, *stays):
        left(tmp_path / name)
    left(tmp_path / ".step-1.tmp-aaaaaaaaaaaa", age_s=600)  # a save_a that is going on
    left(tmp_path / ".step-1.tmp-bbbbbbbbbbbb")
    (tmp_path / ".step-1.tmp-bbbbbbbbbbbb" / "optimizer" / "new").write_text("")  # so is this one
    (tmp_path / "step-1").rename(tmp_path / "elsewhere")
    (tmp_path / "step-1").symlink_to("gone/nowhere")
    (tmp_path / ".step-1.tmp-cccccccccccc").write_text("a file")
    (tmp_path / ".step-1.tmp-dddddddddddd").symlink_to(tmp_path / "step-2", target_is_directory=True)
    os.utime(tmp_path / ".step-1.tmp-cccccccccccc", (0, 0))
    there = sorted(os.listdir(tmp_path))
    writing.remove_left_overs(tmp_path / "step-2")
    assert sorted(os.listdir(tmp_path)) == [name for name in there if name not in stale]


def write_and_wait(final: Path) -> int:
    """Begin a save_a in another process, and return its pid once it writes."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        # The child must never get back into pytest.
        try:
            staging = Path(create_staging(final, overwrite=True))
            save_a(staging / "part")
            os.write(writer, b"x")
            time.sleep(60)
        finally:
            os._exit(1)
    os.close(writer)
    assert os.read(reader, 1) == b"x"
    os.close(reader)
    return child


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


@pytest.mark.parametrize("name", ["model", "step-2"])
def test_what_killed_processes_of_this_host_left_goes_at_once_and_live_ones_stay(tmp_path: Path, name: str) -> None:
    alive = write_and_wait(tmp_path / name)
    try:
        (living,) = os.listdir(tmp_path)
        for _ in range(5):
            kill(write_and_wait(tmp_path / name))
        kill(write_and_wait(tmp_path / f"other-{name}"))
        assert len(os.listdir(tmp_path)) == 7
        os.utime(tmp_path / living, (0, 0))  # age alone says nothing of one whose writer lives
        writing.remove_left_overs(tmp_path / name)
        assert [found for found in os.listdir(tmp_path) if not found.startswith(".other")] == [living]
    finally:
        kill(alive)
    writing.remove_left_overs(tmp_path / name)
    assert len(os.listdir(tmp_path)) == 1


def test_of_a_row_those_of_smaller_numbers_go_too(tmp_path: Path) -> None:
    for number in (1, 3):
        kill(write_and_wait(tmp_path / f"step-{number}"))
    writing.remove_left_overs(tmp_path / "step-2")
    (found,) = os.listdir(tmp_path)
    assert found.startswith(".step-3.tmp-")


def test_one_save_of_many_is_cleared_up_after_by_its_token(tmp_path: Path) -> None:
    tokens = [new_token() for _ in range(2)]
    for token in tokens:
        create_staging(tmp_path / "step-1", overwrite=False, token=token)
    writing.remove_unfinished(str(tmp_path / "step-1"), tokens[0])
    (found,) = os.listdir(tmp_path)
    assert tokens[1] in found
    writing.remove_staging(str(tmp_path / found))


def test_a_symlink_is_not_followed_out_of_the_directory(tmp_path: Path) -> None:
    save_a(tmp_path / "elsewhere")
    runs = tmp_path / "runs"
    runs.mkdir()
    (runs / "step-1").symlink_to(tmp_path / "elsewhere", target_is_directory=True)
    save_a(runs / "step-2")
    writing.remove_older(runs / "step-2", 1)
    assert (tmp_path / "elsewhere" / MANIFEST_NAME).exists()
    assert sorted(os.listdir(runs)) == ["step-1", "step-2"]


@pytest.mark.parametrize(("name", "is_fine"), [("step-1", True), ("1", True), ("v2.0-final", True), ("model", False)])
def test_a_name_needs_a_number(tmp_path: Path, name: str, is_fine: bool) -> None:
    if is_fine:
        writing.check_numbered(tmp_path / name)
        return
    with pytest.raises(ValueError, match=r"keep_last keeps saves by the number in their names, and .*model.* has none"):
        writing.check_numbered(tmp_path / name)


_NAMES = ["config.json", "generation_config.json", "adapter_config.json", "adapter_model.safetensors"]
_NAMES += ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "model.safetensors.index.json"]
_NAMES += ["raysharding.manifest.json", "optimizer/raysharding.optimizer.json", "optimizer/model.safetensors"]
_NAMES += ["optimizer/raysharding.manifest.json", "training/raysharding.training.json"]
OURS = {name: b"{}" if name.endswith(".json") else b"" for name in _NAMES}
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
            writing.write_file(staged.path, name, data)
        staged.commit()


@pytest.mark.parametrize(
    ("theirs", "match"),
    [
        (USERS, "no save wrote: .gitattributes, README.md, checkpoint-500, consolidated.00.pth, optimizer/notes.txt"),
        (USERS, "notes.txt, runs, tokenizer.json, train.py and 1 more; .*: move these elsewhere, or save to"),
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
    writing.remove_older(tmp_path / "step-2", 1)
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
    writing.remove_unfinished(str(without_rights / "out"), "0" * 12)
    without_rights.chmod(0)
    writing.remove_unfinished(str(without_rights / "out"), "0" * 12)  # out of sight: nothing is known of it
    without_rights.chmod(0o755)


def test_older_saves_go_and_what_was_put_beside_them_stays(tmp_path: Path) -> None:
    for number in (1, 2, 3):
        fill(tmp_path / f"step-{number}", OURS)
        copied = {"tokenizer.json": b"{}", "vocab.txt": b"words"}
        fill(tmp_path / f"step-{number}", copied)
        SaveRecord.of("0a1b", copied).write(str(tmp_path / f"step-{number}"))
    theirs = {"eval.json": b"[1]", "vocab.txt": b"edited", "runs/events": b"curve", "optimizer/notes.txt": b"mine"}
    fill(tmp_path / "step-2", theirs)
    writing.remove_older(tmp_path / "step-3", 1)
    assert sorted(os.listdir(tmp_path)) == ["step-2", "step-3"]
    assert files_of(tmp_path / "step-2") == theirs
    writing.remove_older(tmp_path / "step-3", 1)
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
