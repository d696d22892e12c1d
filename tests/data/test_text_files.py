"""JSON Lines and CSV files as rows: real files on disk."""

from __future__ import annotations

import csv
import json
import pickle
from pathlib import Path
from typing import Any

import pytest

from raysharding.data import DataPath, KnownColumns, TextFiles, epoch_batches, hub_name, list_files
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
        ("a.jsonl", "[1, 2]", "a.jsonl: cannot be read: JSON parse error"),
        ("b.jsonl", '{"x": 1}\n{"x": "one"}\n', "b.jsonl: cannot be read: JSON parse error: .*x"),
        ("c.jsonl", "", "c.jsonl: has no rows"),
        ("d.csv", "a,b\n1\n", "d.csv: cannot be read: CSV parse error"),
        (
            "e.jsonl",
            '{"x": 1}\n' * 512 + '{"x": "one"}',
            "e.jsonl: the column 'x' holds text, and whole numbers",
        ),
        ("f.csv", "input_ids\n0.5\n", "f.csv: the column 'input_ids' holds floats, and the model takes ids"),
    ):
        (tmp_path / name).write_text(text)
        with pytest.raises(DataError, match=said):
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
