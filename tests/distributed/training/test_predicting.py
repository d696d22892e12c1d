"""`Prediction`: the rows of one process, in order and once, for any number of ranks, and after a kill at any moment."""

from __future__ import annotations

import itertools
import math
import os
import random
import re
import signal
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import torch.distributed as dist
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from raysharding import DataError
from raysharding.data import DataPath, SequenceRows
from raysharding.distributed.comm import collective_counters, init_mesh
from raysharding.distributed.fully_shard import is_kept_gathered, keep_gathered, shard_module
from raysharding.distributed.training import Prediction, PredictPlan
from raysharding.distributed.training.predict_columns import last_logits
from raysharding.models import InputBounds
from tests.distributed.checks import on_ranks
from tests.spawn import RanksFailedError, run_ranks

pytestmark = pytest.mark.all_ranks

NUM_ROWS = 53
VOCAB = 40


def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCAB, pad_token_id=0, **sizes)).eval()


def make_rows() -> list[dict[str, Any]]:
    """Prompts of 1 to 12 tokens, with a key."""
    drawn = random.Random(1)
    lengths = [drawn.randint(1, 12) for _ in range(NUM_ROWS)]
    return [
        {"id": f"row {number}", "input_ids": [drawn.randrange(3, VOCAB) for _ in range(length)]}
        for number, length in enumerate(lengths)
    ]


def padded(rows: Sequence[Any]) -> dict[str, torch.Tensor]:
    """A batch, padded on the right."""
    ids = [torch.tensor(row["input_ids"]) for row in rows]
    batch = nn.utils.rnn.pad_sequence(ids, batch_first=True)
    mask = nn.utils.rnn.pad_sequence([torch.ones_like(one) for one in ids], batch_first=True)
    return {"input_ids": batch, "attention_mask": mask}


def expected() -> torch.Tensor:
    """Logits of the last token of each row, each computed alone in this process, float32 [NUM_ROWS, VOCAB]."""
    alone = model()
    with torch.no_grad():
        return torch.stack([alone(torch.tensor([row["input_ids"]])).logits[0, -1] for row in make_rows()])


def run(options: dict[str, Any], steps: int = 3, *, gathered: bool = False) -> list[tuple[int, Any]]:
    """Run on this rank; return the first row and the values of each table, without `output`."""
    torch.set_num_threads(1)
    module = shard_module(model(), init_mesh("cpu"))
    if gathered:
        keep_gathered(module)
    plan = PredictPlan(collate_fn=padded, **{"source": SequenceRows(make_rows()), "keys": ("id",), **options})
    prediction = Prediction(plan, torch.device("cpu"), InputBounds.of(module), module)
    found = []
    try:
        while not prediction.is_over:
            prediction.steps(module, steps)
            found += [(part.start, table.to_pydict()) for part, table in prediction.finished]
            prediction.finished = []
    finally:
        prediction.close()
    return found


CASES: tuple[dict[str, Any], ...] = (
    {"batch_size": 8},
    {"batch_size": 3, "rows_per_file": 4, "by_length": True},
    {"batch_size": 8, "rows_per_file": 11, "by_length": True},
    {"batch_size": 64},
)


def read(output: Path) -> Any:
    """All rows of the files, in the order of the files' names."""
    return pa.concat_tables([pq.read_table(path) for path in sorted(output.glob("part-*.parquet"))])


def check(columns: Any) -> None:
    assert columns["id"] == [row["id"] for row in make_rows()]
    assert torch.allclose(torch.tensor(columns["logits"]), expected(), atol=1e-5)


@on_ranks(1, 2, 3, 4)
def test_rows_are_those_of_one_process(root: Path) -> None:
    """For counts that divide by nothing, more ranks than rows of the last batch, and rows of like length together."""
    for options, gathered in itertools.product(CASES, (False, True)):
        ranks: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(ranks, run(options, gathered=gathered))
        parts = sorted(itertools.chain(*ranks))
        check({name: [value for _, one in parts for value in one[name]] for name in ("id", "logits")})
    run({**CASES[1], "output": str(root / "rows")})
    dist.barrier()
    check(read(root / "rows").to_pydict())


class Refuses(nn.Module):
    """Raises for rows from one on."""

    def __init__(self, first: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.first = nn.Linear(1, 1), first

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if int(x.max()) >= self.first:
            raise RuntimeError("no such row")
        return self.layer(x)


def reads_badly(rows: Sequence[Any]) -> dict[str, torch.Tensor]:
    if rows[0]["x"][0] >= 44:
        raise ValueError("no such row")
    return {"x": torch.tensor([row["x"] for row in rows])}


def raises_late(outputs: Any, batch: Any) -> dict[str, Any]:
    reads_badly([{"x": one} for one in batch["x"].tolist()])
    return {"y": outputs}


def raises_at_once(outputs: Any, batch: Any) -> dict[str, Any]:
    if dist.get_rank():
        raise ValueError("no such row")
    return {"y": outputs}


@on_ranks(2)
def test_ranks_with_all_parameters_do_not_wait_for_each_other(root: Path) -> None:
    """Forwards and files cost no collective; what one rank raises ends all of them, and leaves all alike.

    In the third batch, in the first one, and in the first one of a run that goes on, which knows its columns.
    """
    rows = SequenceRows([{"x": [float(number)]} for number in range(64)])
    assert dist.group.WORLD is not None, "run_ranks makes it"
    cases: dict[str, dict[str, Any]] = {"good": {}, "model": {}, "model at once": {}}
    cases |= {"collate": {"collate_fn": reads_badly}, "fn": {"fn": raises_late}, "fn at once": {"fn": raises_at_once}}
    cases |= {"parts": {"collate_fn": reads_badly, "rows_per_file": 8}}
    for name, options in {**cases, "parts at once": {**cases["parts"], "resume": True}}.items():
        first = {"model": 44, "model at once": 32}.get(name, math.inf)
        module = shard_module(Refuses(first), init_mesh("cpu"))
        for parameter in module.parameters():
            parameter.grad = torch.zeros_like(parameter)
        keep_gathered(module)
        output = str(root / name.removesuffix(" at once" * (name == "parts at once")))
        plan = PredictPlan(rows, batch_size=8, output=output, **{"rows_per_file": 32, **options})
        prediction = Prediction(plan, torch.device("cpu"), module=module)
        if not name.endswith("at once"):
            prediction.steps(module, 1)
        if name == "good":
            count, *_ = collective_counters(dist.group.WORLD)
            before = count()
            assert prediction.steps(module, 6) == (6, 24)
            assert count() - before == 1, "one agreement for six forwards"
        else:
            with pytest.raises(Exception, match="no such row") as raised:
                # No further: rank 0 would come to such rows, too.
                prediction.steps(module, {"parts": 5, "parts at once": 1}.get(name, 6))
            assert ("(on rank 1)" in str(raised.value)) == (dist.get_rank() == 0), name
            assert not is_kept_gathered(module), name
            assert all(parameter.grad is None for parameter in module.parameters()), name
        prediction.close()


class Slow:
    """Takes some milliseconds for a batch. Kills its process a random moment after one of them begins."""

    left, seconds = -1, 0.0

    def __call__(self, outputs: Any, batch: Any) -> dict[str, Any]:
        if Slow.left == 0:
            threading.Timer(self.seconds, os.kill, (os.getpid(), signal.SIGKILL)).start()
        Slow.left -= 1
        time.sleep(0.004)
        return {"logits": last_logits(outputs, batch["attention_mask"])}


def run_in_files(output: str, batch_size: int, victim: int = -1, batch: int = -1, seconds: float = 0.0) -> None:
    if dist.get_rank() == victim:
        Slow.left, Slow.seconds = batch, seconds
    run({"batch_size": batch_size, "rows_per_file": 3, "fn": Slow(), "output": output, "resume": True}, steps=2)


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.full) for seed in range(1, 20))])
def test_a_kill_at_any_moment_loses_and_repeats_no_row(seed: int, tmp_path: Path) -> None:
    """Complete files stay, and another number of ranks, with another batch size, computes the rest."""
    drawn = random.Random(seed)
    output, world_size, batch_size = tmp_path / "out", drawn.randint(1, 4), drawn.randint(1, 9)
    num_batches = -(-3 // -(-batch_size // world_size)) * (NUM_ROWS // 3 // world_size)  # of a rank
    # A batch takes 10 to 20 ms: the moment is in its function, its write, or the forward after it.
    moment = drawn.randrange(world_size), drawn.randrange(num_batches), drawn.uniform(0.0, 0.015)
    with pytest.raises(RanksFailedError, match=r"signal 9|SIGKILL|-9"):
        run_ranks(world_size, run_in_files, str(output), batch_size, *moment)
    before = {path: (path.stat().st_ino, path.stat().st_mtime_ns) for path in output.glob("part-*.parquet")}
    run_ranks(drawn.randint(1, 4), run_in_files, str(output), drawn.randint(1, 9))
    check(read(output).to_pydict())
    assert {path: (path.stat().st_ino, path.stat().st_mtime_ns) for path in before} == before
    assert not [name for name in os.listdir(output) if name.startswith(".")], "what killed writers leave is removed"


class Anything(nn.Module):
    """Takes columns of any name, as a user's own model may."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1, bias=False)

    def forward(self, **columns: torch.Tensor) -> torch.Tensor:
        return self.layer(columns["x"]) + 100 * len(columns)


@on_ranks(full=(1,))
def test_a_model_of_any_names_does_not_get_the_keys(root: Path) -> None:
    rows = [{"x": [float(number)], "number": number, "name": f"{number}", "text": ""} for number in range(3)]
    pq.write_table(pa.Table.from_pylist(rows), root / "rows.parquet")
    module = shard_module(Anything(), init_mesh("cpu"))
    torch.nn.init.ones_(next(module.parameters()))
    for source in (DataPath(str(root / "rows.parquet")), SequenceRows(rows)):
        plan = PredictPlan(source, batch_size=2, keys=("number", "name"))
        prediction = Prediction(plan, torch.device("cpu"), module=module)
        prediction.steps(module, 9)
        table = {"number": [0, 1, 2], "name": ["0", "1", "2"], "logits": [[100.0], [101.0], [102.0]]}
        assert prediction.finished[0][1].to_pydict() == table
        assert prediction.dropped == ("text",)
        prediction.close()


class Later:
    """Columns that get their types late: rows before 40 have none. `kind` is what the others have."""

    def __init__(self, kind: Any) -> None:
        self.kind = kind

    def __call__(self, outputs: Any, batch: Any) -> dict[str, Any]:
        numbers = batch["number"].tolist()
        return {
            "number": numbers,
            "later": [None if number < 40 else "s" for number in numbers],
            "empty": [[] if number < 40 else [number] for number in numbers],
            "wider": [number if number < 40 else self.kind(number) for number in numbers],
        }


def typed_late(output: Any, batch: Any) -> dict[str, Any]:
    made = Later("n{}".format)(output, batch)
    return {"later": pa.array(made["later"], pa.string()), "wider": made["wider"]}


class Numbered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)

    def forward(self, number: torch.Tensor) -> torch.Tensor:
        return self.layer(number[:, None].float())


def run_late(output: str | None, fn: Any) -> Any:
    module = shard_module(Numbered(), init_mesh("cpu"))
    rows = [{"number": number, "key": None if number < 40 else f"{number}"} for number in range(NUM_ROWS)]
    plan = PredictPlan(SequenceRows(rows), batch_size=4, rows_per_file=60, fn=fn, keys=("key",), output=output)
    prediction = Prediction(plan, torch.device("cpu"), module=module)
    try:
        while not prediction.is_over:
            prediction.steps(module, 99)
        return [table for _, table in prediction.finished]
    except DataError as error:
        return str(error)
    finally:
        prediction.close()


@on_ranks(1)
def test_types_hold_the_values_of_all_batches(root: Path) -> None:
    (table,) = run_late(None, Later(float))
    kinds = {"key": "string", "later": "string", "empty": "list<item: int64>", "wider": "double"}
    assert {name: str(table.schema.field(name).type) for name in kinds} == kinds
    assert table["key"].to_pylist() == [None if number < 40 else f"{number}" for number in range(NUM_ROWS)]
    assert table["empty"].to_pylist() == [[] if number < 40 else [number] for number in range(NUM_ROWS)]
    what = "fn=Later: no one type holds .*Field wider has incompatible types: int64 vs string"
    assert re.search(what, run_late(None, Later(str)))
    what = "the column 'wider' of fn=typed_late holds string, and its type is int64, that of the first batches"
    assert what in run_late(str(root / "typed"), typed_late)


@on_ranks(2)
def test_a_column_of_a_file_has_a_type_at_once(root: Path) -> None:
    """On all ranks, before a file is written; and the data's own have the types of all rows."""
    error = run_late(str(root / "late"), Later(float))
    assert re.search(r"the column 'later' of fn=Later has only None .*: return a tensor, a NumPy array", error)
    dist.barrier()
    assert os.listdir(root / "late") == ["_predict.json"]


def test_last_position_is_the_last_that_is_not_padding() -> None:
    logits = torch.arange(24.0).view(2, 4, 3)
    right, left = torch.tensor([[1, 1, 0, 0], [1, 1, 1, 0]]), torch.tensor([[0, 0, 1, 1], [0, 1, 1, 1]])
    assert last_logits({"logits": logits}, right).tolist() == [logits[0, 1].tolist(), logits[1, 2].tolist()]
    assert last_logits({"logits": logits}, left).tolist() == logits[:, -1].tolist()
    assert last_logits(logits, None).tolist() == logits[:, -1].tolist()
    assert last_logits({"logits": logits[:, 0]}, right).tolist() == logits[:, 0].tolist(), "of a classifier"
    with pytest.raises(DataError, match=r"a dict \(last_hidden_state\) without logits: give fn="):
        last_logits({"last_hidden_state": logits}, right)
