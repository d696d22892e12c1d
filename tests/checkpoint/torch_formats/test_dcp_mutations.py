"""Mutated sharded checkpoints: a typed error or a tensor, never a crash, a hang or a byte from outside of the file."""

from __future__ import annotations

import pickle
import pickletools
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, MetadataIndex

from raysharding.checkpoint import DcpReader
from raysharding.checkpoint.storage import local as local_storage
from raysharding.errors import CheckpointError
from tests.checkpoint.torch_formats.dcp_files import FILE, cut, metadata_of, read_all, saved, write_metadata

pytestmark = pytest.mark.timeout(60)
many = settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A row-major tensor in two chunks, one in another order, and a value."""
    parts = {"w": cut(torch.arange(24.0).reshape(4, 6), (2,)), "t": [((0, 0), torch.randn(3, 5).t())]}
    metadata = metadata_of(parts, tmp_path)
    value = saved({"lr": 0.1, "names": [("a", 1), {"b"}]})
    metadata.state_dict_metadata["v"] = BytesStorageMetadata()
    metadata.storage_data[MetadataIndex("v")] = _StorageInfo(FILE, (tmp_path / FILE).stat().st_size, len(value))
    with (tmp_path / FILE).open("ab") as file:
        file.write(value)
    return write_metadata(tmp_path, metadata)


@pytest.fixture
def within(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every read lies within its file."""
    fill = local_storage.LocalFile.fill

    def checked(self: Any, offset: int, views: Any) -> int:
        assert 0 <= offset <= offset + sum(view.nbytes for view in views) <= self.stat.num_bytes
        return fill(self, offset, views)

    monkeypatch.setattr(local_storage.LocalFile, "fill", checked)


def tried(directory: Path) -> bool:
    """Whether it was read; every other error than ours fails the test."""
    try:
        read_all(directory)
        reader = DcpReader(directory)
        for key in reader.metadata.values:
            reader.read_value(key)
    except CheckpointError:
        return False
    return True


EDITS = st.lists(
    st.tuples(
        st.sampled_from(["set", "insert", "delete", "cut"]), st.floats(0, 1, exclude_max=True), st.binary(max_size=4)
    ),
    min_size=1,
    max_size=3,
)


def edited(data: bytes, edits: list[tuple[str, float, bytes]]) -> bytes:
    """Some bytes changed, put in, taken out, or the end cut off."""
    for kind, where, new in edits:
        place = int(where * len(data))
        if kind == "cut":
            data = data[:place]
        else:
            data = data[:place] + (b"" if kind == "delete" else new) + data[place + len(new) * (kind != "insert") :]
    return data


@many
@given(edits=EDITS)
@pytest.mark.usefixtures("within")
def test_any_bytes_of_metadata(checkpoint: Path, edits: list[tuple[str, float, bytes]]) -> None:
    good = (checkpoint / ".metadata").read_bytes()
    try:
        (checkpoint / ".metadata").write_bytes(edited(good, edits))
        tried(checkpoint)
    finally:
        (checkpoint / ".metadata").write_bytes(good)


def test_what_the_mutations_begin_with_is_read(checkpoint: Path) -> None:
    assert tried(checkpoint)


def test_a_record_without_a_state(checkpoint: Path) -> None:
    good = (checkpoint / ".metadata").read_bytes()
    states = [place or 0 for op, _, place in pickletools.genops(good) if op.name == "BUILD"]
    assert len(states) > 5
    for place in states:
        # BUILD takes a state and an object, and leaves the object: POP leaves one that has been given no state.
        (checkpoint / ".metadata").write_bytes(good[:place] + pickle.POP + good[place + 1 :])
        tried(checkpoint)


@many
@given(edits=EDITS)
@pytest.mark.usefixtures("within")
def test_any_bytes_of_a_file(checkpoint: Path, edits: list[tuple[str, float, bytes]]) -> None:
    good = (checkpoint / FILE).read_bytes()
    try:
        (checkpoint / FILE).write_bytes(edited(good, edits))
        tried(checkpoint)
    finally:
        (checkpoint / FILE).write_bytes(good)


@many
@given(data=st.binary(max_size=80))
@pytest.mark.usefixtures("within")
def test_any_pickle_like_bytes(checkpoint: Path, data: bytes) -> None:
    (checkpoint / ".metadata").write_bytes(b"\x80\x04" + data + b".")
    assert not tried(checkpoint)


def leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The place of everything in a metadata object: attributes, keys and positions."""
    yield path
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from leaves(inner, (*path, key))
    elif isinstance(value, list):
        for key, inner in enumerate(value):
            yield from leaves(inner, (*path, key))
    elif hasattr(value, "__dict__") and not isinstance(value, type):
        for key, inner in vars(value).items():
            yield from leaves(inner, (*path, f".{key}"))


def put(root: Any, path: tuple[Any, ...], value: Any) -> None:
    """Replace what is at a place that `leaves` named."""
    for part in path[:-1]:
        root = vars(root)[part[1:]] if isinstance(part, str) and part.startswith(".") else root[part]
    if isinstance(path[-1], str) and path[-1].startswith("."):
        vars(root)[path[-1][1:]] = value
    else:
        root[path[-1]] = value


PLAIN: list[Any] = [None, True, -1, 0, 1, 3, 1 << 62, 1 << 63, 0.5, "", "\ud800"]
PLAIN += ["w", b"w", [], {}, {"w": 1}, (0, 3), ("a", "b")]
SIZES = [torch.Size(dims) for dims in ([2, 6], [0], [1 << 40, 1 << 40], [1] * 100)]
JUNK: st.SearchStrategy[Any] = st.sampled_from([*PLAIN, *SIZES, torch.float64])


@many
@given(data=st.data())
@pytest.mark.usefixtures("within")
def test_any_field_of_metadata(checkpoint: Path, data: st.DataObject) -> None:
    good = (checkpoint / ".metadata").read_bytes()
    metadata = pickle.loads(good)
    for _ in range(data.draw(st.integers(1, 2))):
        put(metadata, data.draw(st.sampled_from(list(leaves(metadata))[1:])), deepcopy(data.draw(JUNK)))
    try:
        changed = pickle.dumps(metadata)
    except (TypeError, RuntimeError):
        return  # torch's own `__getstate__` refuses it
    try:
        (checkpoint / ".metadata").write_bytes(changed)
        tried(checkpoint)
    finally:
        (checkpoint / ".metadata").write_bytes(good)
