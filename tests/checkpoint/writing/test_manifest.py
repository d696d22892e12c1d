"""The manifest beside a save: equal to an independent computation, finds what changed, and is never trusted itself."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from raysharding.checkpoint import (
    Checkpoint,
    FileReader,
    Manifest,
    check_manifest,
    mismatches,
    open_checkpoint,
    read_manifest,
)
from raysharding.checkpoint.format import Checksums
from raysharding.checkpoint.format import index as index_module
from raysharding.checkpoint.writing import FileWriter, write_index, write_manifest
from raysharding.errors import CheckpointError
from tests.checkpoint.build import bits, random_tensors, refused, sidecar_files
from tests.s3 import S3Server, s3, s3_server

__all__ = ["s3", "s3_server"]

NAME = "raysharding.manifest.json"


def save(directory: Path, files: dict[str, dict[str, torch.Tensor]]) -> Path:
    """A directory of several files, an index and a manifest, the parts of each file written backwards."""
    directory.mkdir()
    writers = []
    for name, tensors in files.items():
        parts = [(key, tensor.dtype, tensor.shape) for key, tensor in tensors.items()]
        with FileWriter(str(directory / name), parts) as writer:
            for key, tensor in tensors.items():
                for start in reversed(range(0, tensor.nbytes, 1000)):
                    writer.write_at(key, start, bits(tensor)[start : start + 1000])
        writers.append(writer)
    weight_map = {key: name for name, tensors in files.items() for key in tensors}
    write_index(str(directory), weight_map, sum(t.nbytes for tensors in files.values() for t in tensors.values()))
    write_manifest(str(directory), Manifest.of_parts(Manifest.of_files([writer]) for writer in writers))
    return directory


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    first = {"a": torch.randn(300, 7), 'odd " имя': torch.zeros(2), "empty": torch.zeros(0, 3)}
    return save(tmp_path / "saved", {"x.safetensors": first, "y.safetensors": {"b": torch.randn(999)}})


def checksums_of(checkpoint: Checkpoint) -> Checksums:
    """Read every tensor."""
    checksums = Checksums()
    with FileReader(checkpoint.files) as reader:
        for name, info in checkpoint.tensors.items():
            checksums.add(name, 0, bits(reader.read_tensor(info)))
    return checksums


def manifest_of(directory: Path) -> Manifest:
    """What the directory's manifest says."""
    return read_manifest(open_checkpoint(directory))  # type: ignore[return-value]  # or the test fails


def test_an_untouched_save_agrees_with_its_manifest(saved: Path) -> None:
    for path in (saved, saved / "x.safetensors", saved / "model.safetensors.index.json"):
        checkpoint = open_checkpoint(path)
        manifest = manifest_of(saved)
        check_manifest(manifest, checkpoint)
        assert mismatches(manifest, checksums_of(checkpoint), checkpoint.tensors) == []
    assert mismatches(manifest_of(saved), checksums_of(open_checkpoint(saved))) == []
    assert manifest_of(saved).as_dict() == json.loads((saved / NAME).read_text())
    assert manifest_of(saved).num_bytes == 300 * 7 * 4 + 2 * 4 + 999 * 4


def test_every_dtype_and_shape(tmp_path: Path) -> None:
    directory = save(tmp_path / "saved", {"model.safetensors": random_tensors()})
    check_manifest(manifest_of(directory), open_checkpoint(directory))
    assert mismatches(manifest_of(directory), checksums_of(open_checkpoint(directory))) == []


def test_a_tensor_written_at_once(tmp_path: Path) -> None:
    data = random.Random(0).randbytes(1_000_001)
    with FileWriter(str(tmp_path / "model.safetensors"), [("a", torch.uint8, (len(data),))]) as writer:
        writer.write_at("a", 0, memoryview(data))
    assert Manifest.of_files([writer]).tensors["a"].crc32 == zlib.crc32(data)
    assert (tmp_path / "model.safetensors").read_bytes().endswith(data)


def test_a_flipped_bit_is_found_and_named(saved: Path) -> None:
    path = saved / "y.safetensors"
    data = bytearray(path.read_bytes())
    data[-500] ^= 0x10
    path.write_bytes(data)
    checkpoint = open_checkpoint(saved)
    manifest = manifest_of(saved)
    check_manifest(manifest, checkpoint)  # the header is as it was
    start = checkpoint.tensors["b"].offset
    found = zlib.crc32(data[start:])
    expected = f"tensor 'b': crc32 of 3996 bytes: expected {manifest.tensors['b'].crc32:08x}, found {found:08x}"
    assert mismatches(manifest, checksums_of(checkpoint)) == [expected]
    assert mismatches(manifest, checksums_of(checkpoint), ["a", "empty"]) == []


def test_tensors_that_were_not_read_are_mismatches(saved: Path) -> None:
    manifest = manifest_of(saved)
    lines = mismatches(manifest, checksums_of(open_checkpoint(saved / "x.safetensors")))
    crc = f"{manifest.tensors['b'].crc32:08x}"
    assert lines == [f"tensor 'b': crc32 of 3996 bytes: expected {crc}, bytes [0, 3996) were not read"]
    assert mismatches(manifest, Checksums(), ["nobody"]) == [f"tensor 'nobody': is not in {NAME}"]


def test_files_that_are_not_the_saved_ones_are_found_before_data(saved: Path, tmp_path: Path) -> None:
    manifest = manifest_of(saved)
    files = {"x.safetensors": {"a": torch.randn(300, 7)}, "y.safetensors": {"b": torch.ones(99)}}
    other = save(tmp_path / "other", files)

    def refused(message: str) -> None:
        with pytest.raises(CheckpointError, match=message) as caught:
            check_manifest(manifest, open_checkpoint(saved))
        assert caught.value.path == str(saved / "y.safetensors")
        assert f"remove {NAME}" in str(caught.value)

    # As many bytes, another dtype: only the header's hash tells.
    header = (saved / "y.safetensors").read_bytes()
    size = int.from_bytes(header[:8], "little")
    entries = json.loads(header[8 : 8 + size])
    entries["b"] |= {"dtype": "I32"}
    text = json.dumps(entries, separators=(",", ":")).encode().ljust(size)
    (saved / "y.safetensors").write_bytes(header[:8] + text + header[8 + size :])
    refused("has a header with SHA-256 [0-9a-f]{64}, but")
    shutil.copyfile(other / "y.safetensors", saved / "y.safetensors")
    refused(r"has \d+ bytes, but raysharding.manifest.json says \d+")
    (saved / "x.safetensors").rename(saved / "z.safetensors")
    (saved / "model.safetensors.index.json").unlink()
    with pytest.raises(CheckpointError, match=r"is not in raysharding\.manifest\.json"):
        check_manifest(manifest, open_checkpoint(saved / "z.safetensors"))


def test_a_truncated_file_is_found(saved: Path) -> None:
    path = saved / "y.safetensors"
    os.truncate(path, path.stat().st_size - 1)
    refused(saved, "truncated")
    # Shorter, yet whole: only the manifest knows that it was longer.
    save_file({"b": torch.randn(998)}, path)
    with pytest.raises(CheckpointError, match=r"has \d+ bytes, but"):
        check_manifest(manifest_of(saved), open_checkpoint(saved))


def test_a_tensor_that_the_manifest_lacks_or_sizes_otherwise(saved: Path) -> None:
    fields = json.loads((saved / NAME).read_text())
    fields["tensors"]["a"]["num_bytes"] += 1
    (saved / NAME).write_text(json.dumps(fields))
    with pytest.raises(CheckpointError, match="has 8400 bytes, but the manifest says 8401 bytes") as caught:
        check_manifest(manifest_of(saved), open_checkpoint(saved))
    assert caught.value.tensor == "a"
    del fields["tensors"]["a"]
    (saved / NAME).write_text(json.dumps(fields))
    with pytest.raises(CheckpointError, match="does not list it") as caught:
        check_manifest(manifest_of(saved), open_checkpoint(saved))
    assert caught.value.tensor == "a"


def test_no_manifest_is_none(saved: Path) -> None:
    (saved / NAME).unlink()
    assert read_manifest(open_checkpoint(saved)) is None


def test_one_in_an_object_store(saved: Path, s3: S3Server) -> None:
    checkpoint = open_checkpoint(s3.upload(saved, "runs/step 1"))
    manifest = read_manifest(checkpoint)
    assert manifest == manifest_of(saved)
    check_manifest(manifest, checkpoint)
    assert mismatches(manifest, checksums_of(checkpoint)) == []
    s3.put(f"runs/step 1/{NAME}", b"{}")
    with pytest.raises(CheckpointError, match="is of format_version None") as caught:
        read_manifest(checkpoint)
    assert NAME in str(caught.value.path)
    s3.delete(f"runs/step 1/{NAME}")
    assert read_manifest(checkpoint) is None


def test_it_is_no_sidecar(saved: Path) -> None:
    (saved / "tokenizer.json").write_text("{}")
    assert sidecar_files(open_checkpoint(saved)) == ("tokenizer.json",)


FILE = {"num_bytes": 1, "header_sha256": "0" * 64}
TENSOR = {"num_bytes": 1, "crc32": "00000000"}
GOOD: dict[str, Any] = {"format_version": 1, "algorithm": "crc32", "files": {"f": FILE}, "tensors": {"t": TENSOR}}


@pytest.mark.parametrize(
    ("content", "message", "tensor"),
    [
        (b"", "manifest is not JSON", None),
        (b'{"format_version": 1, "format_version": 1}', "gives the key 'format_version' twice", None),
        (b"[]", "manifest is a JSON list, not an object", None),
        (b"\xff", "manifest is not UTF-8", None),
        (b"[" * 100_000, "nested too deep", None),
        (b'{"files": {"a": 1, "a": 2}}', "gives the key 'a' twice", None),
        (b'{"format_version": NaN}', "holds NaN", None),
        (b'{"format_version": ' + b"9" * 5000 + b"}", "manifest", None),
        ({"format_version": 1.0}, "is of format_version 1.0", None),
        ({"algorithm": None}, "with algorithm None", None),
        ({"files": [FILE]}, "is not what a save writes: AttributeError", None),
        ({"files": {"f": 1}}, "is not what a save writes: TypeError", None),
        ({"tensors": []}, "is not what a save writes: AttributeError", None),
        ({"format_version": 2}, "is of format_version 2 with algorithm 'crc32'.*upgrade raysharding", None),
        ({"format_version": True}, "is of format_version True", None),
        ({"algorithm": "md5"}, "with algorithm 'md5'", None),
        ({"files": None}, "is not what a save writes: AttributeError", None),
        ({"files": {"f": {"num_bytes": 1}}}, "is not what a save writes: TypeError", None),
        ({"files": {"f": FILE | {"n" * 5000: 1}}}, "is not what a save writes: TypeError", None),
        ({"tensors": {"t": []}}, "is not what a save writes: TypeError", None),
        ({"tensors": {"t": {"num_bytes": 1}}}, "is not what a save writes: KeyError: .*crc32", None),
        ({"tensors": {"t": TENSOR | {"crc32": 0}}}, "is not what a save writes: TypeError", None),
        ({"tensors": {"t": TENSOR | {"crc32": "0000000G"}}}, "is not what a save writes: ValueError", None),
    ],
)
def test_a_manifest_that_cannot_be_trusted(
    saved: Path, content: bytes | dict[str, Any], message: str, tensor: str | None
) -> None:
    data = content if isinstance(content, bytes) else json.dumps(GOOD | content).encode()
    (saved / NAME).write_bytes(data)
    checkpoint = open_checkpoint(saved)  # does not care
    with pytest.raises(CheckpointError, match=message) as caught:
        read_manifest(checkpoint)
    assert caught.value.path == str(saved / NAME)
    assert caught.value.tensor == tensor
    assert len(str(caught.value)) < 1000


def test_the_good_one_above_is_good(saved: Path) -> None:
    (saved / NAME).write_text(json.dumps(GOOD))
    assert manifest_of(saved).as_dict() == GOOD


def test_a_huge_one_and_one_that_is_no_file(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = open_checkpoint(saved)
    monkeypatch.setattr(index_module, "MAX_JSON_BYTES", 100)
    with pytest.raises(CheckpointError, match="is over the cap of 100 bytes"):
        read_manifest(checkpoint)
    (saved / NAME).unlink()
    os.mkfifo(saved / NAME)  # opening it would wait for a writer
    with pytest.raises(CheckpointError, match=re.escape("is not a regular file")):
        read_manifest(checkpoint)
