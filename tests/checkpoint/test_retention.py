"""Older saves are removed, and nothing else is."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from raysharding.checkpoint import MANIFEST_NAME, check_numbered, remove_older


def save(path: Path) -> None:
    path.mkdir()
    (path / MANIFEST_NAME).write_text("{}")
    (path / "optimizer").mkdir()
    (path / "optimizer" / "model.safetensors").write_bytes(b"")


def test_the_smallest_numbers_go_first(tmp_path: Path) -> None:
    for number in (2, 9, 10, 100):
        save(tmp_path / f"step-{number}")
    remove_older(tmp_path / "step-100", 2)
    assert sorted(os.listdir(tmp_path)) == ["step-10", "step-100"]


def test_what_is_no_older_save_stays(tmp_path: Path) -> None:
    names = ["step-1", "step-3", "other-1", "step-1b", "run2-step-1", "step-", "step-9"]
    for name in names:
        save(tmp_path / name)
    (tmp_path / "step-0").mkdir()  # no save of ours
    (tmp_path / "step-0" / "notes").write_text("keep")
    (tmp_path / "step-2").write_text("a file")
    remove_older(tmp_path / "step-3", 1)
    assert sorted(os.listdir(tmp_path)) == sorted([*names[1:], "step-0", "step-2"])


def test_a_save_that_is_gone_back_to_keeps_later_ones(tmp_path: Path) -> None:
    for number in (1, 2, 3):
        save(tmp_path / f"step-{number}")
    remove_older(tmp_path / "step-2", 1)
    assert sorted(os.listdir(tmp_path)) == ["step-2", "step-3"]


def test_what_killed_processes_left_goes(tmp_path: Path) -> None:
    for name in ("step-1", "step-2", ".step-1.tmp-0a1b", ".step-2.tmp-ff", ".step-3.tmp-12", ".other-1.tmp-12"):
        save(tmp_path / name)
    (tmp_path / ".step-1.old-0a1b").mkdir()  # the only copy there may be
    (tmp_path / ".step-1.tmp-12").write_text("a file")
    (tmp_path / ".step-1.tmp-34").symlink_to(tmp_path / "step-2", target_is_directory=True)
    remove_older(tmp_path / "step-2", 5)
    left = ["step-1", "step-2", ".step-3.tmp-12", ".other-1.tmp-12", ".step-1.old-0a1b", ".step-1.tmp-12"]
    assert sorted(os.listdir(tmp_path)) == sorted([*left, ".step-1.tmp-34"])


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
