"""`identify` and `file_system_type`: whether two processes see the same file, and through what."""

from __future__ import annotations

import hashlib
import os
import subprocess
from pathlib import Path

import pytest
import torch

from raysharding.checkpoint import identify, identify_files, open_checkpoint
from raysharding.checkpoint.storage import file_system_type, local
from raysharding.errors import CheckpointError
from tests.checkpoint.build import GOOD, GOOD_PAYLOAD, save, save_sharded, write_raw


def test_identify_equals_what_opening_found(tmp_path: Path) -> None:
    directory = save_sharded(
        tmp_path / "c", {"x.safetensors": {"a": torch.zeros(3)}, "y.safetensors": {"b": torch.ones(1)}}
    )
    checkpoint = open_checkpoint(directory)
    assert tuple(identify(file.path) for file in checkpoint.files) == checkpoint.files
    assert identify_files([file.path for file in checkpoint.files]) == checkpoint.files
    assert identify_files([]) == ()
    data = (directory / "x.safetensors").read_bytes()
    header = data[: 8 + int.from_bytes(data[:8], "little")]
    assert checkpoint.files[0].header_sha256 == hashlib.sha256(header).hexdigest()


def test_same_size_and_time_but_another_header_is_told_apart(tmp_path: Path) -> None:
    first = save(tmp_path / "1.safetensors", {"a": torch.zeros(3)})
    second = save(tmp_path / "2.safetensors", {"b": torch.zeros(3)})
    os.utime(second, ns=(0, first.stat().st_mtime_ns))
    one, two = identify(str(first)), identify(str(second))
    assert (one.num_bytes, one.mtime_ns) == (two.num_bytes, two.mtime_ns)
    assert one.header_sha256 != two.header_sha256


@pytest.mark.timeout(10)
def test_identify_of_what_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="No such file") as caught:
        identify(str(tmp_path / "gone"))
    assert caught.value.path == str(tmp_path / "gone")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(CheckpointError, match="not a regular file"):
        identify(str(tmp_path / "pipe"))
    write_raw(tmp_path / "lies", GOOD, GOOD_PAYLOAD, length=99_999_999)
    with pytest.raises(CheckpointError, match="does not fit into"):
        identify(str(tmp_path / "lies"))


def test_the_type_of_a_file_system_is_what_stat_says(tmp_path: Path) -> None:
    # GNU stat names types by magic number; those that both spell alike are compared.
    for path in ("/proc", "/dev/shm", str(tmp_path)):
        said = subprocess.run(
            ["stat", "-f", "-c", "%T", path], capture_output=True, text=True, check=True
        ).stdout.strip()
        same = {"overlayfs": "overlay", "ext2/ext3": "ext4", "xfs": "xfs", "tmpfs": "tmpfs", "proc": "proc"}
        if said in same:
            assert file_system_type(path) == same[said], path
    assert file_system_type("/proc/self/no/such") == "proc"
    assert file_system_type("s3://bucket/x") == "s3"


def test_the_longest_and_last_mount_decides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mounts").write_bytes(rb"""1 0 8:1 / / rw - ext4 /dev/sda1 rw
2 1 0:5 / /data rw shared:1 master:2 - nfs4 host:/x rw
3 1 0:6 / /data/a\040b rw - xfs /dev/b rw
4 1 0:7 / /data rw - fuse.sshfs host rw
""")
    monkeypatch.setattr(local, "_MOUNTS", str(tmp_path / "mounts"))
    found = {path: file_system_type(path) for path in ("/", "/etc", "/data", "/data/x", "/database", "/data/a b/c")}
    assert found == {
        "/": "ext4",
        "/etc": "ext4",
        "/data": "fuse.sshfs",
        "/data/x": "fuse.sshfs",
        "/database": "ext4",
        "/data/a b/c": "xfs",
    }
    monkeypatch.setattr(local, "_MOUNTS", str(tmp_path / "gone"))
    assert file_system_type("/x") == "unknown"
