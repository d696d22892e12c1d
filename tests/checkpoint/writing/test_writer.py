"""`FileWriter` and the file plan: other readers open what it writes, and a failed write says so and leaves nothing."""

from __future__ import annotations

import random
import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from raysharding.checkpoint import FileReader, open_checkpoint
from raysharding.checkpoint.writing import FileWriter, file_names, plan_files, write_file
from raysharding.errors import CheckpointError
from tests.checkpoint.build import bits, random_tensors, save


def test_the_safetensors_library_and_our_reader_read_every_dtype_and_shape_bit_exactly(tmp_path: Path) -> None:
    tensors = random_tensors()
    readable = {name: tensor for name, tensor in tensors.items() if not name.startswith("F8_E8M0")}
    save(tmp_path / "model.safetensors", readable)
    loaded = load_file(tmp_path / "model.safetensors")
    assert set(loaded) == set(readable)
    for name, tensor in readable.items():
        assert loaded[name].dtype == tensor.dtype, name
        assert loaded[name].shape == tensor.shape, name
        assert torch.equal(bits(loaded[name]), bits(tensor)), name
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}
    save_file(readable, tmp_path / "theirs.safetensors")
    checkpoint = open_checkpoint(tmp_path / "theirs.safetensors")
    assert set(checkpoint.tensors) == set(readable)
    with FileReader(checkpoint.files) as reader:
        for name, tensor in readable.items():
            read = reader.read_tensor(checkpoint.tensors[name])
            assert (read.dtype, read.shape) == (tensor.dtype, tensor.shape), name
            assert torch.equal(bits(read), bits(tensor)), name
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
        write_file(str(tmp_path), "config.json", b"0123456789")
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
    ran = subprocess.run(
        ["unshare", "-rm", "sh", "-c", script, FULL_DISK], capture_output=True, text=True, check=True, timeout=60
    )
    assert "tensor 'a': cannot be written: No space left on device" in ran.stdout
    assert ran.stdout.splitlines()[-1] == f"['ckpt'] {1 << 16}"


@settings(deadline=None)
@given(st.dictionaries(st.text(max_size=3), st.integers(0, 1000), max_size=30), st.integers(1, 8))
def test_the_file_plan_is_a_balanced_partition(sizes: dict[str, int], num_files: int) -> None:
    files = plan_files(sizes, num_files)
    assert sorted(name for names in files for name in names) == sorted(sizes)
    assert len(files) == max(1, min(num_files, len(sizes)))
    assert all(files) or not sizes
    order = list(sizes)
    for names in files:
        assert list(names) == sorted(names, key=order.index)
    totals = [sum(sizes[name] for name in names) for names in files]
    largest = max(sizes.values(), default=0)
    assert max(totals) - min(totals) <= largest
    assert plan_files(sizes, num_files) == files


def test_the_largest_tensors_are_dealt_first_and_files_have_standard_names() -> None:
    assert plan_files({"a": 1, "b": 1, "c": 2}, 2) == (("c",), ("a", "b"))
    assert plan_files({"a": 0, "b": 0, "c": 0}, 3) == (("a",), ("b",), ("c",))
    assert plan_files({}, 3) == ((),)
    assert file_names(3) == tuple(f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3))
    assert file_names(1) == ("model.safetensors",)
