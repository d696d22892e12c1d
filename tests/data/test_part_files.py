"""`PartFiles`: a directory or a store holds whole parts, or none; what was cut off counts as missing."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from raysharding import DataError
from raysharding.checkpoint.storage import storage_of
from raysharding.data import Part, PartFiles, PartWriter, as_table, cast_table, cut_parts, unify_schemas
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


def test_parts_are_cut_evenly() -> None:
    assert cut_parts(10, 3) == PARTS
    assert cut_parts(2, 2) == [Part(0, 1), Part(1, 1)]


def check_run(files: PartFiles, names: Any) -> None:
    """Begin, write, and continue a run in an empty place."""
    assert files.begin(RECORD, resume=True) == RECORD
    write(files, PARTS[1])
    aborted = PartWriter(files.path_of(PARTS[0]), pa.schema({"id": pa.int64()}))
    aborted.abort()
    assert names() == ["_predict.json", "part-000000000004.parquet"]
    with pytest.raises(DataError, match=r"holds rows of an earlier predict \(10 in all\)"):
        files.begin(RECORD | {"run": "b"}, resume=False)
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


def test_a_store(s3_server: S3Server) -> None:
    uri = s3_server.uri("predict/out")
    check_run(PartFiles(uri), lambda: storage_of(uri).list_names(uri))


def test_types_are_those_of_the_first_batch() -> None:
    first = as_table({"number": [1, 2], "text": [None, None]}, {})
    other = as_table({"text": ["a"], "number": [1.5]}, {})
    schema = unify_schemas([first.schema, other.schema])
    assert cast_table(first, schema).to_pydict() == {"number": [1.0, 2.0], "text": [None, None]}
    assert cast_table(other, schema).schema.names == ["number", "text"]
    with pytest.raises(DataError, match="the column 'number' holds string, and double in rows before"):
        cast_table(as_table({"text": ["a"], "number": ["b"]}, {}), schema)
    with pytest.raises(DataError, match=r"rows have the columns \['text'\], and rows before them had"):
        cast_table(other.select(["text"]), schema)
    with pytest.raises(DataError, match="the columns of rows differ between ranks"):
        unify_schemas([first.schema, pa.schema({"number": pa.string()})])
