"""Checkpoints in an object store, a real S3 server: as local files, and as far as a store that fails lets one read."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow
import pytest
import torch

from raysharding.checkpoint import Checkpoint, FileReader, identify, identify_files, open_checkpoint
from raysharding.checkpoint.format import read_beside
from raysharding.checkpoint.format.sidecars import read_sidecar
from raysharding.checkpoint.storage import DEFAULT_REMOTE, file_system_type, read_bytes, remote_storage, storage_of
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
    refused,
    save,
    save_sharded,
    sidecar_files,
    write_raw,
)
from tests.clock import now
from tests.faulty_proxy import Fault
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
        sides = ([(f.name, f.num_bytes, f.header_sha256) for f in side.files] for side in (there, here))
        assert next(sides) == next(sides)
        assert there.path == s3.uri(key)
        assert there.directory == s3.uri("dir/ckpt")
        sidecars = ("1_Pooling/config é.json", "config.json", "tokenizer.json")
        assert sidecar_files(there) == sidecar_files(here) == sidecars
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
    error = refused(s3.uri("hostile"), "index names the file")
    assert (error.path, error.tensor) == (s3.uri(f"hostile/{INDEX}"), "a")
    assert all("x.safetensors" not in request.path for request in s3.proxy.requests)


def test_an_index_that_names_a_missing_file(s3: S3Server) -> None:
    s3.put(f"missing/{INDEX}", json.dumps({"weight_map": {"a": "gone.safetensors"}}).encode())
    refused(s3.uri("missing"), r"'gone\.safetensors', which is missing")


def test_a_header_that_lies_about_its_length_is_refused_after_its_8_bytes(tmp_path: Path, s3: S3Server) -> None:
    for length, message in ((1 << 40, "over the cap"), (90_000_000, "does not fit into")):
        path = write_raw(tmp_path / "x", GOOD, GOOD_PAYLOAD, length=length)
        s3.put("lies/model.safetensors", path.read_bytes())
        s3.proxy.reset()
        assert refused(s3.uri("lies"), message).path == s3.uri("lies/model.safetensors")
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
        assert refused(uri, message).path == uri
    assert "hidden" not in str(refused("s3://key:hidden@bucket/x", "holds a password"))


def test_uris_come_apart_and_together_again() -> None:
    for directory in ("s3://b?region=x", "s3://b/a%20b/c?scheme=http&region=x", "hdfs://h:8020/a", "/a/b"):
        for name in ("x", "a b?%#&+é/".rstrip("/"), ".hidden"):
            assert split_path(join_path(directory, name)) == (directory, name)
    assert normal_path("S3://b/a//?region=x") == "S3://b/a?region=x"
    assert normal_path("file:///a%20b/") == "/a b"


def test_connecting_sets_our_deadlines() -> None:
    made = []
    for uri, kind, inside in (("gs://b/x/y", "gcs", "b/x/y"), ("s3://b/x?region=r", "s3", "b/x")):
        system, path = connect(uri, RemoteOptions(request_s=8.0))
        assert (system.type_name, path) == (kind, inside)
        made.append(system.__reduce__()[1][0])
    assert made[0]["retry_time_limit"].total_seconds() == 4
    assert (made[1]["request_timeout"], made[1]["region"]) == (4.0, "r")


__all__ = ["s3", "s3_server"]

QUICK = RemoteOptions(num_tries=3, request_s=1.0, backoff_s=0.01, part_bytes=1 << 20)
SLACK_S = 5.0  # of threads on a loaded machine: pyarrow alone notices a stalled body after 8 s, and three are tried
VALUES = torch.arange(1_000_000, dtype=torch.int32)
NUM_PARTS = -(-VALUES.nbytes // QUICK.part_bytes)


@pytest.fixture(scope="module")
def uri(s3_server: S3Server, tmp_path_factory: pytest.TempPathFactory) -> str:
    path = save(tmp_path_factory.mktemp("x") / "model.safetensors", {"a": VALUES})
    return s3_server.upload(path.parent, "ckpt")


@pytest.fixture
def checkpoint(uri: str, s3: S3Server) -> Checkpoint:
    opened = open_checkpoint(uri, remote=QUICK)
    s3.proxy.reset()
    return opened


def read_a(checkpoint: Checkpoint, options: RemoteOptions = QUICK) -> torch.Tensor:
    with FileReader(checkpoint.files, options) as reader:
        return reader.read_tensor(checkpoint.tensors["a"])


@pytest.mark.parametrize(
    "fault",
    [
        Fault("status", status=500, code="InternalError", times=2),
        Fault("status", status=503, code="SlowDown", times=2),
        Fault("status", status=503, method="HEAD", times=2),
        Fault("status", status=429, code="TooManyRequests", times=2),
        Fault("reset", after_bytes=400_000, times=2),
        Fault("reset", after_bytes=-1, times=2),
        Fault("stall", after_bytes=400_000, times=2),
        Fault("stall", after_bytes=-1, times=1),
        Fault("short", times=2),
    ],
    ids=lambda fault: f"{fault.kind}-{fault.status}-{fault.method}-{fault.after_bytes}",
)
def test_what_passes_is_tried_again_and_the_bytes_are_right(checkpoint: Checkpoint, s3: S3Server, fault: Fault) -> None:
    s3.proxy.faults.append(fault)
    begun = now()
    assert torch.equal(read_a(checkpoint), VALUES)
    assert now() - begun < 3 * QUICK.request_s + SLACK_S
    assert fault.times == 0, "the fault never hit"


def test_opening_tries_again_too(uri: str, s3: S3Server) -> None:
    faults = [Fault("status", path="list-type", times=2), Fault("status", method="HEAD", path="safetensors$", times=2)]
    s3.proxy.faults += [*faults, Fault("reset", path="safetensors$", after_bytes=3, times=2)]
    assert list(open_checkpoint(uri, remote=QUICK).tensors) == ["a"]
    assert [fault.times for fault in s3.proxy.faults] == [0, 0, 0]


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (Fault("status", status=500, code="InternalError"), "INTERNAL_FAILURE"),
        (Fault("reset"), "NETWORK_CONNECTION"),
        (Fault("stall"), "no full answer within 1 s|Operation too slow"),
        (Fault("short"), "the answer has fewer"),
        (Fault("stall", after_bytes=-1), "no full answer within 1 s|Operation too slow"),
    ],
    ids=["500", "reset", "stall", "short", "silence"],
)
def test_what_stays_ends_in_an_error_before_the_deadline(
    checkpoint: Checkpoint, s3: S3Server, fault: Fault, said: str
) -> None:
    s3.proxy.faults.append(fault)
    begun = now()
    with pytest.raises(CheckpointError, match=rf"reading \d+ bytes at \d+ failed, tried 3 times: .*({said})") as caught:
        read_a(checkpoint)
    assert now() - begun < 3 * QUICK.request_s + SLACK_S
    sent = sum(fault.times for fault in s3.proxy.faults)
    most = NUM_PARTS * QUICK.num_tries * (2 if fault.kind == "short" else 1)  # a short answer is asked for twice
    assert (1 << 30) - most <= sent <= (1 << 30) - QUICK.num_tries
    assert caught.value.path == checkpoint.files[0].path
    assert caught.value.tensor == "a"
    assert f"failed, tried {QUICK.num_tries} times" in caught.value.message
    assert "check the network and the store" in caught.value.message
    s3.proxy.reset()
    assert torch.equal(read_a(checkpoint), VALUES)


def test_a_range_may_end_in_any_byte(s3: S3Server) -> None:
    s3.put("ends/bytes", data := bytes(range(256)))
    lengths = range(1, 257)
    file = remote_storage(DEFAULT_REMOTE).open(s3.uri("ends/bytes"))  # a slow machine needs no second try
    assert [read_bytes(file, 0, length) for length in lengths] == [data[:length] for length in lengths]
    assert len([request for request in s3.proxy.requests if request.method == "GET"]) == len(lengths) + 1


def test_a_header_of_which_every_answer_is_short_is_an_error(checkpoint: Checkpoint, s3: S3Server) -> None:
    s3.proxy.faults.append(Fault("short", path="safetensors$"))
    refused(checkpoint.directory, "reading 8 bytes at 0 failed", remote=QUICK)


def test_refusals_are_not_tried_again_and_name_the_variables(checkpoint: Checkpoint, s3: S3Server) -> None:
    opened = remote_storage(QUICK).open(checkpoint.files[0].path)
    s3.proxy.reset()
    s3.proxy.faults.append(Fault("status", status=403, code="AccessDenied"))
    one_part = RemoteOptions(num_tries=3, request_s=1.0, part_bytes=8 << 20, max_in_flight=1)
    with pytest.raises(CheckpointError, match=r"tried once: .*ACCESS_DENIED.*AWS_ACCESS_KEY_ID"):
        read_a(checkpoint, one_part)
    assert len([request for request in s3.proxy.requests if request.method == "GET"]) == 1
    with pytest.raises(CheckpointError, match=r"tried once: .*ACCESS_DENIED.*AWS_ACCESS_KEY_ID"):
        read_bytes(opened, 0, 8)  # an answer with less room than the text of the error


def test_a_part_that_fails_for_good_stops_the_others(checkpoint: Checkpoint, s3: S3Server) -> None:
    options = RemoteOptions(part_bytes=100_000, max_in_flight=3, num_tries=3, request_s=5.0)
    for _ in range(3):
        s3.proxy.reset()
        s3.proxy.faults.append(Fault("status", status=403, code="AccessDenied", skip=1))
        with pytest.raises(CheckpointError, match="ACCESS_DENIED"):
            read_a(checkpoint, options)
        assert len(s3.proxy.requests) < 9  # of 40 parts
    s3.proxy.reset()
    s3.proxy.delay_s = 0.05
    assert torch.equal(read_a(checkpoint, options), VALUES)
    assert s3.proxy.most_in_flight == 3, "leave to send was not given back"


def test_a_read_that_failed_writes_nothing_later(checkpoint: Checkpoint, s3: S3Server) -> None:
    s3.proxy.faults.append(Fault("stall", after_bytes=500_000))
    buffer = bytearray(2_000_000)
    with FileReader(checkpoint.files, QUICK) as reader, pytest.raises(CheckpointError):
        reader.read_into(0, 100, memoryview(buffer))
    before = bytes(buffer)
    s3.proxy.reset()
    time.sleep(0.3)  # the stalled requests end now, in threads that nobody waits for
    assert buffer == before


_EXIT = """
import sys
from raysharding.checkpoint import FileReader, open_checkpoint
from raysharding.checkpoint.storage import DEFAULT_REMOTE, join_path, read_bytes, remote_storage
from raysharding.checkpoint.storage.requests import RemoteOptions
options = RemoteOptions(num_tries=1, request_s=1.0)
checkpoint = open_checkpoint(sys.argv[1], remote=options)
print("opened", flush=True)
sys.stdin.readline()
with FileReader(checkpoint.files, options) as reader:
    reader.read_tensor(checkpoint.tensors["a"])
"""


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(None, id="right", marks=pytest.mark.full),
        pytest.param(Fault("stall"), id="stall", marks=pytest.mark.full),
        pytest.param(Fault("stall", after_bytes=-1), id="mute"),
    ],
)
def test_a_process_ends_cleanly_with_a_request_still_under_way(uri: str, s3: S3Server, fault: Fault | None) -> None:
    root = Path(__file__).resolve().parents[3]
    command, pipe = [sys.executable, "-c", _EXIT, uri], subprocess.PIPE
    process = subprocess.Popen(command, cwd=root, stdin=pipe, stdout=pipe, stderr=pipe, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "opened\n"
    s3.proxy.faults += [fault] if fault is not None else []
    start = time.monotonic()
    _, errors = process.communicate("\n", timeout=60)
    assert time.monotonic() - start < 20
    assert process.returncode == (0 if fault is None else 1), errors
    assert fault is None or "CheckpointError" in errors.splitlines()[-1]


WRONG: dict[str, Any] = {"part_bytes": 0, "max_in_flight": 1.5, "num_tries": True, "request_s": float("inf")}
WRONG |= {"backoff_s": -1.0, "max_backoff_s": "1"}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_options_are_named(name: str) -> None:
    with pytest.raises(ValueError, match=name):
        RemoteOptions(**{name: WRONG[name]})
