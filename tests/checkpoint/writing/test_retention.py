"""Older saves are removed, and nothing else is."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from raysharding.checkpoint.format import MANIFEST_NAME, new_token
from raysharding.checkpoint.writing import (
    check_numbered,
    create_staging,
    newest_save,
    remove_left_overs,
    remove_older,
    remove_staging,
    remove_unfinished,
)


def save(path: Path) -> None:
    path.mkdir()
    (path / MANIFEST_NAME).write_text("{}")
    (path / "optimizer").mkdir()
    (path / "optimizer" / "model.safetensors").write_bytes(b"")
    (path / "optimizer" / "raysharding.optimizer.json").write_text("{}")


def test_the_newest_save_is_found_and_nothing_else(tmp_path: Path) -> None:
    assert newest_save(str(tmp_path / "nothing"), "step-") is None
    assert newest_save(str(tmp_path), "step-") is None
    for name in ("step-9", "step-10", "other-11", "step-12"):
        save(tmp_path / name)
        (tmp_path / name / "model.safetensors").write_bytes(b"")
    (tmp_path / "step-12" / "model.safetensors").unlink()  # a copy that was cut off
    (tmp_path / "step-13").mkdir()  # no save of ours
    (tmp_path / "step-13" / "model.safetensors").write_bytes(b"")
    staging = Path(create_staging(str(tmp_path / "step-14"), overwrite=False))  # a save that was killed
    save(staging / "step-15")
    assert newest_save(str(tmp_path), "step-") == str(tmp_path / "step-10")


def test_what_is_no_older_save_stays(tmp_path: Path) -> None:
    names = ["step-1", "step-01", "step-3", "step-2", "step-10", "other-1", "step-1b", "run2-step-1", "step-", "step-9"]
    for name in names:
        save(tmp_path / name)
    (tmp_path / "step-0").mkdir()  # no save of ours
    (tmp_path / "step-0" / "notes").write_text("keep")
    (tmp_path / "step-02").write_text("a file")
    remove_older(tmp_path / "step-3", 2)  # a larger number, which has been gone back from, does not count
    assert sorted(os.listdir(tmp_path)) == sorted([*names[2:], "step-0", "step-02"])


def left(path: Path, age_s: float = 7200) -> None:
    """What a killed save of another host leaves, a while ago."""
    save(path)
    then = time.time() - age_s
    for each in (*path.rglob("*"), path):
        os.utime(each, (then, then))


def test_what_killed_processes_of_other_hosts_left_goes_by_age(tmp_path: Path) -> None:
    for number in (1, 2):
        save(tmp_path / f"step-{number}")
    stale = [".step-1.tmp-0a1b0a1b0a1b", ".step-2.tmp-ffffffffffff", ".step-2.tmp-eeeeeeeeeeee00000000"]
    stays = [
        ".step-3.tmp-0a1b0a1b0a1b",
        ".other-1.tmp-0a1b0a1b0a1b",
        ".step-1.tmp-20250101",
        ".step-1.old-0a1b0a1b0a1b",
    ]
    for name in (*stale, *stays):
        left(tmp_path / name)
    left(tmp_path / ".step-1.tmp-aaaaaaaaaaaa", age_s=600)  # a save that is going on
    left(tmp_path / ".step-1.tmp-bbbbbbbbbbbb")
    (tmp_path / ".step-1.tmp-bbbbbbbbbbbb" / "optimizer" / "new").write_text("")  # so is this one
    (tmp_path / "step-1").rename(tmp_path / "elsewhere")
    (tmp_path / "step-1").symlink_to("gone/nowhere")
    (tmp_path / ".step-1.tmp-cccccccccccc").write_text("a file")
    (tmp_path / ".step-1.tmp-dddddddddddd").symlink_to(tmp_path / "step-2", target_is_directory=True)
    os.utime(tmp_path / ".step-1.tmp-cccccccccccc", (0, 0))
    there = sorted(os.listdir(tmp_path))
    remove_left_overs(tmp_path / "step-2")
    assert sorted(os.listdir(tmp_path)) == [name for name in there if name not in stale]


def write_and_wait(final: Path) -> int:
    """Begin a save in another process, and return its pid once it writes."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        # The child must never get back into pytest.
        try:
            staging = Path(create_staging(final, overwrite=True))
            save(staging / "part")
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
        remove_left_overs(tmp_path / name)
        assert [found for found in os.listdir(tmp_path) if not found.startswith(".other")] == [living]
    finally:
        kill(alive)
    remove_left_overs(tmp_path / name)
    assert len(os.listdir(tmp_path)) == 1


def test_of_a_row_those_of_smaller_numbers_go_too(tmp_path: Path) -> None:
    for number in (1, 3):
        kill(write_and_wait(tmp_path / f"step-{number}"))
    remove_left_overs(tmp_path / "step-2")
    (found,) = os.listdir(tmp_path)
    assert found.startswith(".step-3.tmp-")


def test_one_save_of_many_is_cleared_up_after_by_its_token(tmp_path: Path) -> None:
    tokens = [new_token() for _ in range(2)]
    for token in tokens:
        create_staging(tmp_path / "step-1", overwrite=False, token=token)
    remove_unfinished(str(tmp_path / "step-1"), tokens[0])
    (found,) = os.listdir(tmp_path)
    assert tokens[1] in found
    remove_staging(str(tmp_path / found))


def test_a_symlink_is_not_followed_out_of_the_directory(tmp_path: Path) -> None:
    save(tmp_path / "elsewhere")
    runs = tmp_path / "runs"
    runs.mkdir()
    (runs / "step-1").symlink_to(tmp_path / "elsewhere", target_is_directory=True)
    save(runs / "step-2")
    remove_older(runs / "step-2", 1)
    assert (tmp_path / "elsewhere" / MANIFEST_NAME).exists()
    assert sorted(os.listdir(runs)) == ["step-1", "step-2"]


@pytest.mark.parametrize(("name", "is_fine"), [("step-1", True), ("1", True), ("v2.0-final", True), ("model", False)])
def test_a_name_needs_a_number(tmp_path: Path, name: str, is_fine: bool) -> None:
    if is_fine:
        check_numbered(tmp_path / name)
        return
    with pytest.raises(ValueError, match=r"keep_last keeps saves by the number in their names, and .*model.* has none"):
        check_numbered(tmp_path / name)
