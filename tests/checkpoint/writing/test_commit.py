"""Files are written whole, and a destination holds the old checkpoint or the new one, whatever happens to a save."""

from __future__ import annotations

import os
import random
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from raysharding.checkpoint import FileReader, open_checkpoint, writing
from raysharding.checkpoint.format import new_token, staging_path
from raysharding.checkpoint.format.index import FileSet, resolve_files
from raysharding.checkpoint.storage.remote import Storage
from raysharding.checkpoint.writing import FileWriter, create_staging
from raysharding.errors import CheckpointError
from tests.checkpoint.build import bits, random_tensors, refused, save
from tests.checkpoint.staged import StagedDirectory
from tests.checkpoint.torch_formats.dcp_files import assert_same_bits


def save_value(final: Path, value: int, *, overwrite: bool = False) -> None:
    with StagedDirectory(final, overwrite=overwrite) as staged:
        tensors = {"a": torch.full((1000,), value), "b": torch.tensor(value)}
        save(Path(staged.path) / "model.safetensors", tensors, {"value": str(value)})
        writing.write_file(staged.path, "config.json", b'{"value": %d}' % value)
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
    writing.check_destination(tmp_path / "out" / "deep" / "ckpt", overwrite=False)
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
        names_of = {"work": "thesis.tex", "config only": "config.json", "git": "model.safetensors"}
        (final / names_of[kind]).write_text("{}")
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
    writing.commit_staging(staging, tmp_path / "ckpt", overwrite=False)
    assert names(tmp_path / "ckpt") == ["model.safetensors"]
    writing.remove_staging(staging)  # gone already: fine


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
    refused(tmp_path / "ckpt", r"interrupted save left the previous checkpoint in .*\.ckpt\.old-0abc")


def test_without_exchange_two_renames_do_and_the_second_one_failing_puts_the_old_checkpoint_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writing.commit, "_exchange", lambda first, second: False)
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
                    writing.write_index(staged.path, {"c": other}, 4)
                staged.commit()
        return files

    monkeypatch.setattr("raysharding.checkpoint.format.checkpoint.resolve_files", resolve_then_replace)
    if num_saves == 1:
        assert list(open_checkpoint(final).tensors) == ["c"]
    else:
        refused(final, "was replaced 10 times while it was opened")


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
        what = "is a mount point, .*: save to a directory in it, such as .*/volume/"
        with pytest.raises(CheckpointError, match=what):
            create_staging(volume, overwrite=overwrite)
        assert names(volume.parent) == ["source", "volume"]
        (volume / "model.safetensors").touch()
    save_value(volume / "model", 1)
    save_value(volume / "model", 2, overwrite=True)
    assert load_value(volume / "model") == 2
    assert names(volume) == ["model", "model.safetensors"]


def test_the_safetensors_library_and_our_reader_read_every_dtype_and_shape_bit_exactly(tmp_path: Path) -> None:
    tensors = random_tensors()
    readable = {name: tensor for name, tensor in tensors.items() if not name.startswith("F8_E8M0")}
    save(tmp_path / "model.safetensors", readable)
    assert_same_bits(load_file(tmp_path / "model.safetensors"), readable)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}
    save_file(readable, tmp_path / "theirs.safetensors")
    checkpoint = open_checkpoint(tmp_path / "theirs.safetensors")
    with FileReader(checkpoint.files) as reader:
        assert_same_bits({name: reader.read_tensor(info) for name, info in checkpoint.tensors.items()}, readable)
    save(tmp_path / "all.safetensors", tensors)
    checkpoint = open_checkpoint(tmp_path / "all.safetensors")
    with FileReader(checkpoint.files) as reader:
        for name, tensor in tensors.items():
            info = checkpoint.tensors[name]
            assert info.offset % info.dtype.itemsize == 0
            assert torch.equal(bits(reader.read_tensor(info)), bits(tensor)), name
        assert reader.num_bytes_read == sum(tensor.nbytes for tensor in tensors.values())
        reader.verify_unchanged()
    save(tmp_path / "none.safetensors", {})
    assert load_file(tmp_path / "none.safetensors") == open_checkpoint(tmp_path / "none.safetensors").tensors == {}


def test_parts_in_any_order(tmp_path: Path) -> None:
    tensor = torch.randn(64, 33)
    path = tmp_path / "model.safetensors"
    parts = [(start, min(start + 97, tensor.nbytes)) for start in range(0, tensor.nbytes, 97)]
    random.Random(0).shuffle(parts)
    with FileWriter(str(path), [("y", torch.int8, (3,)), ("x", tensor.dtype, tensor.shape)], {"by": "us"}) as writer:
        writer.write_at("y", 0, memoryview(b"\1\2\3"))
        for start, end in parts:
            writer.write_at("x", start, bits(tensor)[start:end])
        assert list(writer.tensors) == ["x", "y"]  # the wider dtype first: x is aligned
    assert torch.equal(load_file(path)["x"], tensor)
    assert path.stat().st_size == writer.num_bytes
    assert open_checkpoint(path).metadata == {"by": "us"}


@pytest.mark.parametrize(
    ("written", "message", "tensor"),
    [
        ([], "was not written in full", "a"),
        ([("a", 0, 8)], "was not written in full", "b"),
        ([("a", 0, 4), ("b", 0, 4)], "was not written in full", "a"),
        ([("a", 0, 8), ("b", 0, 4), ("a", 2, 6)], "in parts that overlap", "a"),
    ],
)
def test_a_file_that_was_not_written_exactly_once_is_removed(
    tmp_path: Path, written: list[tuple[str, int, int]], message: str, tensor: str | None
) -> None:
    path = tmp_path / "model.safetensors"
    writer = FileWriter(str(path), [("a", torch.float32, (2,)), ("b", torch.float32, (1,))])
    for name, start, end in written:
        writer.write_at(name, start, memoryview(bytes(end - start)))
    with pytest.raises(CheckpointError, match=message) as caught:
        writer.close()
    assert caught.value.tensor == tensor
    assert not path.exists()
    writer.close()
    with pytest.raises(ValueError, match="FileWriter is closed"):
        writer.write_at("a", 0, memoryview(bytes(1)))


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ([("a", torch.int8, (1,)), ("a", torch.int8, (1,))], "given twice"),
        ([("__metadata__", torch.int8, (1,))], "reserved"),
        ([("\ud800", torch.int8, (1,))], "not Unicode"),
        ([("a", torch.complex128, (1,))], "safetensors has no torch.complex128"),
    ],
)
def test_a_tensor_that_the_format_cannot_hold(tmp_path: Path, tensors: list, message: str) -> None:
    with pytest.raises(CheckpointError, match=message) as caught:
        FileWriter(str(tmp_path / "x.safetensors"), tensors)
    assert caught.value.tensor == tensors[0][0]
    assert not list(tmp_path.iterdir())


def test_an_existing_file_is_not_overwritten(tmp_path: Path) -> None:
    path = save(tmp_path / "model.safetensors", {"a": torch.ones(1)})
    with pytest.raises(CheckpointError, match="cannot be made: File exists"):
        FileWriter(str(path), [])
    assert load_file(path)["a"].item() == 1


def test_leaving_the_block_by_an_error_removes_the_file(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"

    def fail() -> None:
        with FileWriter(str(path), [("a", torch.int8, (1,))]) as writer:
            assert path.exists()
            writer.write_at("b", 0, memoryview(b"x"))

    with pytest.raises(KeyError):
        fail()
    assert not path.exists()


@contextmanager
def largest_file(num_bytes: int) -> Iterator[None]:
    """Let the kernel refuse to grow a file beyond `num_bytes`; Python ignores the signal that comes with it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_write_that_the_kernel_refuses_names_file_and_tensor(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    with largest_file(64 << 10), pytest.raises(CheckpointError, match="cannot be written: File too large") as caught:
        save(path, {"a": torch.zeros(100), "b": torch.zeros(1 << 20)})
    assert caught.value.path == str(path)
    assert caught.value.tensor == "b"
    assert not path.exists()
    with largest_file(8), pytest.raises(CheckpointError, match="cannot be written"):
        writing.write_file(str(tmp_path), "config.json", b"0123456789")
    with largest_file(8), pytest.raises(CheckpointError, match="cannot be written"):
        save(path, {"a": torch.zeros(100)})
    assert not path.exists()


FULL_DISK = """
import sys, torch
from raysharding.checkpoint import open_checkpoint
from raysharding.checkpoint.writing import FileWriter
from raysharding.errors import CheckpointError
from tests.checkpoint.staged import StagedDirectory
out = sys.argv[1] + "/ckpt"
def save(size, overwrite):
    with StagedDirectory(out, overwrite=overwrite) as staged:
        with FileWriter(staged.path + "/model.safetensors", [("a", torch.uint8, (size,))]) as writer:
            writer.write_at("a", 0, torch.ones(size, dtype=torch.uint8))
        staged.commit()
save(1 << 16, False)
try:
    save(2 << 20, True)
except CheckpointError as error:
    print(error)
import os
print(os.listdir(sys.argv[1]), open_checkpoint(out).num_bytes)
"""


def test_a_full_disk_leaves_the_old_checkpoint_and_no_temporary_files(tmp_path: Path) -> None:
    mount = f'mount -t tmpfs -o size=1m none "{tmp_path}"'
    if subprocess.run(["unshare", "-rm", "sh", "-c", mount], capture_output=True, check=False).returncode:
        pytest.skip("no file system can be mounted here")
    script = f'{mount} && exec "{sys.executable}" -c "$0" "{tmp_path}"'
    said = subprocess.check_output(["unshare", "-rm", "sh", "-c", script, FULL_DISK], text=True, timeout=60)
    assert "tensor 'a': cannot be written: No space left on device" in said
    assert said.splitlines()[-1] == f"['ckpt'] {1 << 16}"


@settings(deadline=None)
@given(st.dictionaries(st.text(max_size=3), st.integers(0, 1000), max_size=30), st.integers(1, 8))
def test_the_file_plan_is_a_balanced_partition(sizes: dict[str, int], num_files: int) -> None:
    files = writing.plan_files(sizes, num_files)
    assert sorted(name for names in files for name in names) == sorted(sizes)
    assert len(files) == max(1, min(num_files, len(sizes)))
    assert all(files) or not sizes
    order = list(sizes)
    for names in files:
        assert list(names) == sorted(names, key=order.index)
    totals = [sum(sizes[name] for name in names) for names in files]
    largest = max(sizes.values(), default=0)
    assert max(totals) - min(totals) <= largest
    assert writing.plan_files(sizes, num_files) == files


def test_the_largest_tensors_are_dealt_first_and_files_have_standard_names() -> None:
    assert writing.plan_files({"a": 1, "b": 1, "c": 2}, 2) == (("c",), ("a", "b"))
    assert writing.plan_files({"a": 0, "b": 0, "c": 0}, 3) == (("a",), ("b",), ("c",))
    assert writing.plan_files({}, 3) == ((),)
    assert writing.file_names(3) == tuple(f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3))
    assert writing.file_names(1) == ("model.safetensors",)
