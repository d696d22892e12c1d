"""Checkpoints: config, sidecars, who sees which file; `FileReader`: exact bytes, and a file that changes under it."""

from __future__ import annotations

import hashlib
import json
import math
import os
import pickle
import subprocess
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import cast

import pytest
import torch
from safetensors.torch import save_file

from raysharding.checkpoint import Checkpoint, FileReader, identify, identify_files, open_checkpoint
from raysharding.checkpoint.storage import file_system_type, local
from raysharding.checkpoint.storage.local import LocalFile
from raysharding.errors import CheckpointError
from tests.checkpoint.build import (
    GOOD,
    GOOD_PAYLOAD,
    entry,
    random_tensors,
    refused,
    save,
    save_sharded,
    sidecar_files,
    write_raw,
)


def test_json_and_pickle_round_trips_are_exact(tmp_path: Path) -> None:
    tensors = random_tensors() | {'odd " \\ \n имя': torch.zeros(2)}
    names = list(tensors)
    files = {"x.safetensors": {name: tensors[name] for name in names[::2]}}
    files["y.safetensors"] = {name: tensors[name] for name in names[1::2]}
    directory = save_sharded(tmp_path / "ckpt", files)
    (directory / "config.json").write_text('{"dtype": "bfloat16", "limit": [0.0, Infinity], "ключ": null}')
    checkpoint = open_checkpoint(directory)
    assert set(checkpoint.tensors) == set(tensors)
    for copy in (Checkpoint.from_json(checkpoint.to_json()), pickle.loads(pickle.dumps(checkpoint))):
        assert copy == checkpoint
        assert list(copy.tensors) == list(checkpoint.tensors)
        assert copy.num_bytes == sum(tensor.nbytes for tensor in tensors.values())
        assert copy.config == {"dtype": "bfloat16", "limit": [0.0, math.inf], "ключ": None}


@pytest.mark.parametrize(
    "data", [b"", b"[]", b"{}", b"\xff", b'{"path":"","files":[[]],"tensors":[["a","F31",[],0,0]]}']
)
def test_json_of_something_else_is_refused(data: bytes) -> None:
    with pytest.raises(CheckpointError, match="not an encoded Checkpoint"):
        Checkpoint.from_json(data)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"{", "is not JSON"),
        (b"", "is not JSON"),
        (b'"x"', "is a JSON str, not an object"),
        (b'{"a":"\xff"}', "is not UTF-8"),
        (b"[" * 100_000, "nested too deep"),
    ],
)
def test_a_wrong_config_is_refused(tmp_path: Path, text: bytes, message: str) -> None:
    save(tmp_path / "model.safetensors", {"a": torch.zeros(1)})
    (tmp_path / "config.json").write_bytes(text)
    assert refused(tmp_path, message).path == str(tmp_path / "config.json")


def test_sidecar_files_are_small_files_that_are_no_weights_and_no_code(tmp_path: Path) -> None:
    save(tmp_path / "model.safetensors", {"a": torch.zeros(1)})
    wanted = ["chat_template.jinja", "config.json", "generation_config.json", "merges.txt", "tokenizer.json"]
    wanted += ["tokenizer.model", "vocab.txt", "README.md", "LICENSE", "NOTICE", "bpe.codes", "prophetnet.tokenizer"]
    wanted += ["sentencepiece.bpe.model", "spiece.model", "qwen.tiktoken", "dict.txt", "source.spm"]
    unwanted = [".hidden.json", "pytorch_model.bin.index.json", "modeling.py", "pytorch_model.bin", "x.safetensors.bak"]
    unwanted += ["optimizer.pt", "rng_state_0.pth", "training_args.bin", "events.out.tfevents.17.host", "run.log"]
    unwanted += ["model.onnx", "tf_model.h5", "flax_model.msgpack", "pytorch_model-00001-of-00002.bin"]
    for name in wanted + unwanted:
        (tmp_path / name).write_text("{}")
    with open(tmp_path / "huge.json", "wb") as file:
        file.truncate(64 << 20)
    (tmp_path / "dir.json").mkdir()
    (tmp_path / "passwd.txt").symlink_to("/etc/passwd")
    (tmp_path / "gone.txt").symlink_to("gone")
    checkpoint = open_checkpoint(tmp_path)
    assert sidecar_files(checkpoint) == tuple(sorted(wanted))
    assert checkpoint.directory == str(tmp_path)


def test_sidecar_files_lie_in_folders_too(tmp_path: Path) -> None:
    save(tmp_path / "model.safetensors", {"a": torch.zeros(1)})
    modules = [{"idx": 0, "path": ""}, {"path": "2_Dense"}, {"path": "3_Router"}, {"path": "../up"}, {"path": 3}, 4]
    wanted = ["1_Pooling/config.json", "2_Dense/config.json", "2_Dense/model.safetensors", "modules.json"]
    wanted += ["3_Router/document_0_Dense/pytorch_model.bin", "additional_chat_templates/tool_use.jinja"]
    wanted += ["a/b/c/deep.txt", "images/loss.png", "linked/config.json"]
    unwanted = ["2_Dense/modeling.py", "3_Router/.cache/x.json", "a/b/c/d/deeper.txt", "a/model.py", ".git/HEAD"]
    unwanted += ["checkpoint-500/model.safetensors", "checkpoint-500/config.json", "checkpoint-500/runs/x.txt"]
    unwanted += ["onnx/model.onnx", "onnx/config.json", "original/consolidated.00.pth", "original/params.json"]
    unwanted += ["openvino/openvino_model.bin", "openvino/openvino_model.xml", "runs/events.out.tfevents.17.host"]
    unwanted += ["optimizer/raysharding.optimizer.json", "training/raysharding.training.json", "images/data.parquet"]
    unwanted += [f"samples/{number}.txt" for number in range(101)] + ["large/half.json", "large/other.json"]
    (tmp_path.parent / "up").mkdir()
    (tmp_path.parent / "up" / "config.json").write_text("{}")
    for name in wanted + unwanted:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("{}")
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    for name in ("large/half.json", "large/other.json"):
        os.truncate(tmp_path / name, 32 << 20)
    os.truncate(tmp_path / "2_Dense" / "model.safetensors", 65 << 20)
    (tmp_path / "linked" / "passwd.txt").symlink_to("/etc/passwd")
    (tmp_path / "out").symlink_to("/etc")
    (tmp_path / "again").symlink_to("images")
    (tmp_path / "images" / "circle").symlink_to("..")
    (tmp_path / "pipe").mkdir()
    os.mkfifo(tmp_path / "pipe" / "pipe.json")
    assert sidecar_files(open_checkpoint(tmp_path)) == tuple(sorted(wanted))
    for text in ("{", "[[]]", '{"a": 1}', '"x"', "\xff"):
        (tmp_path / "modules.json").write_text(text)
        rest = set(wanted) - {wanted[2], wanted[1], wanted[4]}
        assert sidecar_files(open_checkpoint(tmp_path)) == tuple(sorted(rest))


def test_folders_of_a_snapshot_in_the_cache_are_links_into_its_blobs(tmp_path: Path) -> None:
    snapshot, blobs = tmp_path / "models--a--b" / "snapshots" / ("0" * 40), tmp_path / "models--a--b" / "blobs"
    (snapshot / "1_Pooling").mkdir(parents=True)
    blobs.mkdir()
    save(blobs / "w", {"a": torch.zeros(1)})
    (snapshot / "model.safetensors").symlink_to(blobs / "w")
    (blobs / "p").write_text("{}")
    (snapshot / "1_Pooling" / "config.json").symlink_to("../../../blobs/p")
    (tmp_path / "secret").write_text("{}")
    (snapshot / "1_Pooling" / "secret.json").symlink_to("../../../../secret")
    assert sidecar_files(open_checkpoint(snapshot)) == ("1_Pooling/config.json",)


def test_metadata_of_the_files_is_merged_and_the_first_file_decides(tmp_path: Path) -> None:
    byte = entry("U8", [1], [0, 1])
    write_raw(tmp_path / "a.safetensors", {"__metadata__": {"format": "pt", "by": "a"}, "s": byte}, b"x")
    write_raw(tmp_path / "b.safetensors", {"__metadata__": {"by": "b", "more": "b"}, "t": byte}, b"x")
    weight_map = {"s": "a.safetensors", "t": "b.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert open_checkpoint(tmp_path).metadata == {"format": "pt", "by": "a", "more": "b"}


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads files whatever their mode")
def test_a_file_without_permission_is_named(tmp_path: Path) -> None:
    path = save(tmp_path / "model.safetensors", {"a": torch.zeros(1)})
    path.chmod(0)
    refused(tmp_path, "cannot be read: Permission denied")


@pytest.mark.full
def test_the_time_to_open_grows_with_the_tensors_alone(tmp_path: Path) -> None:
    few, many = make_headers(tmp_path / "few", 2_000), make_headers(tmp_path / "many", 20_000)
    seconds: dict[Path, list[float]] = {few: [], many: []}
    for _ in range(4):
        for path in (few, many):
            start = time.process_time()  # CPU time: other tests may run beside this one
            checkpoint = open_checkpoint(path)
            again = Checkpoint.from_json(checkpoint.to_json())
            seconds[path].append(time.process_time() - start)
            assert again == checkpoint
    assert len(checkpoint.tensors) == 20_000
    assert min(seconds[many]) < 40 * min(seconds[few]), "ten times as many tensors; a square would be a hundred times"


def make_headers(directory: Path, num_tensors: int) -> Path:
    """A checkpoint of so many tensors, whose data is a hole."""
    names = [f"model.layers.{i // 100}.mlp.experts.{i % 100}.weight" for i in range(num_tensors)]
    header = {name: entry("BF16", [64, 64], [i * 8192, (i + 1) * 8192]) for i, name in enumerate(names)}
    directory.mkdir()
    path = write_raw(directory / "x.safetensors", header, b"")
    os.truncate(path, path.stat().st_size + num_tensors * 8192)
    index = json.dumps({"weight_map": dict.fromkeys(header, "x.safetensors")})
    (directory / "model.safetensors.index.json").write_text(index)
    return directory


def test_identify_equals_what_opening_found(tmp_path: Path) -> None:
    files = {"x.safetensors": {"a": torch.zeros(3)}, "y.safetensors": {"b": torch.ones(1)}}
    directory = save_sharded(tmp_path / "c", files)
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
        said = subprocess.check_output(["stat", "-f", "-c", "%T", path], text=True).strip()
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
    kinds = {"ext4": ("/", "/etc", "/database"), "fuse.sshfs": ("/data", "/data/x"), "xfs": ("/data/a b/c",)}
    for kind, paths in kinds.items():
        assert [file_system_type(path) for path in paths] == [kind] * len(paths)
    monkeypatch.setattr(local, "_MOUNTS", str(tmp_path / "gone"))
    assert file_system_type("/x") == "unknown"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    tensors = {"a": torch.arange(1000, dtype=torch.int32), "b": torch.randn(300, 7)}
    save_file(tensors, tmp_path / "model.safetensors")
    return tmp_path / "model.safetensors"


def test_ranges_land_in_tensors_and_memoryviews_and_nowhere_else(path: Path) -> None:
    checkpoint = open_checkpoint(path)
    info = checkpoint.tensors["a"]
    with FileReader(checkpoint.files) as reader:
        buffer = torch.full((24,), 255, dtype=torch.uint8)
        reader.read_into(info.file, info.offset + 40, buffer[4:20])
        assert buffer[4:20].view(torch.int32).tolist() == [10, 11, 12, 13]
        assert buffer[:4].tolist() == buffer[20:].tolist() == [255] * 4
        view = bytearray(8)
        reader.read_into(info.file, info.offset + 4, memoryview(view).cast("i"))
        assert view == bytes([1, 0, 0, 0, 2, 0, 0, 0])
        reader.read_into(info.file, info.offset, memoryview(bytearray()))
        reader.read_into(info.file, info.offset, torch.empty(0, dtype=torch.uint8))
        assert reader.num_bytes_read == 24


def test_one_range_is_scattered_over_thousands_of_views(path: Path) -> None:
    checkpoint = open_checkpoint(path)
    info = checkpoint.tensors["b"]
    sizes = [0, 1, 3, *[2] * 2000, 0, 500, 0]
    buffer = bytearray(sum(sizes) + 2)
    memory, views, position = memoryview(buffer), [], 1
    for size in sizes:
        views.append(memory[position : position + size])
        position += size
    with FileReader(checkpoint.files) as reader:
        reader.read_ranges(info.file, [(info.offset + 7, views)])
        reader.read_ranges(info.file, [(info.offset, [])])
        assert reader.num_bytes_read == sum(sizes)
    start = info.offset + 7
    assert buffer == b"\0" + path.read_bytes()[start : start + sum(sizes)] + b"\0"


@pytest.mark.parametrize("most", [1, 5, 8, 100])
def test_a_read_that_stops_early_goes_on_where_it_stopped(
    path: Path, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the kernel does after 2 GiB: `preadv` itself, given less to fill than was asked for."""
    preadv = os.preadv

    def stops_early(descriptor: int, views: Sequence[memoryview], offset: int) -> int:
        shorter, room = [], most
        for view in views:
            shorter.append(view.cast("B")[:room])
            room -= shorter[-1].nbytes
        return preadv(descriptor, shorter, offset)

    monkeypatch.setattr(os, "preadv", stops_early)
    checkpoint = open_checkpoint(path)
    buffers = [bytearray(4), bytearray(0), bytearray(8), bytearray(1), bytearray(12)]
    views = [memoryview(buffer) for buffer in buffers]
    views[2] = views[2].cast("i")
    with FileReader(checkpoint.files) as reader:
        reader.read_ranges(0, [(64, views)])
        assert reader.num_bytes_read == 25
        with pytest.raises(CheckpointError, match=r"ends at byte \d+, but 25 bytes were asked for"):
            reader.read_ranges(0, [(64, views), (path.stat().st_size - 20, views)])
        assert reader.num_bytes_read == 50, "what came before is counted"
        reader.read_ranges(0, [(64, views)])
    assert b"".join(buffers) == path.read_bytes()[64:89]


def test_threads_share_one_reader(path: Path) -> None:
    checkpoint = open_checkpoint(path)
    info = checkpoint.tensors["a"]

    with FileReader(checkpoint.files) as reader:

        def read(start: int) -> bool:
            buffer = torch.empty(40, dtype=torch.uint8)
            reader.read_into(info.file, info.offset + start * 4, buffer)
            return buffer.view(torch.int32).tolist() == list(range(start, start + 10))

        with ThreadPoolExecutor(8) as pool:
            assert all(pool.map(read, list(range(0, 990, 3)) * 4))
        assert reader.num_bytes_read == 330 * 4 * 40


def test_close_leaves_a_descriptor_open_for_as_long_as_a_read_uses_it(path: Path) -> None:
    checkpoint = open_checkpoint(path)
    num_open = len(os.listdir("/proc/self/fd"))
    reader = FileReader(checkpoint.files)
    descriptor = cast(LocalFile, reader._acquire(0))._descriptor
    reader.close()
    reader.close()
    # A long read makes several calls; between two of them the number must not become another file's.
    assert os.pread(descriptor, 8, 0) == path.read_bytes()[:8]
    assert len(os.listdir("/proc/self/fd")) == num_open + 1
    with pytest.raises(ValueError, match="FileReader is closed"):
        reader.read_tensor(checkpoint.tensors["a"])
    reader._release()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)
    assert len(os.listdir("/proc/self/fd")) == num_open


def test_a_file_cut_short_while_it_is_read(path: Path) -> None:
    checkpoint = open_checkpoint(path)
    with FileReader(checkpoint.files) as reader:
        first, last = checkpoint.tensors.values()
        reader.read_tensor(first)
        os.truncate(path, path.stat().st_size - 100)
        with pytest.raises(CheckpointError, match="cut short after it was opened") as caught:
            reader.read_tensor(last)
        assert caught.value.path == str(path)
        assert caught.value.tensor == last.name
        with pytest.raises(CheckpointError, match="bytes, but had"):
            reader.verify_unchanged()


def test_a_file_rewritten_in_place_replaced_or_removed(path: Path) -> None:
    checkpoint = open_checkpoint(path)
    status = path.stat()
    with FileReader(checkpoint.files) as reader:
        reader.read_tensor(checkpoint.tensors["a"])
        reader.verify_unchanged()
        with open(path, "r+b") as file:
            file.seek(-1, os.SEEK_END)
            file.write(b"\0")
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
        with pytest.raises(CheckpointError, match="was changed"):
            reader.verify_unchanged()
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
        reader.verify_unchanged()
        # Another file of the same size takes the path; the descriptor still reads the old one.
        copy = path.with_suffix(".new")
        copy.write_bytes(path.read_bytes())
        copy.rename(path)
        with pytest.raises(CheckpointError, match="was changed"):
            reader.verify_unchanged()
        path.unlink()
        with pytest.raises(CheckpointError, match="is gone since its header was read"):
            reader.verify_unchanged()


def test_a_file_replaced_before_its_first_read(path: Path) -> None:
    checkpoint = open_checkpoint(path)
    save_file({"a": torch.zeros(3)}, path)
    with (
        FileReader(checkpoint.files) as reader,
        pytest.raises(CheckpointError, match=r"since its header|when its header"),
    ):
        reader.read_tensor(checkpoint.tensors["a"])
    path.unlink()
    with (
        FileReader(checkpoint.files) as reader,
        pytest.raises(CheckpointError, match="cannot open: No such file") as caught,
    ):
        reader.read_tensor(checkpoint.tensors["a"])
    assert caught.value.path == str(path)
