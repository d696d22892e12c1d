"""Checkpoints in an object store, against a real S3 server: tensors, bytes and refusals as from local files."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow
import pytest
import torch

from raysharding.checkpoint import Checkpoint, FileReader, identify, identify_files, open_checkpoint
from raysharding.checkpoint.format import read_beside
from raysharding.checkpoint.format.sidecars import read_sidecar
from raysharding.checkpoint.storage import file_system_type, storage_of
from raysharding.checkpoint.storage.interface import FileStat
from raysharding.checkpoint.storage.remote import RemoteFile, connect
from raysharding.checkpoint.storage.requests import RemoteOptions, Requests
from raysharding.checkpoint.storage.uri import join_path, normal_path, split_path
from raysharding.errors import CheckpointError
from tests.checkpoint.build import (
    GOOD,
    GOOD_PAYLOAD,
    bits,
    random_tensors,
    save,
    save_sharded,
    sidecar_files,
    write_raw,
)
from tests.s3 import S3Server, s3, s3_server

__all__ = ["s3", "s3_server"]

INDEX = "model.safetensors.index.json"
ODD = "a b?%#&+é.safetensors"


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("local") / "ckpt"
    files = {ODD: random_tensors(), "y.safetensors": {"big": torch.randn(1100, 1000), "tail": torch.arange(7)}}
    save_sharded(directory, files)
    (directory / "config.json").write_text('{"model_type": "x", "limit": Infinity}')
    (directory / "tokenizer.json").write_text('{"é": 1}')
    (directory / "modeling.py").write_text("raise SystemExit")
    (directory / "1_Pooling").mkdir()
    (directory / "1_Pooling" / "config é.json").write_text("{}")
    save_sharded(directory / "checkpoint-5", {"model.safetensors": {"a": torch.zeros(1)}})
    return directory


def test_a_directory_an_index_and_a_file_are_what_they_are_locally(local: Path, s3: S3Server) -> None:
    s3.upload(local, "dir/ckpt")
    for key in ("dir/ckpt", "dir/ckpt/", f"dir/ckpt/{INDEX}", "dir/ckpt/y.safetensors", f"dir/ckpt/{ODD}"):
        there = open_checkpoint(s3.uri(key))
        here = open_checkpoint(str(local / Path(key).relative_to("dir/ckpt")))
        assert list(there.tensors.items()) == list(here.tensors.items()), key
        assert (there.config, there.metadata) == (here.config, here.metadata)
        assert [(f.name, f.num_bytes, f.header_sha256) for f in there.files] == [
            (f.name, f.num_bytes, f.header_sha256) for f in here.files
        ]
        assert there.path == s3.uri(key)
        assert there.directory == s3.uri("dir/ckpt")
        assert (
            sidecar_files(there) == sidecar_files(here) == ("1_Pooling/config é.json", "config.json", "tokenizer.json")
        )
        assert read_sidecar(storage_of(there.directory), there.directory, "1_Pooling/config é.json") == b"{}"
        assert read_sidecar(storage_of(there.directory), there.directory, "tokenizer.json") == '{"é": 1}'.encode()
        assert read_beside(storage_of(there.directory), there.directory, "gone.json", 100) is None
        assert Checkpoint.from_json(there.to_json()) == there
        assert identify_files([file.path for file in there.files]) == there.files
        assert identify(there.files[0].path) == there.files[0]
    for name in ("modeling.py", "../ckpt/config.json", "a/../config.json", "/etc/passwd", "a/b.py", INDEX):
        with pytest.raises(CheckpointError, match="is no file that a save copies"):
            read_sidecar(storage_of(there.directory), there.directory, name)
    with pytest.raises(CheckpointError, match="is over the cap of 3 bytes"):
        read_beside(storage_of(there.directory), there.directory, "config.json", 3)
    assert file_system_type(there.files[0].path) == "s3"


def test_every_byte_is_fetched_once_and_lands_where_it_belongs(local: Path, s3: S3Server) -> None:
    checkpoint = open_checkpoint(s3.upload(local, "bytes"))
    opened = s3.proxy.body_bytes(path="safetensors$")
    lengths = [int.from_bytes((local / file.name).read_bytes()[:8], "little") for file in checkpoint.files]
    assert opened == sum(lengths) + 8 * len(lengths)  # headers, and nothing of the payload
    with FileReader(checkpoint.files) as reader, FileReader(open_checkpoint(local).files) as reads_local:
        for name, info in checkpoint.tensors.items():
            assert torch.equal(bits(reader.read_tensor(info)), bits(reads_local.read_tensor(info))), name
        assert reader.num_bytes_read == checkpoint.num_bytes
        reader.verify_unchanged()
    assert s3.proxy.body_bytes(path="safetensors$") - opened == checkpoint.num_bytes


def test_a_range_is_cut_into_parts_and_scattered_over_views(local: Path, s3: S3Server) -> None:
    checkpoint = open_checkpoint(s3.upload(local, "views"))
    info = checkpoint.tensors["big"]
    sizes = [0, 5, 1, 2_000_000, *[100] * 3000, 3, 0, 1_500_000]
    buffer = bytearray(sum(sizes) + 2)
    memory, position = memoryview(buffer), 1
    views: list[memoryview[Any]] = []
    for size in sizes:
        views.append(memory[position : position + size])
        position += size
    views[3] = views[3].cast("f")
    options = RemoteOptions(max_in_flight=3, part_bytes=300_000)
    s3.proxy.reset()
    s3.proxy.delay_s = 0.02
    with FileReader(checkpoint.files, options) as reader:
        reader.read_ranges(info.file, [(info.offset + 11, views)])
    start = info.offset + 11
    expected = (local / "y.safetensors").read_bytes()[start : start + sum(sizes)]
    assert buffer == b"\0" + expected + b"\0"
    gets = [request for request in s3.proxy.requests if request.method == "GET"]
    assert [request.body_bytes <= 300_000 for request in gets] == [True] * -(-sum(sizes) // 300_000)
    assert 1 < s3.proxy.most_in_flight <= 3


@pytest.mark.parametrize("name", ["../x.safetensors", "sub/x.safetensors", "..%2Fx.safetensors/y", "pytorch_model.bin"])
def test_a_hostile_index_is_refused_before_any_weight_file_is_touched(s3: S3Server, name: str) -> None:
    s3.put(f"hostile/{INDEX}", json.dumps({"weight_map": {"a": name}}).encode())
    s3.put("x.safetensors", b"secret")
    with pytest.raises(CheckpointError, match="index names the file") as caught:
        open_checkpoint(s3.uri("hostile"))
    assert caught.value.path == s3.uri(f"hostile/{INDEX}")
    assert caught.value.tensor == "a"
    assert all("x.safetensors" not in request.path for request in s3.proxy.requests)


def test_an_index_that_names_a_missing_file(s3: S3Server) -> None:
    s3.put(f"missing/{INDEX}", json.dumps({"weight_map": {"a": "gone.safetensors"}}).encode())
    with pytest.raises(CheckpointError, match=r"'gone\.safetensors', which is missing"):
        open_checkpoint(s3.uri("missing"))


def test_a_header_that_lies_about_its_length_is_refused_after_its_8_bytes(tmp_path: Path, s3: S3Server) -> None:
    for length, message in ((1 << 40, "over the cap"), (90_000_000, "does not fit into")):
        path = write_raw(tmp_path / "x", GOOD, GOOD_PAYLOAD, length=length)
        s3.put("lies/model.safetensors", path.read_bytes())
        s3.proxy.reset()
        with pytest.raises(CheckpointError, match=message) as caught:
            open_checkpoint(s3.uri("lies"))
        assert caught.value.path == s3.uri("lies/model.safetensors")
        assert s3.proxy.body_bytes(path="safetensors$") == 8


def test_a_file_replaced_after_its_header_was_read(tmp_path: Path, s3: S3Server) -> None:
    path = save(tmp_path / "x", {"a": torch.zeros(1000)})
    s3.put("replaced.safetensors", path.read_bytes())
    checkpoint = open_checkpoint(s3.uri("replaced.safetensors"))
    with FileReader(checkpoint.files) as reader:
        reader.read_tensor(checkpoint.tensors["a"])
        reader.verify_unchanged()
        # The same size and header, and perhaps the same second: the etag tells, also where there is no mtime.
        s3.put("replaced.safetensors", save(tmp_path / "y", {"a": torch.ones(1000)}).read_bytes())
        with pytest.raises(CheckpointError, match="was changed"):
            reader.verify_unchanged()
        timeless = replace(checkpoint.files[0], mtime_ns=None)
        with FileReader([timeless]) as reads_timeless, pytest.raises(CheckpointError, match=r"was changed \(etag"):
            reads_timeless.verify_unchanged()
        s3.put("replaced.safetensors", b"short")
        with pytest.raises(CheckpointError, match="has 5 bytes, but had"):
            reader.verify_unchanged()
        with pytest.raises(CheckpointError, match="reading 4000 bytes at"):
            reader.read_tensor(checkpoint.tensors["a"])
        s3.delete("replaced.safetensors")
        with pytest.raises(CheckpointError, match="no such bucket or object") as caught:
            reader.verify_unchanged()
        assert caught.value.path == checkpoint.files[0].path
    with FileReader(checkpoint.files) as reader, pytest.raises(CheckpointError, match="no such bucket or object"):
        reader.read_tensor(checkpoint.tensors["a"])


def test_a_short_answer_is_no_answer() -> None:
    handle = pyarrow.BufferReader(bytes(range(100)))
    buffer = bytearray(80)
    options = RemoteOptions(num_tries=2, backoff_s=0.01)
    file = RemoteFile("x://y", handle, FileStat("file", 150), Requests(options))
    assert file.fill(20, [memoryview(buffer)]) == 80
    assert buffer == bytes(range(20, 100))
    with pytest.raises(CheckpointError, match="tried 2 times: the answer has 50 bytes instead of 80"):
        file.fill(50, [memoryview(buffer)])
    with pytest.raises(CheckpointError, match="ends at byte 150, but 80 bytes were asked for at 71"):
        file.fill(71, [memoryview(buffer)])


def test_paths_with_nothing_usable_there(s3: S3Server) -> None:
    s3.put("bin/pytorch_model.bin", b"x")
    for uri, message in (
        (s3.uri("nothing"), "no such file or directory in the store"),
        (s3.uri("nothing").replace("s3://bucket", "s3://no-such-bucket"), "no such file or directory in the store"),
        (s3.uri("bin"), "only pickled weights"),
        (s3.uri("bin/pytorch_model.bin"), "pickled weights are never read"),
        ("s3://bucket/x?bogus=1", "Unexpected query parameter"),
        ("s4://bucket/x", "Unrecognized filesystem type"),
        ("s3://bucket/a#b", "write %23"),
    ):
        with pytest.raises(CheckpointError, match=message) as caught:
            open_checkpoint(uri)
        assert caught.value.path == uri
    with pytest.raises(CheckpointError, match="holds a password") as caught:
        open_checkpoint("s3://key:hidden@bucket/x")
    assert "hidden" not in str(caught.value)


def test_uris_come_apart_and_together_again() -> None:
    for directory in ("s3://b?region=x", "s3://b/a%20b/c?scheme=http&region=x", "hdfs://h:8020/a", "/a/b"):
        for name in ("x", "a b?%#&+é/".rstrip("/"), ".hidden"):
            assert split_path(join_path(directory, name)) == (directory, name)
    assert normal_path("S3://b/a//?region=x") == "S3://b/a?region=x"
    assert normal_path("file:///a%20b/") == "/a b"


@pytest.mark.parametrize(
    ("uri", "kind", "inside"), [("gs://b/x/y", "gcs", "b/x/y"), ("s3://b/x?region=r", "s3", "b/x")]
)
def test_connecting_sets_our_deadlines(uri: str, kind: str, inside: str) -> None:
    system, path = connect(uri, RemoteOptions(request_s=8.0))
    assert (system.type_name, path) == (kind, inside)
    arguments = system.__reduce__()[1][0]
    if kind == "gcs":
        assert arguments["retry_time_limit"].total_seconds() == 4
    else:
        assert (arguments["request_timeout"], arguments["region"]) == (4.0, "r")
