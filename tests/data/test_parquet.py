"""Parquet files as rows, on disk and in an S3 server, and files of any kind in a store that fails."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from raysharding.checkpoint.storage import DEFAULT_REMOTE, remote_storage
from raysharding.data import (
    DataPath,
    KnownColumns,
    ParquetFiles,
    TextFiles,
    epoch_batches,
    files,
    is_path,
    list_all_files,
    list_files,
    rank_batch,
)
from raysharding.data.arrow_rows import ArrowRows
from raysharding.data.collate import default_collate
from raysharding.errors import DataError
from tests.faulty_proxy import Fault
from tests.s3 import S3Server, s3, s3_server

__all__ = ["s3", "s3_server"]


def table(first: int, num_rows: int) -> pa.Table:
    numbers = range(first, first + num_rows)
    return pa.table(
        {
            "number": pa.array(numbers, pa.int64()),
            "ids": pa.array([list(range(one, one + 3))[: one % 4] for one in numbers], pa.list_(pa.int32())),
            "text": [f"row {number}" for number in numbers],
            "weight": [None if number % 5 == 0 else number / 2 for number in numbers],
            "nested": [[[number], [1, 2]] for number in numbers],
        }
    )


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """Two files with 70 rows in row groups of 16."""
    folder = tmp_path / "data"
    (folder / "more").mkdir(parents=True)
    pq.write_table(table(0, 40), folder / "a.parquet", row_group_size=16)
    pq.write_table(table(40, 30), folder / "more" / "b.parquet", row_group_size=16)
    (folder / "_metadata.parquet").write_bytes(b"hidden")
    (folder / "notes.txt").write_text("not data")
    return folder


def opened(path: Path | str, *columns: str, **options: Any) -> ParquetFiles:
    options = {"whole": (), "known": None, **options}
    return ParquetFiles.open(DataPath(str(path), columns or None), list_files(str(path)), **options)


def rows_of(source: ParquetFiles, batch_size: int = 7, **options: Any) -> list[dict[str, Any]]:
    return [row for rank in range(2) for one in epoch_batches(source, batch_size, rank, 2, **options)
            if one and one.counts[rank] for row in one.rows]  # fmt: skip


@pytest.mark.parametrize("shuffle", [False, True])
def test_rows_are_those_that_were_written(directory: Path, shuffle: bool) -> None:
    rows = sorted(rows_of(opened(directory), shuffle=shuffle), key=lambda row: row["number"])
    expected = pa.concat_tables([table(0, 40), table(40, 30)]).to_pylist()
    assert [{**row, "ids": list(row["ids"])} for row in rows] == expected
    assert all(isinstance(row["ids"], np.ndarray) and row["ids"].flags.writeable for row in rows)


def test_items_may_lie_in_two_row_groups(directory: Path) -> None:
    """Shuffled: such an item is read from both, row by row."""
    numbers = [row["number"] for row in rows_of(opened(directory), 10, shuffle=True, rows_per_item=5)]
    assert numbers == [first + row for first in numbers[::5] for row in range(5)]
    assert sorted(numbers) == list(range(70))


def test_row_groups_are_blocks_and_chosen_columns_cross_to_other_ranks(directory: Path) -> None:
    assert list(opened(directory).block_rows) == [16, 16, 8, 16, 14]
    source = opened(directory, "number")
    assert set(rows_of(source)[0]) == {"number"}
    assert set(rows_of(opened(directory, "number", "text"))[0]) == {"number", "text"}
    for copy in (pickle.loads(pickle.dumps(source)), ParquetFiles.from_dict(source.as_dict())):
        assert copy == source
        copy.check_seen()
        assert len(rows_of(copy)) == 70


def test_large_row_groups_come_in_chunks(tmp_path: Path) -> None:
    pq.write_table(table(0, 5000), tmp_path / "one.parquet")
    source = opened(tmp_path / "one.parquet", "number")
    reader = source.read(0)
    reader.skip(1500)
    assert [row["number"] for row in reader.take(1000)] == list(range(1500, 2500))
    reader.close()
    numbers = [row["number"] for row in rows_of(source, 32, shuffle=True)]
    assert sorted(numbers) == list(range(5000))


def test_many_lanes_share_a_file(tmp_path: Path) -> None:
    """Of 300 lanes none opens a file of its own, nor holds its window as Python's objects."""
    pq.write_table(pa.table({"ids": [np.arange(200)] * 30_000}), tmp_path / "one.parquet")
    source = opened(tmp_path / "one.parquet")
    process = psutil.Process()
    fds, memory = process.num_fds(), process.memory_info().rss
    batches = epoch_batches(source, 300, 0, 1, shuffle=True)
    first: Any = next(batches)
    assert len(first.rows) == 300
    assert process.num_fds() <= fds + 2
    assert process.memory_info().rss - memory < 600 << 20, "300 lanes of 512 rows are 1 GB as Python's numbers"


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda folder: folder / "absent.parquet", "is not there, as rank 0 sees it"),
        (lambda folder: pq.write_table(table(0, 0), folder / "no.parquet") or folder / "no.parquet", "has no rows"),
        (lambda folder: (folder / "notes").write_text("x") and folder / "notes", "cannot be read: .*Parquet"),
        (lambda folder: (folder / "e").mkdir() or folder / "e", "holds no .parquet, .jsonl, .ndjson, .csv, .json file"),
    ],
)
def test_what_is_no_data_is_named(directory: Path, make: Any, said: str) -> None:
    path = make(directory)
    with pytest.raises(DataError, match=said) as caught:
        opened(path)
    assert str(path) in str(caught.value)


def test_files_that_differ_are_refused(directory: Path) -> None:
    pq.write_table(pa.table({"number": [1]}), directory / "z.parquet")
    with pytest.raises(DataError, match=r"z.parquet: has the columns \['number'\], but .*a.parquet has"):
        opened(directory)
    with pytest.raises(DataError, match="has no column 'label': it has"):
        opened(directory / "a.parquet", "label")


def test_later_files_of_other_types_are_refused_by_column(tmp_path: Path) -> None:
    columns = {"ids": pa.array([[1, 2]], pa.list_(pa.int32())), "label": pa.array([1], pa.int64())}
    pq.write_table(pa.table(columns), tmp_path / "a.parquet")
    # Other widths make the same batches.
    wider = {"ids": pa.array([[1, 2]], pa.large_list(pa.int64())), "label": pa.array([1], pa.int16())}
    pq.write_table(pa.table(wider), tmp_path / "b.parquet")
    assert len(rows_of(opened(tmp_path))) == 2
    others = {"lists of floats": pa.array([[1.0, 2.0]]), "lists of text": pa.array([["1"]]), "null": pa.nulls(1)}
    for kind, column in others.items():
        pq.write_table(pa.table({**columns, "ids": column}), tmp_path / "c.parquet")
        with pytest.raises(DataError, match=f"c.parquet: the column 'ids' holds {kind}, but lists of whole numbers in"):
            opened(tmp_path)
        assert len(rows_of(opened(tmp_path, "label"))) == 3, "a column that nobody reads may hold anything"
        any_types = opened(tmp_path, whole=None)
        assert len(rows_of(any_types)) == 3, "a collate function may make anything of a column"


def test_types_of_no_rows_and_widths_within_records_are_no_other_types(tmp_path: Path) -> None:
    def write(name: str, size: pa.DataType, num_rows: int) -> None:
        column = pa.array([{"size": [1]}] * num_rows, pa.struct([("size", size)])) if num_rows else pa.nulls(0)
        pq.write_table(pa.table({"image": column}), tmp_path / name)

    write("a.parquet", pa.null(), 0)
    write("b.parquet", pa.list_(pa.int64()), 2)
    write("c.parquet", pa.large_list(pa.int32()), 1)
    assert len(rows_of(opened(tmp_path))) == 3
    write("d.parquet", pa.list_(pa.float32()), 1)
    with pytest.raises(DataError, match="holds records of size: lists of floats, but records of size: lists of whole"):
        opened(tmp_path)


def test_floats_where_the_model_takes_ids_are_refused_by_column(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.table({"input_ids": pa.array([[1.0, 2.0]]), "pixel_values": pa.array([[0.5]])}), path)
    with pytest.raises(DataError, match="the column 'input_ids' holds lists of floats, and the model takes ids"):
        opened(path, whole=["input_ids", "labels"])
    opened(path, "pixel_values", whole=["input_ids", "labels"])


@pytest.mark.parametrize("nulls", [(None, 1), (1, None), (None, None), ([1, None], [1, 2])])
def test_nulls_are_refused_by_column(nulls: tuple[Any, Any]) -> None:
    with pytest.raises(ValueError, match=r"row\['label'\].* is null in row [01] of the batch: fill such values in"):
        default_collate([{"ids": [1, 2], "label": null} for null in nulls])


@pytest.mark.parametrize("kind", [pa.uint8(), pa.uint16(), pa.uint32(), pa.uint64()])
def test_unsigned_ids_become_those_that_embeddings_take(kind: Any) -> None:
    columns = {"ids": pa.array([[1, 2], [3, 4]], pa.list_(kind)), "id": pa.array([5, 6], kind)}
    batch = default_collate(list(ArrowRows(pa.table(columns).to_batches())))
    assert {name: one.dtype for name, one in batch.items()} == {"ids": torch.int64, "id": torch.int64}
    assert batch["ids"].tolist() == [[1, 2], [3, 4]]
    with pytest.raises(ValueError, match=f"{2**63} is over|{2**63}, is over int64"):
        default_collate([{"ids": np.array([2**63], np.uint64)}])


def test_a_null_among_texts_is_named() -> None:
    def tokenized(rows: list[Any]) -> Any:
        return {"ids": torch.tensor([[len(row["text"])] for row in rows])}

    rows = [{"text": "a", "x": 1}, {"text": None, "x": 2}]
    said = r"'NoneType'.*; row\['text'\] is null in row 1 of the batch: fill such values"
    with pytest.raises(ValueError, match=said):
        rank_batch(tokenized, 0, rows, (2,)).collated()
    assert set(rank_batch(KnownColumns(None), 0, rows, (2,)).collated().kwargs) == {"x"}, "text is dropped as a column"


def test_a_list_of_paths_is_read_in_its_order(tmp_path: Path) -> None:
    for name, first in (("b", 0), ("a", 3)):
        pq.write_table(table(first, 3), tmp_path / f"{name}.parquet")
    (tmp_path / "c.csv").write_text("number\n1\n")
    paths = [str(tmp_path / f"{name}.parquet") for name in ("b", "a")]
    source = DataPath(paths[0], ("number",), (paths[1],))
    found = list_all_files(source)
    assert [row["number"] for row in rows_of(ParquetFiles.open(source, found, (), None), 1)] == list(range(6))
    two = DataPath("s3://a/rows.csv", None, ("s3://b/rows.csv",))
    assert [is_path(one) for one in ("s3://a/rows.CSV?region=x", str(tmp_path), "a text")] == [True, True, False]
    with (
        pytest.raises(DataError, match="on disks or in one store"),
        mock.patch.object(files, "list_files", lambda path: (path,)),
    ):
        list_all_files(two)
    with pytest.raises(DataError, match=r"not of one kind: .csv, .parquet: give files of one format"):
        list_all_files(DataPath(paths[0], None, (str(tmp_path / "c.csv"),)))


@pytest.mark.parametrize("name", ["rows.jsonl.gz", "rows.arrow", "rows.txt"])
def test_other_files_of_rows_are_refused_with_what_to_write(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"rows")
    for path, what in ((tmp_path / name, "ends in none of .parquet"), (tmp_path, "holds no .parquet")):
        with pytest.raises(DataError, match=f"{what}.*: write Parquet.*to_parquet.* decompress"):
            list_files(str(path))


def test_a_file_that_changes_meanwhile_is_an_error(directory: Path) -> None:
    source = opened(directory)
    pq.write_table(table(0, 40), directory / "a.parquet", row_group_size=20)
    with pytest.raises(DataError, match=r"has row groups of \(20, 20\) rows here, and of \(16, 16, 8\) on rank 0"):
        ParquetFiles.from_dict(source.as_dict()).check_seen()
    damaged = bytearray((directory / "more" / "b.parquet").read_bytes())
    damaged[4:200] = bytes(196)
    (directory / "more" / "b.parquet").write_bytes(damaged)
    with pytest.raises(DataError, match=r"b\.parquet"):
        rows_of(opened(directory))


def test_an_object_store(directory: Path, s3: S3Server) -> None:
    source = opened(s3.upload(directory / "more", "rows"))
    assert sorted(row["number"] for row in rows_of(source, shuffle=True)) == list(range(40, 70))
    s3.delete("rows/b.parquet")
    with pytest.raises(DataError, match="cannot be read"):
        rows_of(source)


def test_columns_that_the_model_does_not_take_are_not_read(tmp_path: Path, s3: S3Server) -> None:
    """Each byte of the column that it takes is read once, and no other."""
    (tmp_path / "large").mkdir()
    path = tmp_path / "large" / "a.parquet"
    text = [np.random.default_rng(number).bytes(5000).hex() for number in range(200)]
    pq.write_table(pa.table({"text": text, "number": range(200), "id": range(200)}), path, row_group_size=50)
    known = KnownColumns({"number", "labels"})
    source = opened(s3.upload(path.parent, "large"), known=known)
    assert (source.columns, known.dropped) == (("number",), ("text", "id"))
    source.check_seen()
    s3.proxy.reset()
    rows = [row for one in epoch_batches(source, 50, 0, 1) if one is not None for row in one.rows]
    assert rows == [{"number": number} for number in range(200)]
    footer = pq.read_metadata(path)
    chunks = [footer.row_group(index).column(1).total_compressed_size for index in range(4)]
    assert s3.proxy.body_bytes() == sum(chunks) < 10_000 < path.stat().st_size // 100
    without_names = KnownColumns(None)
    assert opened(path, known=without_names).columns == ("number", "id"), "text makes no tensors"
    with pytest.raises(DataError, match="rows have the columns text, number, id, and the model takes only x: rename"):
        opened(path, known=KnownColumns({"x"}))


__all__ = ["s3", "s3_server"]

NUMBERS = np.random.default_rng(0).integers(0, 1 << 60, 2000).tolist()
ONCE_EACH = [
    Fault("status", status=503, code="SlowDown", path=r"list-type|prefix", times=1),
    Fault("status", status=503, method="HEAD", path=r"rows\.", times=1),
    Fault("status", status=503, code="SlowDown", path=r"rows\.", times=1),
    Fault("short", path=r"rows\.", times=2),
]


@pytest.fixture(params=["parquet", "jsonl", "csv"])
def uri(request: pytest.FixtureRequest, tmp_path: Path, s3: S3Server) -> str:
    (tmp_path / "data").mkdir()
    path = tmp_path / "data" / f"rows.{request.param}"
    if request.param == "parquet":
        pq.write_table(pa.table({"number": NUMBERS}), path)
    elif request.param == "jsonl":
        path.write_text("".join(json.dumps({"number": number}) + "\n" for number in NUMBERS))
    else:
        path.write_text("number\n" + "".join(f"{number}\n" for number in NUMBERS))
    return s3.upload(tmp_path / "data", f"data-{request.param}")


def opened_there(uri: str) -> ParquetFiles | TextFiles:
    kind = ParquetFiles if "data-parquet" in uri else TextFiles
    return kind.open(DataPath(uri), list_files(uri), (), None)


def numbers(uri: str) -> list[int]:
    source = opened_there(uri)
    return [row["number"] for one in epoch_batches(source, 100, 0, 1) if one is not None for row in one.rows]


def test_errors_and_short_answers_change_no_row(uri: str, s3: S3Server) -> None:
    faults = [Fault(**vars(fault)) for fault in ONCE_EACH]
    s3.proxy.faults += faults
    assert numbers(uri) == NUMBERS
    assert [fault.times for fault in faults] == [0, 0, 0, 0], "a fault never hit"
    s3.proxy.faults.append(Fault("short", path=r"rows\."))
    with pytest.raises(DataError, match=r"rows\.\w+: cannot be read: reading .* tried 5 times: the answer has fewer"):
        numbers(uri)


def test_refused_and_expired_credentials_and_a_shortened_object_have_their_own_cures(uri: str, s3: S3Server) -> None:
    source = opened_there(uri)
    for status, code, said in (
        (403, "AccessDenied", "access was refused: set AWS_ACCESS_KEY_ID"),
        (400, "ExpiredToken", "temporary credentials .* have expired: renew them"),
        (None, "", "it was written anew meanwhile"),
    ):
        s3.proxy.reset()
        if status is None:
            directory = uri.partition("?")[0].removeprefix(f"s3://{s3.bucket}/")
            s3.put(f"{directory}/rows.{directory.rpartition('-')[2]}", b"")
        else:
            s3.proxy.faults.append(Fault("status", status=status, code=code, path=r"rows\."))
        with pytest.raises(DataError, match=rf"tried once: .*{said}"):
            list(epoch_batches(source, 100, 0, 1))


def test_all_directories_of_a_bucket_share_one_file_system(s3: S3Server) -> None:
    storage = remote_storage(DEFAULT_REMOTE)
    found = {id(storage.file_system(s3.uri(f"step-{step} é"))[0]._system) for step in range(20)}
    assert len(found) == 1
    assert storage.file_system(s3.uri("step-1 é"))[1] == f"{s3.bucket}/step-1 é"
