"""JSON Lines and CSV files as rows: real files on disk."""

from __future__ import annotations

import csv
import json
import pickle
import random
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.csv
import pyarrow.parquet
import pytest

from raysharding.data import (
    DataPath,
    KnownColumns,
    ParquetFiles,
    TextFiles,
    epoch_batches,
    hub_name,
    list_files,
    text_files,
)
from raysharding.errors import DataError

NUM_ROWS = 1500
"""Three blocks of 512 lines, the last one smaller."""


def row(number: int) -> dict[str, Any]:
    """A row whose types no block shows alone: floats, then integers, in a list too; nulls, then numbers."""
    return {
        "number": number,
        "weight": number / 2 if number < 700 else number,
        "list": [number, 0.5] if number < 700 else [number],
        "late": None if number < 1300 else number,
        "text": f'a "quoted"\nrow {number}',
    }


@pytest.fixture
def jsonl(tmp_path: Path) -> Path:
    folder = tmp_path / "jsonl"
    folder.mkdir()
    for name, numbers in (("a", range(1000)), ("b", range(1000, NUM_ROWS))):
        (folder / f"{name}.jsonl").write_text("\n".join(json.dumps(row(number)) for number in numbers))
    (folder / "README.json").write_text("[not rows]")
    return folder


@pytest.fixture
def csv_file(tmp_path: Path) -> Path:
    with open(tmp_path / "rows.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, ["number", "weight", "text", "mixed"])
        writer.writeheader()
        for number in range(NUM_ROWS):
            fields = row(number)
            mixed = number if number < 600 else f"n{number}"
            writer.writerow({name: fields[name] for name in ("number", "weight", "text")} | {"mixed": mixed})
    return tmp_path / "rows.csv"


def opened(path: Path, *columns: str, whole: tuple[str, ...] = ()) -> TextFiles:
    return TextFiles.open(DataPath(str(path), columns or None), list_files(str(path)), whole, None)


def rows_of(source: TextFiles, **options: Any) -> list[dict[str, Any]]:
    batches = epoch_batches(source, 7, 0, 1, **options)
    return [one for batch in batches if batch is not None for one in batch.rows]


@pytest.mark.parametrize("shuffle", [False, True])
def test_rows_of_json_lines(jsonl: Path, shuffle: bool) -> None:
    source = opened(jsonl)
    assert list(source.block_rows) == [512, 488, 500]
    rows = rows_of(source, shuffle=shuffle)
    assert (rows == sorted(rows, key=lambda one: one["number"])) is not shuffle
    rows.sort(key=lambda one: one["number"])
    assert [{**one, "list": list(one["list"])} for one in rows] == list(map(row, range(NUM_ROWS)))
    assert all(isinstance(one["weight"], float) for one in rows), "one type for the whole column"
    assert all(one["list"].dtype.kind == "f" for one in rows)


def test_rows_of_csv(csv_file: Path) -> None:
    """Newlines in quotes end no row, and a column that is text anywhere is text."""
    rows = rows_of(opened(csv_file))
    assert [one["number"] for one in rows] == list(range(NUM_ROWS))
    assert [one["text"] for one in rows] == [row(number)["text"] for number in range(NUM_ROWS)]
    assert {one["mixed"] for one in rows} >= {"1", "n600"}
    assert all(isinstance(one["weight"], float) for one in rows)


def test_a_run_begins_at_any_row(csv_file: Path) -> None:
    source = opened(csv_file, "number")
    assert rows_of(source, first_step=100) == [{"number": number} for number in range(700, NUM_ROWS)]
    for copy in (pickle.loads(pickle.dumps(source)), TextFiles.from_dict(json.loads(json.dumps(source.as_dict())))):
        assert copy == source
        copy.check_seen()


def test_a_long_line_is_a_block(tmp_path: Path) -> None:
    lines = [json.dumps({"text": "a" * 400_000}), json.dumps({"text": "b"}), json.dumps({"text": "c" * 300_000})]
    (tmp_path / "rows.jsonl").write_text("\n".join(lines))
    assert list(opened(tmp_path / "rows.jsonl").block_rows) == [1, 1, 1]


def test_what_is_no_data_is_named(tmp_path: Path, csv_file: Path) -> None:
    for name, text, said in (
        ("a.jsonl", "[1, 2]", "cannot be read: line 1: JSON parse error: .* write a JSON array as lines, pandas"),
        ("b.jsonl", '{"x": 1}\n{"x": "one"}\n', "cannot be read: line 2: JSON parse error: .*x"),
        ("c.jsonl", "", "has no rows"),
        ("d.csv", "a,b\n1\n", "cannot be read: line 2: CSV parse error"),
        ("e.jsonl", '{"x": 1}\n' * 512 + '{"x": "one"}', "the column 'x' holds text, and whole numbers"),
        ("f.csv", "input_ids\n0.5\n", "the column 'input_ids' holds floats, and the model takes ids"),
    ):
        (tmp_path / name).write_text(text)
        with pytest.raises(DataError, match=f"{name}: {said}"):
            opened(tmp_path / name, whole=("input_ids",))
    with pytest.raises(DataError, match="has no column 'z': it has"):
        opened(csv_file, "z")
    (tmp_path / "g.jsonl").write_text('{"x": 1}\n{"x": 2}\n')
    source = opened(tmp_path / "g.jsonl")
    (tmp_path / "g.jsonl").write_text('{"x": 1}\n        \n')
    with pytest.raises(DataError, match="was it written anew meanwhile"):
        rows_of(source)


def test_which_texts_name_a_dataset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "rows").write_text("")
    for text, found in (
        ("org/name", ("org/name", "train")),
        ("org/name:test", ("org/name", "test")),
        ("name:train[:50]", ("name", "train[:50]")),
        ("here/rows", None),
        ("rows.jsonl", None),
        ("./org/name", None),
        ("/absent/rows", None),
        ("s3://bucket/rows", None),
    ):
        named = hub_name(text)
        assert (None if named is None else (named.name, named.split)) == found, text


def test_columns_that_the_model_does_not_take_are_not_decoded(jsonl: Path, csv_file: Path) -> None:
    for path, left in ((jsonl, ("list", "late", "text")), (csv_file, ("text", "mixed"))):
        known = KnownColumns({"weight", "number"})
        source = TextFiles.open(DataPath(str(path)), list_files(str(path)), (), known)
        assert (source.columns, known.dropped) == (("number", "weight"), left)
        assert set(rows_of(source)[0]) == {"number", "weight"}


def test_a_column_that_is_not_read_may_change_its_type(tmp_path: Path, csv_file: Path) -> None:
    """In one block of JSON Lines, and from one block to the next."""
    for apart in (3, 700):
        path = tmp_path / f"{apart}.jsonl"
        lines = [{"number": number, "extra": number if number < apart else {"a": "b"}} for number in range(NUM_ROWS)]
        path.write_text("\n".join(map(json.dumps, lines)))
        known = KnownColumns({"number"})
        source = TextFiles.open(DataPath(str(path)), (str(path),), (), known)
        assert known.dropped == ("extra",)
        assert rows_of(source) == rows_of(opened(path, "number")) == [{"number": one["number"]} for one in lines]
        with pytest.raises(DataError, match="extra"):
            opened(path, "number", "extra")
    path.write_text('{"number": 1}\n{"number": 2, "extra": }\n')
    with pytest.raises(DataError, match="JSON parse error"):
        opened(path, "number")


FIELDS = ["\ufeff", "x", "", 'x"y', '"x"', '"x\ny"', '"x""y"', '"x"y', ' "x"', '"x,y"', "x'", '"x\r\n"']
FIELDS += ['"""x"', '"x\n""y"', 'x""']


def test_blocks_of_csv_are_cut_as_pyarrow_reads_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over quotes, line ends, a mark at the beginning, empty lines, and blocks and reads of any size."""
    drawn = random.Random(0)
    for case in range(300):
        ends = drawn.choice((["\n"], ["\r\n"], ["\r"], ["\n", "\r\n", "\n\n"]))
        lines = [f"{drawn.choice(FIELDS)},{drawn.choice(FIELDS)}" for _ in range(drawn.randrange(1, 40))]
        text = "".join(line + drawn.choice(ends) for line in ("a,b", *lines))
        path = tmp_path / f"{case}.csv"
        path.write_bytes(drawn.choice((b"", b"\xef\xbb\xbf")) + text[: None if case % 3 else -1].encode())
        for name, value in (("_READ_BYTES", drawn.randrange(1, 200)), ("_BLOCK_BYTES", drawn.randrange(1, 100))):
            monkeypatch.setattr(text_files, name, value)
        options = pyarrow.csv.ParseOptions(newlines_in_values=True)
        kinds = pyarrow.csv.ConvertOptions(column_types={"a": pyarrow.string(), "b": pyarrow.string()})
        expected = pyarrow.csv.read_csv(path, parse_options=options, convert_options=kinds).to_pylist()
        if expected:
            found = rows_of(opened(path))
            assert [{name: one or "" for name, one in row.items()} for row in found] == expected, path.read_bytes()


def test_errors_name_the_line_of_the_file(tmp_path: Path) -> None:
    lines = [json.dumps({"x": number}) for number in range(3000)]
    csv_lines = ["x,y", '"two\nlines",1', *(f"{number},1" for number in range(2000)), "1,2,3"]
    for name, text, number in (
        ("a.jsonl", [*lines[:2500], '{"x": }', *lines], 2501),
        ("b.jsonl", [*lines[:1000], "", '{"x": 1', *lines], 1002),
        ("c.csv", csv_lines, 2004),
    ):
        (tmp_path / name).write_text("\n".join(text))
        with pytest.raises(DataError, match=f"{name}: cannot be read: line {number}: (JSON|CSV) parse error"):
            opened(tmp_path / name)


def test_a_quote_that_is_not_closed_does_not_take_the_file_into_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text_files, "_READ_BYTES", 1 << 12)
    monkeypatch.setattr(text_files, "_MAX_ROW_BYTES", 1 << 16)
    (tmp_path / "rows.csv").write_text('a,b\n1,"2\n' + "1,2\n" * 100_000)
    with pytest.raises(DataError, match=r"a row of over 0 MiB that begins at byte 4: is a quote not closed\?"):
        opened(tmp_path / "rows.csv")


def test_text_and_integers_stay_what_they_are(tmp_path: Path) -> None:
    """pyarrow takes texts for times and integers for floats, in one block or from one to the next."""
    filler: list[dict[str, Any]] = [{}] * 600
    columns: dict[str, list[Any]] = {
        "date": ["2026-01-01", "2026-01-01 10:00:00", "x"],
        "nested": [["2026-01-01"], [], ["2026-01-01T10:00:00Z"]],
        "number": [2**53 + 1, -1, 2**63 - 1],
        "weight": [0.5, 3, 2**53],
    }
    rows = [{name: values[index] for name, values in columns.items()} for index in range(3)]
    path = tmp_path / "rows.jsonl"
    for parts in (rows, [rows[0], *filler, rows[1], *filler, rows[2]]):
        path.write_text("\n".join(map(json.dumps, parts)))
        found = [row for row in rows_of(opened(path)) if row["date"] is not None]
        assert [{**row, "nested": list(row["nested"])} for row in found] == rows
    for apart in (0, 600):
        lines = [{"x": 0.5, "y": 1}, *({"x": 1},) * apart, {"x": [2**53 + 1][0], "y": 2}]
        path.write_text("\n".join(map(json.dumps, lines)))
        with pytest.raises(
            DataError, match=f"the column 'x' holds floats and an integer that is no float, {2**53 + 1}, in"
        ):
            opened(path)
        assert [row["y"] for row in rows_of(opened(path, "y")) if row["y"]] == [1, 2]
    records = [{"s": {"a": [2**53 + 1]}}] * 1024 + [{"s": {"a": [0.5]}}] * 3
    path.write_text("\n".join(map(json.dumps, records)))
    with pytest.raises(DataError, match=f"the column 's' holds floats and .* no float, {2**53 + 1}, in"):
        opened(path)
    path.write_text('{"x": 1, "y": 0.5}{"x": 1234567890123456, "y": 1}\n')
    assert [row["x"] for row in rows_of(opened(path))] == [1, 1234567890123456]
    path.write_text(json.dumps({"x": 2**64}))
    with pytest.raises(DataError, match=str(2**64)):
        opened(path)


def test_csv_codes_are_text(tmp_path: Path) -> None:
    texts = {
        "code": ["1", "00001"],
        "large": [str(2**64), "1"],
        "mixed": [str(2**53 + 1), "0.5"],
        "date": ["2026-01-01", "1"],
        "spaced": [" 00001", "2"],
        "signed": ["-007", "2"],
        "hex": ["0x1F", "2"],
        "floats": ["-0.5e-05", "2"],
    }
    path = tmp_path / "rows.csv"
    for apart in (0, 1200):
        lines = [",".join(values[0] for values in texts.values()), *[",".join("2" * len(texts))] * apart]
        lines.append(",".join(values[1] for values in texts.values()))
        path.write_text("\n".join([",".join(texts), *lines]))
        rows = rows_of(opened(path))
        for name, values in texts.items():
            expected = [-0.5e-05, 2.0] if name == "floats" else values
            assert [rows[0][name], rows[-1][name]] == expected, name


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_columns_of_one_name_are_refused(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"rows.{suffix}"
    table = pyarrow.table([[1], [2], [3]], names=["x", "y", "x"])
    pyarrow.csv.write_csv(table, path) if suffix == "csv" else pyarrow.parquet.write_table(table, path)
    source = TextFiles if suffix == "csv" else ParquetFiles
    with pytest.raises(DataError, match="has more than one column 'x': rename or drop the others"):
        source.open(DataPath(str(path)), (str(path),), (), None)


def test_hidden_folders_hold_no_rows(tmp_path: Path) -> None:
    root = tmp_path / "_kept" / ".here"
    for folder in ("", "more", ".ipynb_checkpoints", "_temporary/0", "more/.hidden/deep"):
        (root / folder).mkdir(parents=True, exist_ok=True)
        (root / folder / "rows.jsonl").write_text('{"x": 1}')
    assert list_files(str(root)) == (str(root / "more" / "rows.jsonl"), str(root / "rows.jsonl"))
