"""`PartFiles`: a directory or a store holds whole parts, or none; what was cut off counts as missing."""

from __future__ import annotations

import os
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from raysharding import DataError
from raysharding.checkpoint.storage import storage_of
from raysharding.data import (
    Part,
    PartFiles,
    PartWriter,
    SequenceRows,
    as_table,
    cast_table,
    cut_parts,
    key_types,
    rows_of,
    unify_schemas,
)
from tests.s3 import S3Server, s3_server

__all__ = ["s3_server"]

RECORD = {"run": "a", "num_parts": 3, "fn": "pooled", "num_rows": 10}
PARTS = [Part(0, 4), Part(4, 3), Part(7, 3)]


def write(files: PartFiles, part: Part) -> None:
    table = pa.table({"id": range(part.start, part.start + part.num_rows)})
    writer = PartWriter(files.path_of(part), table.schema)
    writer.write(table.slice(0, 1))
    writer.write(table.slice(1))
    writer.finish()


def check_run(files: PartFiles, names: Any) -> None:
    """Begin, write, and continue a run in an empty place."""
    assert cut_parts(10, 3) == PARTS
    assert cut_parts(2, 2) == [Part(0, 1), Part(1, 1)]
    assert files.begin(RECORD, resume=True) == RECORD
    write(files, PARTS[1])
    aborted = PartWriter(files.path_of(PARTS[0]), pa.schema({"id": pa.int64()}))
    aborted.abort()
    assert names() == ["_predict.json", "part-000000000004.parquet"]
    with pytest.raises(DataError, match=r"holds rows of an earlier predict \(10 in all\)"):
        files.begin(RECORD | {"run": "b"}, resume=False)
    with pytest.raises(DataError, match=r"the rows differ from those of the run that is to be resumed: .*columns="):
        files.begin(RECORD | {"run": "b", "data": "f"}, resume=True)
    with pytest.raises(DataError, match="had fn='pooled', and this one has 'other'"):
        files.begin(RECORD | {"run": "b", "fn": "other"}, resume=True)
    assert files.begin(RECORD | {"run": "b", "num_parts": 8}, resume=True)["num_parts"] == 3
    done, schema = files.find(PARTS)
    assert done == [PARTS[1]]
    assert schema.equals(pa.schema({"id": pa.int64()}))
    with pytest.raises(DataError, match=r"lacks 2 of 3 files on rank 0's node, part-000000000000.parquet first"):
        files.check_complete(PARTS)
    write(files, PARTS[0])
    write(files, PARTS[2])
    files.check_complete(PARTS)
    assert files.find(PARTS)[0] == PARTS


def test_a_directory(tmp_path: Path) -> None:
    output = tmp_path / "new" / "out"
    files = PartFiles(str(output))
    check_run(files, lambda: sorted(os.listdir(output)))
    assert pq.read_table(output)["id"].to_pylist() == list(range(10))
    last = output / "part-000000000007.parquet"
    last.write_bytes(last.read_bytes()[:-9])
    (output / ".part-000000000000.parquet.0f0f").touch()
    assert files.find(PARTS)[0] == PARTS[:2], "a file that was cut off has no footer"
    assert not [name for name in os.listdir(output) if name.startswith(".")]


@pytest.mark.parametrize("text", ["{", "{}", "[]", '{"run": "a", "num_rows": 10, "num_parts": "3"}'])
def test_a_damaged_record(text: str, tmp_path: Path) -> None:
    (tmp_path / "_predict.json").write_text(text)
    with pytest.raises(DataError, match=r"is damaged .*: remove the directory, or give another") as caught:
        PartFiles(str(tmp_path)).begin(RECORD, resume=True)
    assert caught.value.path == str(tmp_path / "_predict.json")


def test_a_store(s3_server: S3Server) -> None:
    uri = s3_server.uri("predict/out")
    check_run(PartFiles(uri), lambda: storage_of(uri).list_names(uri))


def test_types_are_those_of_the_first_batch() -> None:
    first = as_table({"number": [1, 2], "text": [None, None]}, {})
    other = as_table({"text": ["a"], "number": [1.5]}, {})
    schema = unify_schemas([first.schema, other.schema])
    assert cast_table(first, schema).to_pydict() == {"number": [1.0, 2.0], "text": [None, None]}
    assert cast_table(other, schema).schema.names == ["number", "text"]
    with pytest.raises(DataError, match="the column 'number' holds string, and its type is double, that of"):
        cast_table(as_table({"text": ["a"], "number": ["b"]}, {}), schema)
    with pytest.raises(DataError, match=r"rows have the columns \['text'\], and rows before them had"):
        cast_table(other.select(["text"]), schema)
    with pytest.raises(DataError, match=r"the data: no one type holds the values of a column .*int64 vs string"):
        unify_schemas([first.schema, pa.schema({"number": pa.string()})])


def test_types_of_keys_are_those_of_all_rows() -> None:
    rows: list[dict[str, Any]] = [{"a": None, "b": 1, "c": []}, {"a": "x", "b": 1.5, "c": [1]}]
    kinds = {"a": pa.string(), "b": pa.float64(), "c": pa.list_(pa.int64())}
    columns = {name: [row[name] for row in rows] for name in kinds}
    for data in (rows, columns, datasets.Dataset.from_list(rows)):
        source = rows_of(data)
        assert isinstance(source, SequenceRows)
        assert key_types(source, list(kinds)).equals(pa.schema(kinds))
    arrays = {"t": torch.zeros(2, 3), "n": np.zeros(2, np.int8), "s": np.array(["a", "b"])}
    typed = {"t": pa.list_(pa.float32()), "n": pa.int8(), "s": pa.string()}
    source = rows_of(arrays)
    assert isinstance(source, SequenceRows)
    assert key_types(source, list(arrays)).equals(pa.schema(typed))
    with pytest.raises(DataError, match=r"the column 'a' of the data \(keys=\) cannot be written"):
        key_types(SequenceRows([{"a": "x"}, {"a": 1}]), ["a"])


def test_tensors_and_arrays_become_columns() -> None:
    same, ragged = [torch.ones(2), torch.zeros(2)], [torch.ones(1), torch.zeros(2)]
    columns = {"same": same, "ragged": ragged, "arrow": pa.array([None, None], pa.string())}
    table = as_table(columns | {"small": torch.ones(2, 1).to(torch.float8_e4m3fn)}, {})
    values = {"same": [[1.0, 1.0], [0.0, 0.0]], "ragged": [[1.0], [0.0, 0.0]], "arrow": [None, None]}
    assert table.to_pydict() == values | {"small": [[1.0], [1.0]]}
    assert [str(kind) for kind in table.schema.types] == [*["list<item: float>"] * 2, "string", "list<item: float>"]
    cases = ((torch.eye(2).to_sparse(), r"sparse .*to_dense"), (torch.ones(2, dtype=torch.complex64), r"tensor\.real"))
    for tensor, cure in cases:
        with pytest.raises(DataError, match=f"the column 'x' cannot be written: .*{cure}"):
            as_table({"x": tensor}, {})


def test_an_abort_removes_nothing_that_another_run_committed(s3_server: S3Server) -> None:
    uri = s3_server.uri("predict/aborted")
    files = PartFiles(uri)
    files.begin(RECORD, resume=False)
    first = PartWriter(files.path_of(PARTS[0]), pa.schema({"id": pa.int64()}))
    for part in PARTS:
        write(files, part)
    first.abort()
    files.check_complete(PARTS)
    assert files.find(PARTS)[0] == PARTS
    assert storage_of(uri).list_names(uri) == ["_predict.json", *(f"part-{part.start:012d}.parquet" for part in PARTS)]


@pytest.mark.parametrize("kind", ["directory", "store"])
def test_of_runs_that_begin_at_once_at_most_one_goes_on(kind: str, tmp_path: Path, s3_server: S3Server) -> None:
    for trial in range(5):
        where = str(tmp_path / f"{trial}") if kind == "directory" else s3_server.uri(f"predict/race-{trial}")
        begun = threading.Barrier(3)

        def begin(run: str, where: str = where, begun: threading.Barrier = begun) -> str:
            begun.wait(30)
            try:
                return str(PartFiles(where).begin(RECORD | {"run": run}, resume=False)["run"])
            except DataError as error:
                return str(error)

        with ThreadPoolExecutor(3) as pool:
            told = list(pool.map(begin, "abc"))
        refused = [text for text in told if re.search("at the same time|holds rows of an earlier predict", text)]
        assert len(refused) >= 2, told
        assert not [name for name in storage_of(where).list_names(where) if name.startswith(".")]


@pytest.mark.parametrize("kind", ["directory", "store"])
def test_a_run_that_another_one_continues_ends_in_an_error(kind: str, tmp_path: Path, s3_server: S3Server) -> None:
    where = str(tmp_path) if kind == "directory" else s3_server.uri("predict/continued")
    first, second = PartFiles(where), PartFiles(where)
    first.begin(RECORD, resume=False)
    table = pa.table({"id": range(4)})
    writer = PartWriter(first.path_of(PARTS[0]), table.schema)
    writer.write(table)
    second.begin(RECORD | {"run": "b"}, resume=True)
    second.find(PARTS)
    if kind == "directory":  # an upload has no file before its end
        with pytest.raises(DataError, match="its file is gone before it had its name: another predict has continued"):
            writer.finish()
    else:
        writer.finish()
    for part in PARTS:
        write(first, part)
    with pytest.raises(DataError, match="another predict has continued this one meanwhile"):
        first.check_complete(PARTS)
    second.check_complete(PARTS)
