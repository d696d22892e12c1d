"""Sharded torch checkpoints: what torch writes is read to the last bit, and nothing in it is believed or run."""

from __future__ import annotations

import io
import os
import pickle
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, MetadataIndex

from raysharding.checkpoint import DcpReader
from raysharding.checkpoint.torch_formats import dcp_reader as dcp
from raysharding.checkpoint.torch_formats.dcp_metadata import read_dcp_metadata
from raysharding.errors import CheckpointError
from tests.checkpoint.build import random_tensors
from tests.checkpoint.torch_formats.dcp_files import (
    FILE,
    assert_same_bits,
    cut,
    metadata_of,
    read_all,
    read_with_torch,
    save_with_torch,
    saved,
    write_dcp,
    write_metadata,
)

pytestmark = pytest.mark.timeout(60)


WHOLE = torch.arange(24.0).reshape(4, 6)


class Hostile:
    """Runs a command when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.mark}",)


def change_place(metadata: Any, **fields: Any) -> None:
    vars(metadata.storage_data[MetadataIndex("w", (0, 0))]).update(fields)


def refused(directory: Path, message: str, metadata: Any = None, read: Any = read_all, **place: Any) -> None:
    """Write metadata, if given, with these fields of the place of "w"; a read must raise an error with this message."""
    if metadata is not None:
        change_place(metadata, **place)
        write_metadata(directory, metadata)
    with pytest.raises(CheckpointError, match=message):
        read(directory)


def refused_at_once(directory: Path, message: str, metadata: bytes | None = None) -> None:
    """Write metadata, if given; `read_dcp_metadata` must raise an error with this message."""
    if metadata is not None:
        (directory / ".metadata").write_bytes(metadata)
    refused(directory, message, read=read_dcp_metadata)


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces of 64 bytes: every tensor has many."""
    monkeypatch.setattr(dcp, "PIECE_BYTES", 64)


@pytest.mark.parametrize("piece_bytes", [64, 1000, 4 << 20])
def test_every_dtype_and_shape(piece_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dcp, "PIECE_BYTES", piece_bytes)
    tensors = random_tensors() | {"C128": torch.randn(7, 5, dtype=torch.complex128), "wide": torch.randn(2, 999)}
    save_with_torch(tmp_path, tensors)
    assert_same_bits(read_all(tmp_path), tensors)


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize(
    "cuts",
    [((3, 4),), ((), (1, 8)), ((2,), (5,)), ((), (), (3,)), ((1, 6), (4,), (2, 3)), ((), (), ())],
    ids=str,
)
def test_chunks_cut_along_any_dimensions(cuts: tuple[tuple[int, ...], ...], tmp_path: Path) -> None:
    whole = torch.randn(7, 9, 5).bfloat16()
    write_dcp(tmp_path, {"w": cut(whole, *cuts), "long": cut(torch.arange(999), (1, 500))})
    assert_same_bits(read_all(tmp_path), {"w": whole, "long": torch.arange(999)})
    assert_same_bits(read_with_torch(tmp_path), {"w": whole, "long": torch.arange(999)})


@pytest.mark.usefixtures("small_pieces")
def test_chunks_need_not_be_a_grid(tmp_path: Path) -> None:
    whole = torch.randn(4, 6)
    parts = [((0, 0), whole[:, :2]), ((0, 2), whole[:1, 2:]), ((1, 2), whole[1:, 2:5]), ((1, 5), whole[1:, 5:])]
    write_dcp(tmp_path, {"w": [(offsets, part.clone()) for offsets, part in parts]})
    assert_same_bits(read_all(tmp_path), {"w": whole})


@pytest.mark.usefixtures("small_pieces")
def test_memory_in_another_order(tmp_path: Path) -> None:
    tensors = {
        "transposed": torch.randn(30, 40).t(),
        "channels last": torch.randn(3, 5, 6, 7).to(memory_format=torch.channels_last),
        "conjugate": torch.randn(20, dtype=torch.complex64).conj(),
        "negative": torch.randn(20, dtype=torch.complex64).conj().imag,
        "one row": torch.randn(9, 1).t(),
    }
    save_with_torch(tmp_path, tensors)
    assert_same_bits(read_all(tmp_path), {name: tensor.resolve_conj() for name, tensor in tensors.items()})


def test_places_in_the_saved_state_and_plain_values(tmp_path: Path) -> None:
    groups = [{"lr": 0.1, "betas": (0.9, 0.99), "params": ["a", "b"]}, {"step": torch.tensor(3)}]
    state = {"model": {"a.b": torch.ones(2)}, "groups": groups, "flags": {1, 2}, "none": None, "dtype": torch.bfloat16}
    save_with_torch(tmp_path, state)
    reader = DcpReader(tmp_path)
    places = {key: reader.metadata.paths[key] for key in reader.metadata.tensors}
    values = {reader.metadata.paths[key]: reader.read_value(key) for key in reader.metadata.values}
    assert places == {"model.a.b": ("model", "a.b"), "groups.1.step": ("groups", 1, "step")}
    assert values == {
        ("groups", 0, "lr"): 0.1,
        ("groups", 0, "betas"): (0.9, 0.99),
        ("groups", 0, "params"): ["a", "b"],
        ("flags",): {1, 2},
        ("none",): None,
        ("dtype",): torch.bfloat16,
    }


def test_hostile_metadata_runs_nothing_and_is_named(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    metadata = metadata_of({"w": cut(torch.ones(4))}, tmp_path)
    metadata.planner_data = {"w": ("w",), "x": Hostile(mark)}
    write_metadata(tmp_path, metadata)
    refused_at_once(tmp_path, r"\.metadata: names posix\.system")
    assert not mark.exists()
    # It is the same file that torch's own reader runs.
    read_with_torch(tmp_path)
    assert mark.exists()


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (b"cbuiltins\neval\n(V1+1\ntR.", "builtins.eval"),
        (b"cos\nsystem\n(Vtrue\ntR.", "os.system"),
        (b"ctorch\nload\n(Vx\ntR.", "torch.load"),
        (b"ctorch.distributed.checkpoint.metadata\nos.system\n(Vtrue\ntR.", "metadata.os.system"),
        (b"\x80\x04\x8c\x08builtins\x8c\x04exec\x93.", "builtins.exec"),
        (b"\x80\x02}(\x82\x01t.", "extension code"),
        (b"Pid\n.", "persistent id"),
        # `getattr` is how Python 3.11 pickles members of an enum; here it is no function.
        (b"cbuiltins\ngetattr\n(ctorch\nSize\nV__subclasses__\ntR(tR.", "is not what torch writes"),
    ],
)
def test_names_that_are_not_admitted(call: bytes, named: str, tmp_path: Path) -> None:
    refused_at_once(tmp_path, named, call)


MODULE = b"ctorch.distributed.checkpoint.metadata\n"


@pytest.mark.parametrize("name", [b"Metadata", b"MetadataIndex", b"TensorProperties", b"_MEM_FORMAT_ENCODING"])
def test_nothing_is_written_into_what_has_an_admitted_name(name: bytes, tmp_path: Path) -> None:
    refused_at_once(tmp_path, "a state for what has none", MODULE + name + b"\n(N}(Vmark\nI1\nutb.")


def test_keys_within_keys_cost_no_more_than_their_bytes(tmp_path: Path) -> None:
    # Each level is an index of two that are the level below: torch's own would be hashed 2 ** 200 times.
    level = b"p0\n0" + MODULE + b"MetadataIndex\n)\x81}(Vfqn\ng0\nVoffset\ng0\nub"
    nested = b"\x80\x02})" + level * 200 + b"I1\ns."
    refused_at_once(tmp_path, "'dict' object has no attribute 'storage_data'", nested)


def test_a_key_that_is_no_name(tmp_path: Path) -> None:
    metadata = metadata_of({"w": cut(WHOLE)}, tmp_path)
    metadata.state_dict_metadata[5] = BytesStorageMetadata()  # type: ignore[index]
    metadata.planner_data = {"w": ("w",), 5: ("n",)}
    refused(tmp_path, "the key is 5, not a name", metadata)


def test_deep_tuples_do_not_end_the_process(tmp_path: Path) -> None:
    deep = b"\x80\x04})" + b"\x85" * 1_000_000 + b"Ks."
    refused_at_once(tmp_path, "more than 4096 items, or of three levels", deep)


def test_hostile_payload_runs_nothing(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    metadata = metadata_of({"w": cut(WHOLE)}, tmp_path)
    hostile = saved([WHOLE, Hostile(mark)])
    (tmp_path / FILE).write_bytes(hostile)
    said = r"__0_0.distcp: tensor 'w': .*weights_only(.|\n)*system"
    refused(tmp_path, said, metadata, length=len(hostile))
    assert not mark.exists()


def test_hostile_value_runs_nothing(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    save_with_torch(tmp_path, {"w": torch.ones(2), "extra": Hostile(mark)})
    reader = DcpReader(tmp_path)
    with pytest.raises(CheckpointError, match=r"'extra': .*weights_only(.|\n)*system"):
        reader.read_value("extra")
    assert not mark.exists()


@pytest.mark.parametrize(
    ("parts", "shape", "message"),
    [
        (cut(WHOLE, (2,))[:1], [4, 6], "volume of shards: 12 does not match tensor volume: 24"),
        ([*cut(WHOLE), ((2, 0), WHOLE[2:])], [4, 6], r"shard_offsets=\[0, 0\].* overlap"),
        ([((0, 0), WHOLE[:3]), ((2, 0), WHOLE[2:])], [4, 6], "Shards .* and .* overlap"),
        ([((0, 0), WHOLE[:, :4]), ((0, 3), WHOLE[:, 3:])], [4, 6], "Shards .* and .* overlap"),
        (cut(WHOLE), [3, 6], "length 4 exceeds tensor dim: 3"),
        (cut(WHOLE), [24], "Rank of tensor is 1, but shards rank is 2"),
        (cut(WHOLE), [4, 7], "do not cover the entire tensor"),
        ([((), WHOLE[0, 0].clone())] * 2, [], "Shards .* and .* overlap"),
        (cut(WHOLE), [1 << 62, 1 << 62], "overflows 64 bits"),
    ],
)
def test_chunks_that_do_not_cover(parts: Any, shape: list[int], message: str, tmp_path: Path) -> None:
    write_metadata(tmp_path, metadata_of({"w": parts}, tmp_path, {"w": shape}))
    refused_at_once(tmp_path, rf"\.metadata: tensor 'w': .*{message}")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"relative_path": "../secret"}, "only plain names of files beside"),
        ({"relative_path": "/etc/passwd"}, "only plain names of files beside"),
        ({"relative_path": ".."}, "only plain names of files beside"),
        ({"relative_path": "link"}, "outside the checkpoint"),
        ({"relative_path": "gone"}, "gone: tensor 'w': the file that holds it is missing"),
        ({"relative_path": "pipe"}, "not a regular file"),
        ({"offset": -1}, "offset is -1"),
        ({"offset": True}, "offset is True"),
        ({"offset": 1 << 62}, "truncated"),
        ({"length": 1 << 62}, "truncated"),
        ({"length": 0}, "holds no torch.save archive"),
        ({"length": 100}, "no torch.save archive"),
        ({"offset": 1, "length": 1600}, "holds no torch.save archive at bytes .1, 1601."),
        ({"transform_descriptors": ["zstd"]}, "zstd.*without stream extensions"),
    ],
)
def test_places_that_cannot_be(fields: dict[str, Any], message: str, tmp_path: Path) -> None:
    directory = tmp_path / "checkpoint"
    directory.mkdir()
    (tmp_path / "secret").write_bytes(saved(WHOLE))
    (directory / "link").symlink_to(tmp_path / "secret")
    os.mkfifo(directory / "pipe")
    refused(directory, message, metadata_of({"w": cut(WHOLE)}, directory), **fields)


@pytest.mark.parametrize(
    ("payload", "message"),
    [
        (WHOLE.double(), r"is torch.float64 \[4, 6\] torch.strided cpu, but .metadata says torch.float32 \[4, 6\]"),
        (WHOLE.reshape(6, 4), r"is torch.float32 \[6, 4\] torch.strided cpu, but"),
        (WHOLE.to_sparse(), r"is torch.float32 \[4, 6\] torch.sparse_coo"),
        ({"w": WHOLE}, "is dict, but"),
        (OrderedDict(w=WHOLE), "is OrderedDict, but"),
        (nn.Parameter(WHOLE), "is Parameter, but"),
        (WHOLE.to("meta"), r"is torch.float32 \[4, 6\] torch.strided meta"),
    ],
)
def test_payload_that_is_not_what_metadata_says(payload: Any, message: str, tmp_path: Path) -> None:
    metadata = metadata_of({"w": cut(WHOLE)}, tmp_path)
    data = saved(payload)
    (tmp_path / FILE).write_bytes(data)
    refused(tmp_path, rf"{FILE}: tensor 'w': {message}", metadata, length=len(data))


def repack(data: Path, change: Any) -> int:
    """Write an archive's records again, each as `change(name, bytes)` gives it, with a compression; return its size."""
    with zipfile.ZipFile(data) as archive:
        records = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(data, "w") as archive:
        for name, content in records.items():
            new, compression = change(name, content)
            archive.writestr(name, new, compression)
    return data.stat().st_size


def test_a_file_is_read_whole_though_a_read_gives_less(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Linux reads 2 GiB at most at once."""
    write_dcp(tmp_path, {"w": cut(torch.arange(100_000))})

    class Short(io.FileIO):
        def readinto(self, buffer: Any) -> int:
            return super().readinto(memoryview(buffer)[:1000])

    monkeypatch.setattr(dcp, "open", lambda path, mode: io.BufferedReader(Short(path, mode)), raising=False)
    assert_same_bits(read_all(tmp_path), {"w": torch.arange(100_000)})


def test_torchs_older_format_with_an_archive_at_its_end(tmp_path: Path) -> None:
    metadata = metadata_of({"w": cut(WHOLE)}, tmp_path)
    buffer = io.BytesIO()
    torch.save(WHOLE, buffer, _use_new_zipfile_serialization=False)
    (tmp_path / FILE).write_bytes(buffer.getvalue() + saved(WHOLE))
    refused(tmp_path, r"holds no torch\.save archive", metadata, length=(tmp_path / FILE).stat().st_size)


def test_a_storage_that_is_too_short(tmp_path: Path) -> None:
    metadata = metadata_of({"w": cut(WHOLE)}, tmp_path)
    size = repack(tmp_path / FILE, lambda name, data: (data[:-4] if "/data/" in name else data, zipfile.ZIP_STORED))
    refused(tmp_path, r"record size \(92 bytes\) does not match expected size \(96 bytes", metadata, length=size)


def test_compressed_records_are_left_to_torch_and_bounded(tmp_path: Path) -> None:
    metadata = metadata_of({"w": cut(WHOLE)}, tmp_path)
    change_place(metadata, length=repack(tmp_path / FILE, lambda name, data: (data, zipfile.ZIP_DEFLATED)))
    write_metadata(tmp_path, metadata)
    assert_same_bits(read_all(tmp_path), {"w": WHOLE})

    def blown_up(name: str, data: bytes) -> tuple[bytes, int]:
        return bytes(100 << 20) if "/data/" in name else data, zipfile.ZIP_DEFLATED

    refused(tmp_path, "unpacks to 1048", metadata, length=repack(tmp_path / FILE, blown_up))


def test_a_chunk_that_repeats_a_few_bytes_is_not_blown_up(tmp_path: Path) -> None:
    # torch itself writes no such chunk: its memory would be as large as the file says.
    write_dcp(tmp_path, {"w": [((0, 0), torch.ones(1, 1).expand(1 << 20, 1 << 20))]})
    refused(tmp_path, r"tensor 'w': unpacks to \d+ bytes, but 4398046511104 were expected")


def test_a_tensor_that_has_no_place_in_memory(tmp_path: Path) -> None:
    half = torch.ones(1, 1).expand(1 << 21, 1 << 20)
    metadata = metadata_of({"w": [((0, 0), half), ((0, 1 << 20), half)]}, tmp_path)
    # Archives that lie about their size: 8 TiB each.
    with zipfile.ZipFile(tmp_path / FILE, "w") as archive:
        with zipfile.ZipFile(io.BytesIO(saved(half))) as good:
            for name in good.namelist():
                archive.writestr(name, good.read(name))
        next(record for record in archive.filelist if "/data/" in record.filename).file_size = 8 << 40
    for place in metadata.storage_data.values():
        place.offset, place.length = 0, (tmp_path / FILE).stat().st_size
    refused(tmp_path, "tensor 'w': is not cut by rows, and has no place in memory", metadata)


def test_a_file_that_is_cut_short_while_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dcp, "PIECE_BYTES", 64)
    write_dcp(tmp_path, {"w": cut(WHOLE), "t": [((0, 0), WHOLE.t())]})
    reader = DcpReader(tmp_path)
    os.truncate(tmp_path / FILE, 100)
    for key in reader.metadata.tensors:
        with pytest.raises(CheckpointError, match="it is truncated"):
            reader.read_tensor(key, lambda offset, piece: None)


def test_directories_without_metadata(tmp_path: Path) -> None:
    refused_at_once(tmp_path / "none", "no such directory")
    refused_at_once(tmp_path, r"holds no \.metadata[^;]*$")
    for name in ("pytorch_model_fsdp_0", "optimizer_0"):
        save_with_torch(tmp_path / name, {"w": torch.ones(2)})
    named = f"pass the directory that is: {tmp_path}/optimizer_0 or {tmp_path}/pytorch_model_fsdp_0"
    refused_at_once(tmp_path, named)
    with pytest.raises(CheckpointError, match="local directory only"):
        read_dcp_metadata("s3://bucket/checkpoint")


def test_older_metadata_is_read(tmp_path: Path) -> None:
    """As torch 2.0 wrote it: other module names, no `storage_meta`, no version, and no planner's data."""
    metadata = metadata_of({"w": cut(WHOLE, (2,))}, tmp_path)
    del metadata.storage_meta, metadata.version, metadata.planner_data
    data = pickle.dumps(metadata, protocol=2)
    new, old = b"torch.distributed.checkpoint.metadata\nTensorProperties", b"torch.distributed._shard.sharded_tensor"
    assert new in data
    data = data.replace(new, old + b".metadata\nTensorProperties")
    (tmp_path / ".metadata").write_bytes(data)
    assert_same_bits(read_all(tmp_path), {"w": WHOLE})
