"""Writing into an object store: bytes in any order, errors in time, and no checkpoint before its index is there."""

from __future__ import annotations

import random
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from raysharding.checkpoint import FileReader, SaveRecord, open_checkpoint, writing
from raysharding.checkpoint.storage.output import RemoteOutput
from raysharding.checkpoint.storage.remote import remote_storage
from raysharding.checkpoint.storage.requests import RemoteOptions
from raysharding.checkpoint.storage.uri import join_path
from raysharding.checkpoint.writing import FileWriter, create_staging
from raysharding.checkpoint.writing.manifest import Manifest, write_manifest
from raysharding.errors import CheckpointError
from tests.checkpoint.build import refused
from tests.checkpoint.build import save as save_locally
from tests.faulty_proxy import Fault
from tests.s3 import S3Server, s3, s3_server

__all__ = ["s3", "s3_server"]

QUICK = RemoteOptions(num_tries=2, request_s=4.0, backoff_s=0.01, part_bytes=5 << 20)
"""S3 takes no smaller parts."""
STORAGE = remote_storage(RemoteOptions())
NAME = "model-00001-of-00001.safetensors"


def write(uri: str, values: torch.Tensor, *, commit: bool = True) -> None:
    """Write a checkpoint of one file as a save does."""
    staging = create_staging(uri, overwrite=True)
    with FileWriter(join_path(staging, NAME), [("a", values.dtype, values.shape)]) as writer:
        writer.write_at("a", 0, values.view(torch.uint8))
    write_manifest(staging, Manifest.of_files([writer]))
    if commit:
        writing.write_index(staging, {"a": NAME}, values.nbytes)


def all_names(uri: str) -> list[str]:
    """Everything under a directory."""
    found = []
    for name in names(uri):
        path = join_path(uri, name)
        inner = all_names(path) if STORAGE.find(path).kind == "directory" else []
        found += [f"{name}/{one}" for one in inner] or [name]
    return sorted(found)


def read(uri: str) -> torch.Tensor:
    opened = open_checkpoint(uri)
    with FileReader(opened.files) as reader:
        return reader.read_tensor(opened.tensors["a"])


def names(uri: str) -> list[str]:
    return STORAGE.list_names(uri) if STORAGE.find(uri).kind == "directory" else []


@pytest.mark.parametrize("num_bytes", [0, 100, 12 << 20])
def test_bytes_in_any_order_make_the_file_that_the_disk_would_have(
    s3: S3Server, num_bytes: int, tmp_path: Path
) -> None:
    values = torch.arange(num_bytes, dtype=torch.int32).to(torch.uint8)
    pieces = [(start, values[start : start + 700_001]) for start in range(0, num_bytes, 700_001)]
    random.Random(3).shuffle(pieces)
    paths = (s3.uri(f"order-{num_bytes}/x.safetensors"), str(tmp_path / "x.safetensors"))
    for path in paths:
        with FileWriter(path, [("a", torch.uint8, (num_bytes,))]) as writer:
            for start, piece in pieces:
                writer.write_at("a", start, piece)
    system, inside = STORAGE._locate(paths[0])
    with system.open_input_file(inside) as file:
        assert file.read() == (tmp_path / "x.safetensors").read_bytes()


def test_a_writer_that_is_left_by_an_error_leaves_nothing(s3: S3Server) -> None:
    uri = s3.uri("left/x.safetensors")

    def fail() -> None:
        with FileWriter(uri, [("a", torch.uint8, (6 << 20,))]) as writer:
            writer.write_at("a", 0, torch.zeros(5 << 20, dtype=torch.uint8))
            raise KeyError("somebody else's")

    with pytest.raises(KeyError):
        fail()
    assert STORAGE.find(uri).kind == "missing"
    with pytest.raises(CheckpointError, match="was not written in full"):
        FileWriter(uri, [("a", torch.uint8, (6,))]).close()
    assert STORAGE.find(uri).kind == "missing"


def fill(output: RemoteOutput, data: memoryview) -> None:
    for start in range(0, data.nbytes, 1 << 20):
        output.write(data[start : start + (1 << 20)], start, None)
    output.finish()


@pytest.mark.parametrize("times", [1, 1 << 30], ids=["once", "always"])
@pytest.mark.parametrize("kind", ["status", pytest.param("stall", marks=pytest.mark.full)])
def test_a_part_that_fails_is_sent_again_and_then_told_of(s3: S3Server, kind: str, times: int) -> None:
    s3.proxy.faults.append(Fault(kind, method="PUT", times=times, after_bytes=-1))  # type: ignore[arg-type]
    began = time.monotonic()
    # Only a store that stalls takes the deadline; a loaded machine may be silent for seconds.
    options = QUICK if kind == "stall" else replace(QUICK, request_s=30.0)
    output = RemoteOutput(s3.uri(f"{kind}-{times}/x"), options)
    data = memoryview(bytes(16 << 20))
    if times == 1:
        output.write(data, 0, None)
        output.finish()
        assert STORAGE.find(s3.uri(f"{kind}-{times}/x")).num_bytes == 16 << 20
        return
    with pytest.raises(CheckpointError, match=r"cannot be written: .*"):
        fill(output, data)
    output.abort()
    assert time.monotonic() - began < 40
    s3.proxy.reset()
    assert STORAGE.find(s3.uri(f"{kind}-{times}/x")).kind == "missing"


def test_retries_of_a_small_file_are_not_multiplied_by_pyarrows(s3: S3Server) -> None:
    s3.proxy.faults.append(Fault("status", method="PUT", status=500, code="InternalError"))
    s3.proxy.faults.append(Fault("status", method="POST", status=500, code="InternalError"))
    with pytest.raises(CheckpointError, match=r"tried 2 times: .*INTERNAL_FAILURE"):
        remote_storage(QUICK).put(s3.uri("small/x.json"), b"{}")
    assert len([request for request in s3.proxy.requests if request.method in ("PUT", "POST")]) == QUICK.num_tries


def test_the_index_commits(s3: S3Server) -> None:
    uri = s3.uri("commit")
    write(uri, torch.zeros(10), commit=False)
    assert writing.is_left_over(uri)
    refused(uri, "restore the index")
    with pytest.raises(CheckpointError, match="exists already"):
        create_staging(uri, overwrite=False)
    write(uri, torch.ones(10))
    assert not writing.is_left_over(uri)
    assert read(uri).eq(1).all()
    write(uri, torch.full((10,), 2.0))
    assert read(uri).eq(2).all()
    writing.remove_staging(uri)
    assert names(uri) == []


def test_what_is_no_checkpoint_is_not_replaced(s3: S3Server, tmp_path: Path) -> None:
    uri = s3.uri("work")
    writing.write_file(uri, "thesis.txt", b"three years")
    with pytest.raises(CheckpointError, match=r"holds what no save wrote: thesis.txt;"):
        create_staging(uri, overwrite=True)
    assert names(uri) == ["thesis.txt"]
    with pytest.raises(CheckpointError, match="is not a directory"):
        create_staging(join_path(uri, "thesis.txt"), overwrite=True)
    # A checkpoint of somebody else's, in one file, is one.
    save_locally(tmp_path / "model.safetensors", {"a": torch.zeros(3)})
    theirs = s3.upload(tmp_path, "theirs")
    assert not writing.is_left_over(theirs)
    write(theirs, torch.ones(3))
    ours = [NAME, "model.safetensors.index.json", "raysharding.manifest.json", "raysharding.save.json"]
    assert names(theirs) == ours


def test_what_no_save_wrote_is_refused_and_outlasts_the_save(s3: S3Server) -> None:
    theirs = ["README.md", "checkpoint-500/model.safetensors", "optimizer/notes.txt", "tokenizer.json"]
    older = ["model-00001-of-00002.safetensors", "config.json", "optimizer/model.safetensors", "training/x.txt"]
    uri = s3.uri("mixed/step-1")
    write(uri, torch.zeros(10))
    for name in (*theirs, *older):
        s3.put(f"mixed/step-1/{name}", b"{}")
    SaveRecord.of("0a", {"vocab.txt": b"words", "tokenizer.json": b"of the save"}).write(uri)
    s3.put("mixed/step-1/vocab.txt", b"words")
    theirs.append("training/x.txt")
    found = all_names(uri)
    named = ", ".join(sorted({*theirs, "checkpoint-500"} - {theirs[1]}))
    with pytest.raises(CheckpointError, match=f"wrote: {named};"):
        create_staging(uri, overwrite=True)
    assert all_names(uri) == found
    write(s3.uri("mixed/step-2"), torch.ones(10))
    writing.remove_older(s3.uri("mixed/step-2"), 1)
    assert all_names(uri) == sorted(theirs)
    assert writing.newest_after(uri) == s3.uri("mixed/step-2"), "what is left is no save"


def test_small_files_that_an_older_save_copied_go_with_it(s3: S3Server) -> None:
    """Also those of a save that was killed before modules.json, which would name the folder of their weights."""
    first = {"tokenizer.json": b"{}", "2_Dense/model.safetensors": b"dense", "old.txt": b"o"}
    uri = s3.uri("source/step-1")
    write(uri, torch.zeros(10))
    SaveRecord.of("0a", first).write(uri)
    for name, data in first.items():
        s3.put(f"source/step-1/{name}", data)
    create_staging(uri, overwrite=True, token="0b")
    assert all_names(uri) == ["raysharding.save.json"]


def test_the_newest_stay(s3: S3Server) -> None:
    for number in (1, 2, 10):
        write(s3.uri(f"row/step-{number}"), torch.full((2,), float(number)))
    write(s3.uri("row/step-5"), torch.zeros(2), commit=False)
    writing.write_file(s3.uri("row/step-3"), "notes.txt", b"mine")
    assert writing.newest_after(s3.uri("row/step-2")) == s3.uri("row/step-2")
    assert writing.newest_after(s3.uri("row/step-4")) == s3.uri("row/step-10")
    assert writing.newest_after(s3.uri("row/step-5")) == s3.uri(
        "row/step-10"
    )  # its removal has begun, or it never was one
    assert writing.newest_after(s3.uri("nowhere/step-4")) == s3.uri("nowhere/step-4")
    writing.remove_older(s3.uri("row/step-10"), 2)
    assert names(s3.uri("row")) == ["step-10", "step-2", "step-3", "step-5"]
    assert read(s3.uri("row/step-2")).eq(2).all()
