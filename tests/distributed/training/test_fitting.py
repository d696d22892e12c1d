"""Runs over data equal one process: 100-step curves, resumes, and errors that every rank hears of."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from raysharding.config import Sharding
from raysharding.data import Prefetch, SequenceRows, Stream
from raysharding.data.order import Position
from raysharding.data.source import Columns
from raysharding.distributed import load_checkpoint, load_optimizer_state
from raysharding.distributed.comm.device import current_device
from raysharding.distributed.comm.device_mesh import init_mesh
from raysharding.distributed.fully_shard.shard import shard_module
from raysharding.distributed.saving.save import save_checkpoint
from raysharding.distributed.saving.training_state import load_training
from raysharding.distributed.training import data_loader
from raysharding.distributed.training.data_loader import DataPlan, DistributedDataLoader
from raysharding.distributed.training.fit import Fit, FitPlan
from raysharding.errors import DataError, RayshardingError
from tests.distributed.checks import on_ranks
from tests.distributed.training.test_training import Pair, each
from tests.distributed.training.training_cases import CASES, Rows, part_of
from tests.spawn import device_type, run_ranks

pytestmark = pytest.mark.all_ranks

CPU = torch.device("cpu")
NUM_STEPS = 100
NUM_ROWS = 230
BATCH = 7
"""Rows of a step: neither 2 nor 3 nor 4 divides it, and the last of an epoch has 6."""


def many_rows(name: str) -> Rows:
    """Rows of a case with other numbers in each, labels masked unevenly."""
    base = CASES[name].rows()
    random = torch.Generator().manual_seed(5)
    made = {}
    for key, value in base.items():
        shape = (NUM_ROWS, *value.shape[1:])
        if value.is_floating_point():
            made[key] = torch.randn(shape, generator=random, dtype=value.dtype)
        elif key == "attention_mask":
            made[key] = torch.ones(shape, dtype=value.dtype)
        else:
            made[key] = torch.randint(0, int(value.max()) + 1, shape, generator=random, dtype=value.dtype)
        if key == "labels" and value.ndim > 1:
            made[key][torch.rand(shape, generator=random) < 0.3] = -100
    return made


def fit(pair: Pair, plan: FitPlan) -> list[dict[str, float]]:
    run = fit_of(plan)
    steps = []
    while (step_metrics := run.step(pair.module, pair.optimizer)) is not None:
        steps.append(step_metrics.metrics)
    run.data_loader.close()
    return steps


def batches(rows: Rows) -> Iterator[Rows]:
    """Of each epoch."""
    while True:
        yield from (part_of(rows, start, start + BATCH) for start in range(0, NUM_ROWS, BATCH))


def curve(name: str, replicate_size: int, num_parts: int, num_steps: int) -> None:
    case, rows = replace(CASES[name], training=True), many_rows(name)
    pair = Pair(case.build, "adamw", Sharding(replicate_size=replicate_size))
    data_plan = DataPlan(SequenceRows(Columns(rows)), BATCH, 99, max_steps=num_steps)
    steps = fit(pair, FitPlan(data_plan, case.loss, gradient_accumulation_steps=num_parts))
    assert len(steps) == num_steps
    for metrics, batch in zip(steps, batches(rows), strict=False):
        pair.agree(metrics, pair.twin_step(case, batch))
    assert steps[-1]["loss"] < steps[0]["loss"], "nothing was learned"


@on_ranks(2, full=(1, 3, 4))
def test_100_steps_equal_one_process(replicate_size: int) -> None:
    """Loss and gradient norm of each step, within 1e-5; in parts, of which ranks do more, as many as an epoch has."""
    for name in ["llama", "row_mean"] if dist.get_world_size() == 1 else ["llama"]:
        curve(name, replicate_size, 1, NUM_STEPS)
        curve(name, replicate_size, 4, math.ceil(NUM_ROWS / BATCH))


class Names(nn.Module):
    """Raises in step 3 of epoch 1, with the numbers of its rows."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.num_calls = nn.Parameter(torch.ones(4)), 0

    def forward(self, number: torch.Tensor) -> torch.Tensor:
        self.num_calls += 1
        if self.num_calls == 4 + 3:
            raise RuntimeError(f"{len(number)} rows of the data, {number.tolist()}")
        return self.scale.sum() * number.float().mean()


def raise_in_a_step(shuffle: bool, as_stream: bool, rows_per_item: int) -> None:
    module = shard_module(Names(), init_mesh(device_type(), Sharding()), Sharding())
    optimizer = torch.optim.SGD(module.parameters(), lr=0.0)
    data = [{"number": torch.tensor(number)} for number in range(30)]  # 4 steps an epoch
    source = Stream(data) if as_stream else SequenceRows(data)
    plan = DataPlan(source, 8, 2, shuffle=shuffle, seed=3, rows_per_item=rows_per_item)
    run = fit_of(FitPlan(plan, loss=mean_of_rows))
    for _ in range(6):
        run.step(module, optimizer)
    with pytest.raises(RuntimeError, match=" rows ") as caught:
        run.step(module, optimizer)
    run.data_loader.close()
    [told] = [note for note in caught.value.__notes__ if "in step" in note]
    assert told == f"raysharding: in step 7, epoch 1, with {caught.value}"


def mean_of_rows(output: torch.Tensor, *, number: torch.Tensor) -> tuple[torch.Tensor, int]:
    return output * len(number), len(number)


@on_ranks(2)
def test_an_error_in_a_step_names_the_rows() -> None:
    each(raise_in_a_step, [(False, False, 1), (False, True, 1), (True, False, 1), (True, False, 2)])


@on_ranks(2)
def test_an_epoch_in_bf16_is_near_that_in_fp32() -> None:
    """Parameters in fp32, computing in bf16: the curve of one fp32 process within 2 % of its loss."""
    case, rows = CASES["llama"], many_rows("llama")
    pair = Pair(case.build, "adamw", Sharding(mixed_precision="bf16"))
    steps = fit(pair, FitPlan(DataPlan(SequenceRows(Columns(rows)), BATCH, 1)))
    assert len(steps) == math.ceil(NUM_ROWS / BATCH)
    for metrics, batch in zip(steps, batches(rows), strict=False):
        assert metrics["loss"] == pytest.approx(pair.twin_step(case, batch)[0], rel=0.02)


class Dropped(nn.Module):
    """Learns under drop-out, so that its curve hangs on every random number."""

    rate = 0.5

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 16), nn.Linear(16, 1)

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = nn.functional.dropout(self.first(inputs).relu(), self.rate, training=self.training)
        return {"loss": (self.second(hidden)[:, 0] - targets).square().mean()}


def numbers(num_rows: int = 50) -> Columns:
    random = torch.Generator().manual_seed(1)
    inputs = torch.randn(num_rows, 4, generator=random)
    return Columns({"inputs": inputs, "targets": inputs.sum(1)})


DATA_PLAN = DataPlan(SequenceRows(numbers()), 8, 3, shuffle=True, seed=4)
"""3 epochs of 7 steps."""


def fit_of(plan: DataPlan | FitPlan, position: Position | None = None) -> Fit:
    return Fit(plan if isinstance(plan, FitPlan) else FitPlan(plan), current_device(device_type()), position)


def small_pair(build: Any = Dropped) -> Pair:
    pair = Pair(build, "adamw")
    torch.manual_seed(7 + dist.get_rank())
    return pair


def losses(pair: Pair, run: Fit, num_steps: int = 99) -> list[float]:
    taken: list[float] = []
    while len(taken) < num_steps and (step_metrics := run.step(pair.module, pair.optimizer)) is not None:
        taken.append(step_metrics.metrics["loss"])
    return taken


@on_ranks(2, sim=(2,))
def test_a_resume_takes_the_steps_that_were_left(root: Path) -> None:
    """A run that is saved in the middle of an epoch and goes on in another process is the run that was never saved."""
    whole = losses(pair := small_pair(), fit_of(DATA_PLAN))
    assert len(whole) == 21
    pair = small_pair()
    run = fit_of(DATA_PLAN)
    begun = losses(pair, run, 10)
    save_checkpoint(pair.module, root / "resumed", optimizer=pair.optimizer, position=run.position)
    run.data_loader.close()
    again, position = loaded(root / "resumed", Dropped)
    assert position is not None
    assert (position.epoch, position.step, position.num_steps) == (1, 3, 10)
    run = fit_of(DATA_PLAN, position)
    assert run.data_loader.total_steps == 21
    assert begun + losses(again, run) == pytest.approx(whole, rel=1e-6, abs=1e-7)


def loaded(path: Path, build: Any) -> tuple[Pair, Position | None]:
    """A new module, optimizer and state of random numbers with those of a save, and its position."""
    pair = small_pair(build)
    torch.manual_seed(0)
    load_checkpoint(pair.module, path)
    load_optimizer_state(pair.module, pair.optimizer, path)
    return pair, load_training(path)


class Plain(Dropped):
    """Without drop-out, which no two world sizes share."""

    rate = 0.0


def saved_half(root: Path) -> list[float]:
    pair = small_pair(Plain)
    run = fit_of(DATA_PLAN)
    losses(pair, run, 10)
    save_checkpoint(pair.module, root, optimizer=pair.optimizer, position=run.position)
    return losses(pair, run)


def resumed_half(root: Path) -> list[float]:
    pair, position = loaded(root, Plain)
    return losses(pair, fit_of(DATA_PLAN, position))


@pytest.fixture(scope="module")
def half(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[float]]:
    """A save of two ranks in the middle of a run, and the losses of its other half."""
    root = tmp_path_factory.mktemp("half") / "saved"
    return root, run_ranks(2, saved_half, root)[0]


@pytest.mark.parametrize("world_size", [1, 3])
def test_a_resume_at_another_world_size(half: tuple[Path, list[float]], world_size: int) -> None:
    root, expected = half
    assert len(expected) == 11
    assert run_ranks(world_size, resumed_half, root)[0] == pytest.approx(expected, rel=1e-5, abs=1e-6)


class Scores(nn.Module):
    """Scores rows, which come in pairs: a better one, and a worse one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 16), nn.Linear(16, 1)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(inputs).tanh())[:, 0]


def preference(scores: torch.Tensor) -> tuple[torch.Tensor, int]:
    better, worse = scores.unflatten(0, (-1, 2)).unbind(1)
    return -nn.functional.logsigmoid(better - worse).sum(), len(better)


NUMBERED = SequenceRows([{"inputs": [float(number), *[number % 3 / 2] * 3], "number": number} for number in range(26)])
PAIRS = DataPlan(NUMBERED, 8, 2, shuffle=True, seed=4, rows_per_item=2)
"""2 epochs of 4 steps, the last of which has one pair, and so two ranks of three have none."""


def numbers_of(num_parts: int) -> list[list[list[int]]]:
    """Numbers of the rows of this rank, for each step and part; none for a dummy."""
    loader, steps = DistributedDataLoader(PAIRS, CPU, num_parts=num_parts), []
    while (passes := loader.next()) is not None:
        parts = [part for (part,) in passes]
        for part in parts:
            numbers = part.kwargs["number"].tolist()
            assert numbers == [row + one for row in numbers[::2] for one in range(2)], "a pair is not whole"
            assert not any(row % 2 for row in numbers[::2])
            assert len(numbers) == (part.num_rows or 2), "a dummy is a pair"
        steps.append([part.kwargs["number"].tolist() if part.num_rows else [] for part in parts])
        loader.advance()
    return steps


def in_pairs() -> tuple[list[list[list[int]]], list[float]]:
    """Numbers and losses of the steps in two parts."""
    plan = replace(PAIRS, collate_fn=lambda rows: {"inputs": torch.tensor([row["inputs"] for row in rows]) / 26})
    run = fit_of(FitPlan(plan, preference, gradient_accumulation_steps=2))
    return numbers_of(2), losses(small_pair(Scores), run)


def test_pairs_stay_whole_on_a_rank_and_in_a_part() -> None:
    """Shuffled, in two parts: every step has the rows and the loss that it has in one process."""
    ((alone, expected),) = run_ranks(1, in_pairs)
    assert [sum(map(len, parts)) for parts in alone] == [8, 8, 8, 2] * 2
    assert sorted(number for parts in alone[:4] for part in parts for number in part) == list(range(26))
    ranks = run_ranks(3, in_pairs)
    for step, parts in enumerate(alone):
        taken = [number for numbers, _ in ranks for part in numbers[step] for number in part]
        assert taken == [number for part in parts for number in part]
    assert len(expected) == 8
    for _, found in ranks:
        assert found == pytest.approx(expected, rel=1e-5)


class Failing(Columns):
    """One row cannot be read."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index == 21:
            raise OSError("the disk of row 21")
        return super().__getitem__(index)


def hear_of_errors() -> None:
    """One rank's trouble with its rows is an error on all, and the module is right for the next run."""
    pair = small_pair()
    run = fit_of(replace(DATA_PLAN, source=SequenceRows(Failing(numbers().columns)), shuffle=False))
    with pytest.raises(DataError, match="epoch 0, step 2 could not be made: OSError: the disk of row 21"):
        losses(pair, run)
    assert run.position.num_steps == 2
    run.data_loader.close()
    assert len(losses(pair, fit_of(DATA_PLAN))) == 21


def uneven() -> Any:
    return [{"inputs": [0.0] * 4, "targets": 0.0}] * (8 + 8 * dist.get_rank())


def hear_of_ends() -> None:
    """Iterables that end on one rank earlier are an error, not a hang."""
    pair = small_pair()
    with pytest.raises(DataError, match="ended on 1 ranks while others have rows"):
        losses(pair, fit_of(replace(DATA_PLAN, source=Stream(uneven), shuffle=False, epochs=1)))
    with pytest.raises(DataError, match="data has no rows"):
        losses(pair, fit_of(replace(DATA_PLAN, source=Stream(list), shuffle=False)))


def ragged_rows() -> list[dict[str, Any]]:
    return [{"inputs": [0.0] * (4 + (number == 3)), "targets": 0.0} for number in range(8)]


def hear_of_collating() -> None:
    pair = small_pair()
    with pytest.raises(DataError, match=r"row\['inputs'\] does not stack: shape \(4,\) in one row, shape \(5,\)"):
        losses(pair, fit_of(replace(DATA_PLAN, source=SequenceRows(ragged_rows()), shuffle=False)))
    with pytest.raises(DataError, match=r"collate returned a dict without a tensor"):
        losses(pair, fit_of(replace(DATA_PLAN, collate_fn=lambda rows: {"inputs": str(rows)})))


def hear_of_hangs() -> None:
    def rows() -> Iterator[Any]:
        yield from [{"inputs": [0.0] * 4, "targets": 0.0}] * 8
        if dist.get_rank() == 1:
            threading.Event().wait(30)

    pair = small_pair()
    run = fit_of(replace(DATA_PLAN, source=Stream(rows), shuffle=False, stall_s=1.0))
    with pytest.raises(DataError, match="no batch came within 1 s"):
        losses(pair, run)


def go_on_elsewhere() -> None:
    where = replace(fit_of(DATA_PLAN).position, step=3, num_steps=3)
    for change, said in (
        ({"batch_size": 16}, "batch_size=8, and this one has batch_size=16"),
        ({"seed": 5}, "seed=4, and this one has seed=5"),
        ({"source": SequenceRows(numbers(51))}, "num_rows=50, and this one has num_rows=51"),
        ({"rows_per_item": 2}, "rows_per_item=1, and this one has rows_per_item=2"),
    ):
        with pytest.raises(DataError, match=said):
            fit_of(replace(DATA_PLAN, **change), where)


def hear_of_halves() -> None:
    """Half a pair is an error before the first step, or where an iterable turns out to end in one."""
    plan = replace(DATA_PLAN, rows_per_item=2, shuffle=False)
    with pytest.raises(DataError, match="data: 51 rows do not divide by rows_per_item=2: leave out the last 1, or add"):
        fit_of(replace(plan, source=SequenceRows(numbers(51))))
    pair, run = small_pair(), fit_of(replace(plan, source=Stream(SequenceRows(numbers(11)).rows)))
    with pytest.raises(DataError, match="data: 11 rows do not divide by rows_per_item=2"):
        losses(pair, run)
    assert run.position.num_steps == 1


@on_ranks(2)
def test_every_rank_hears_of_what_is_wrong_with_the_data() -> None:
    for check in (hear_of_halves, hear_of_errors, hear_of_ends, hear_of_collating, hear_of_hangs, go_on_elsewhere):
        check()


def soon_ready(ahead: Prefetch[Any]) -> bool:
    """`is_ready` of a thread that is far enough ahead."""
    while ahead._ready.empty():
        time.sleep(0.001)
    return True


@on_ranks(2)
def test_ranks_ask_each_other_while_they_compute() -> None:
    """Ranks whose next batches lie ready do not wait for each other; one whose does not has all of them wait."""
    plan, found = replace(DATA_PLAN, epochs=2, shuffle=False), []
    for late in (set(), {1}):
        is_ready = (lambda ahead: False) if dist.get_rank() in late else soon_ready
        loader = DistributedDataLoader(plan, CPU)
        with (
            mock.patch.object(Prefetch, "is_ready", is_ready),
            mock.patch.object(data_loader, "are_alike", wraps=data_loader.are_alike) as asked,
        ):
            rows = []
            while (passes := loader.next()) is not None:
                rows.append(passes[0][0].kwargs["inputs"])
                loader.advance()
        # The first batch of an epoch is waited for, and where it ends; with a late rank each of the 14.
        assert asked.call_count == (16 if late else 4)
        found.append(torch.cat(rows))
    assert torch.equal(*found)
    assert len(found[0]) == 50


@on_ranks(2)
def test_ranks_read_ahead() -> None:
    """Rows are taken for the batches that `prefetch` says, two at least, and one in the making."""
    for prefetch in (1, 2, 3):
        made: list[int] = []

        def rows(made: list[int] = made) -> Iterator[Any]:
            for number in range(40):
                made.append(number)
                yield {"inputs": [0.0] * 4, "targets": 0.0}

        loader = DistributedDataLoader(DataPlan(Stream(rows), 4, prefetch=prefetch), CPU)
        with mock.patch.object(Prefetch, "is_ready", soon_ready):
            for _ in range(3):
                loader.next()
                loader.advance()
        # Three that were given out; every rank runs through all rows of a stream.
        expected, deadline = 3 + max(prefetch, 2) + 1, time.monotonic() + 20
        while len(made) // 4 < expected and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.2)  # for one more, if there were to be one
        assert len(made) // 4 == expected, (prefetch, made)
        loader.close()


@on_ranks(3)
def test_fewer_rows_than_ranks() -> None:
    """Fewer rows than ranks: the others hold a row that does not count."""
    rows = numbers(2)
    pair = small_pair(Plain)
    expected = pair.twin(**rows.columns)["loss"].item()
    metrics = losses(pair, fit_of(DataPlan(SequenceRows(rows), 5)))
    assert metrics == [pytest.approx(expected, rel=1e-5)]


@on_ranks(2)
def test_a_damaged_position_is_an_error_on_every_rank(root: Path) -> None:
    pair = small_pair()
    path = root / "damaged"
    save_checkpoint(pair.module, path, optimizer=pair.optimizer, position=Position(0, 1, 1, 8, True, 4, 50))
    dist.barrier()
    file = path / "training" / "raysharding.training.json"
    good = file.read_text()
    for text, said in (
        ("{", "is not what raysharding writes"),
        (good.replace('"format_version":1', '"format_version":9'), "format_version 9"),
        (good.replace('"step":1', '"step":-1'), "position: step is -1"),
        (good.replace('"torch":"', '"torch":"AA'), "holds no state of random generators"),
    ):
        dist.barrier()
        if not dist.get_rank():
            file.write_text(text)
        dist.barrier()
        with pytest.raises(RayshardingError, match=said):
            load_training(path)


def test_plans_that_no_run_can_have() -> None:
    for bad in (
        {"batch_size": 0},
        {"epochs": 1.5},
        {"seed": -1},
        {"max_steps": True},
        {"prefetch": 0},
        {"rows_per_item": 0},
    ):
        with pytest.raises(ValueError, match=f"{next(iter(bad))}="):
            replace(DATA_PLAN, **bad)
    with pytest.raises(ValueError, match=r"batch_size=8 is no multiple of rows_per_item=3: .* batch_size=9"):
        replace(DATA_PLAN, rows_per_item=3)


def test_a_position_of_an_earlier_version_is_of_single_rows() -> None:
    saved = Position(0, 1, 1, 8, True, 4, 50).as_dict()
    assert Position.from_dict({**saved, "rows_per_item": 2}).rows_per_item == 2
    del saved["rows_per_item"]
    assert Position.from_dict(saved).rows_per_item == 1
    with pytest.raises(ValueError, match="position: rows_per_item is '2'"):
        Position.from_dict({**saved, "rows_per_item": "2"})


def steps_of(position: Position | None, **plan: Any) -> int | None:
    return fit_of(replace(DATA_PLAN, **plan), position).data_loader.total_steps


@on_ranks(1)
def test_the_number_of_steps_is_known_where_rows_are_counted() -> None:
    assert steps_of(None) == 21
    assert steps_of(None, max_steps=9) == 9
    where = fit_of(DATA_PLAN).position
    assert steps_of(replace(where, epoch=2, step=3, num_steps=17)) == 21
    assert steps_of(None, source=Stream(list), shuffle=False) is None
