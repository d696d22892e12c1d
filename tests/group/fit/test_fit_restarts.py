"""Runs that break: they go on with what files hold of them, and never with anything else."""

from __future__ import annotations

import itertools
import math
import os
import shutil
import signal
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest import mock

import pyarrow.parquet as pq
import pytest
import ray.data
import torch

from raysharding import (
    CheckpointError,
    DataError,
    FitStep,
    GroupError,
    LoadReport,
    ShardedModelGroup,
    Sharding,
    Split,
    current_worker,
)
from raysharding.group import GroupState
from raysharding.group.calls.client import Client
from raysharding.group.fit.run import FitRun
from tests.conftest import make_group
from tests.group.fit.runs import ADAMW, BATCH, NUM_ROWS, Killer, collate, fit, noisy_collate, regression, slow_writes

pytestmark = [pytest.mark.usefixtures("cluster", "few_steps_a_call"), pytest.mark.timeout(180)]


def train(group: ShardedModelGroup) -> None:
    def loss(output: torch.Tensor, *_: Any) -> torch.Tensor:
        return output.square().mean()

    group.train_step(Split(torch.ones(4, 8)), loss=loss)


def test_what_is_in_no_file_is_saved_first(
    fresh: ShardedModelGroup, checkpoint: Path, parquet: Path, tmp_path: Path
) -> None:
    """A restart goes back to files: steps that were taken before the run must be in some."""
    train(fresh)
    whole = fit(fresh, parquet).history["loss"]
    with make_group(checkpoint, optimizer=ADAMW, max_restarts=1) as group:
        train(group)
        with pytest.raises(ValueError, match="a restart would lose that"):
            fit(group, parquet)
        killer = Killer(3, 1)
        killer.group = group
        report = fit(group, parquet, save_to=tmp_path / "saves", callbacks=[killer])
        assert report.num_restarts == 1
        assert report.history["loss"] == pytest.approx(whole, abs=1e-6)
    assert sorted(os.listdir(tmp_path / "saves")) == ["step-0", "step-8"]


def test_generators_go_back_to_where_the_run_began(fresh: ShardedModelGroup, checkpoint: Path, parquet: Path) -> None:
    """Where no save was made yet, and the checkpoint that is loaded again knows nothing of them."""

    def seed() -> None:
        torch.manual_seed(5 + current_worker().rank)

    options: dict[str, Any] = {"epochs": 4, "collate_fn": noisy_collate()}
    fresh.call(seed)
    whole = fit(fresh, parquet, **options).history["loss"]
    killer = Killer(3, 1)
    with make_group(checkpoint, optimizer=ADAMW, max_restarts=1) as killer.group:
        killer.group.call(seed)
        report = fit(killer.group, parquet, **options, callbacks=[killer])
    assert report.num_restarts == 1
    assert report.history["loss"] == pytest.approx(whole, abs=1e-4)


@pytest.mark.parametrize("kind", ["files", pytest.param("dataset", marks=pytest.mark.full)])
def test_a_rank_that_is_lost_while_a_restarted_run_begins(
    kind: str, checkpoint: Path, parquet: Path, undisturbed: list[float]
) -> None:
    """It counts as any other; blocks of a dataset go to the ranks beside the calls."""
    data: Any = parquet if kind == "files" else ray.data.read_parquet(str(parquet))
    begin, numbers = FitRun._begin, itertools.count()
    killers = [Killer(3, 1)]
    with make_group(checkpoint, optimizer=ADAMW, max_restarts=2) as group:

        def kill_and_begin(run: FitRun, *, resume: bool) -> None:
            if next(numbers) == 1:
                os.kill(group.ranks[0].pid, signal.SIGKILL)
            begin(run, resume=resume)

        killers[0].group = group
        with mock.patch.object(FitRun, "_begin", kill_and_begin):
            report = fit(group, data, epochs=4, callbacks=killers)
    assert report.num_restarts == 2
    assert report.history["loss"] == pytest.approx(undisturbed, abs=1e-4)


@pytest.mark.full
def test_a_rank_that_is_lost_while_a_restart_loads(checkpoint: Path, parquet: Path, undisturbed: list[float]) -> None:
    """The restart failed, and is one of those that there may be."""
    launch: Any = import_module("raysharding.group.launch.launch")  # beside the function of the same name
    load, numbers = launch._load, itertools.count()

    def kill_and_load(client: Client, *args: Any) -> LoadReport:
        if next(numbers) == 0:
            os.kill(client.ranks[0].pid, signal.SIGKILL)
        return load(client, *args)

    killer = Killer(3, 1)
    for is_enough in (False, True):
        with make_group(checkpoint, optimizer=ADAMW, max_restarts=1 + is_enough) as group:
            killer.group = group
            with mock.patch.object(launch, "_load", kill_and_load):
                if is_enough:
                    report = fit(group, parquet, epochs=4, callbacks=[killer])
                    assert report.num_restarts == 2
                    assert report.history["loss"] == pytest.approx(undisturbed, abs=1e-4)
                    continue
                with pytest.raises(GroupError, match=r"rank 0 ") as caught:
                    fit(group, parquet, epochs=4, callbacks=[killer])
                assert "fit was restarting after: " in "".join(caught.value.__notes__)
            assert group.state is GroupState.BROKEN
            numbers = itertools.count()


def stumble(step: FitStep) -> None:
    if step.num_steps == 3:
        raise ZeroDivisionError


def stumbling(sign: Path) -> Callable[..., torch.Tensor]:
    """A loss that raises once, on one rank, some steps after it was looked at."""
    plain, calls = regression(), itertools.count()

    def loss(output: torch.Tensor, *, target: torch.Tensor) -> torch.Tensor:
        if next(calls) == 20 and torch.distributed.get_rank() == 1 and not sign.exists():
            sign.touch()
            raise ZeroDivisionError
        return plain(output, target=target)

    return loss


@pytest.mark.full
def test_runs_that_break_while_ranks_ask(checkpoint: Path, rows: list[dict[str, Any]], tmp_path: Path) -> None:
    """Without a collate function batches are made ahead, and each step leaves a question under way."""
    columns = {"input": [row["x"] for row in rows], "target": [row["y"] for row in rows]}
    data = {name: torch.tensor(values) for name, values in columns.items()}
    options: dict[str, Any] = {"collate_fn": None, "epochs": 6}
    with make_group(checkpoint, optimizer=ADAMW) as group:
        whole = fit(group, data, **options).history["loss"]
        assert group.evaluate(data, batch_size=BATCH, loss=regression())["num_rows"] == NUM_ROWS
    with make_group(checkpoint, optimizer=ADAMW, max_restarts=1) as group:
        with pytest.raises(ZeroDivisionError):
            fit(group, data, **options, callbacks=[stumble])
        assert group.evaluate(data, batch_size=BATCH, loss=regression())["num_rows"] == NUM_ROWS
        killer = Killer(30, 1)
        killer.group = group
        report = fit(group, data, **options, resume=True, save_to=tmp_path / "saves", callbacks=[killer])
        assert report.num_restarts == 1
        assert report.history["loss"] == pytest.approx(whole[report.first_step :], abs=1e-4)
    with make_group(checkpoint, optimizer=ADAMW, max_restarts=1) as group:
        pids = {rank.pid for rank in group.ranks}
        report = fit(group, data, **options, loss=stumbling(tmp_path / "stumbled"))
        assert report.num_restarts == 1
        assert not pids & {rank.pid for rank in group.ranks}, "a restart makes new processes"
        told = [pair for pair in zip(report.history["loss"], whole, strict=True) if not math.isnan(pair[0])]
        assert len(told) > len(whole) // 4
        assert [own for own, _ in told] == pytest.approx([expected for _, expected in told], abs=1e-4)


@pytest.mark.full
def test_a_save_that_a_callback_makes_is_gone_on_from(
    checkpoint: Path, parquet: Path, undisturbed: list[float], tmp_path: Path
) -> None:
    """Callbacks hear of many quick steps at once: what they save bears the place that it is of."""
    killer = Killer(12, 0)
    with make_group(checkpoint, optimizer=ADAMW, max_restarts=1) as group:

        def save(step: FitStep) -> None:
            if step.num_steps == 1:
                group.save(tmp_path / "mine", overwrite=True)

        killer.group = group
        report = fit(group, parquet, epochs=4, callbacks=[save, killer])
        assert report.num_restarts == 1
        assert report.history["loss"] == pytest.approx(undisturbed, abs=1e-4)


@pytest.mark.full
def test_replicas_save_in_the_background_and_go_on(checkpoint: Path, parquet: Path, tmp_path: Path) -> None:
    hsdp: dict[str, Any] = {"sharding": Sharding(replicate_size=2), "optimizer": ADAMW}
    killer = Killer(12, 1)
    with make_group(checkpoint, max_restarts=1, **hsdp) as group:
        killer.group = group
        saves: dict[str, Any] = {"save_to": tmp_path, "save_every": 5, "keep_last": 2, "async_save": True}
        report = fit(group, parquet, epochs=4, callbacks=[killer], **saves)
        assert report.num_restarts == 1
    assert sorted(os.listdir(tmp_path)) == ["step-30", "step-32"]


@pytest.mark.full
def test_a_lost_save_is_made_again(checkpoint: Path, parquet: Path, tmp_path: Path) -> None:
    """A rank dies while the last save is written in the background: the report names a save that is there."""
    killer = Killer(8, 1)
    with make_group(checkpoint, optimizer=ADAMW, max_restarts=1) as group:
        group.call(slow_writes(0.3))
        killer.group = group
        report = fit(group, parquet, save_to=tmp_path, save_every=4, async_save=True, callbacks=[killer])
        assert report.num_restarts == 1
        assert report.num_steps == 8
        assert report.saved == str(tmp_path / "step-8")
    with make_group(tmp_path / "step-8", optimizer=ADAMW) as group:
        assert group.load_report.num_tensors == 4


def test_saves_of_another_run_are_left_alone(
    fresh: ShardedModelGroup, checkpoint: Path, parquet: Path, tmp_path: Path
) -> None:
    fit(fresh, parquet, save_to=tmp_path / "one", save_every=4)
    fresh.load(checkpoint)
    fit(fresh, parquet, save_to=tmp_path / "two", save_every=4)
    with pytest.raises(CheckpointError, match="one: holds step-4 of another run"):
        fit(fresh, parquet, epochs=2, resume=True, save_to=tmp_path / "one", keep_last=1)
    assert fresh.state is GroupState.READY
    assert sorted(os.listdir(tmp_path / "one")) == ["step-4", "step-8"]
    (tmp_path / "two" / "step-4" / "eval.json").write_text("[]")
    fit(fresh, parquet, epochs=2, resume=True, save_to=tmp_path / "two", keep_last=1)
    assert sorted(os.listdir(tmp_path / "two")) == ["step-16", "step-4"]
    assert os.listdir(tmp_path / "two" / "step-4") == ["eval.json"], "no save of another run"
    fit(fresh, parquet, epochs=3, resume=True, save_to=tmp_path / "two", keep_last=1)
    assert sorted(os.listdir(tmp_path / "two")) == ["step-24", "step-4"]


@pytest.mark.full
def test_small_files_outlive_the_save_that_they_came_with(checkpoint: Path, parquet: Path, tmp_path: Path) -> None:
    """`keep_last` removes what the group was made from; its tokenizer goes on from save to save."""
    source = tmp_path / "step-0"
    source.mkdir()
    shutil.copy(checkpoint, source / "model.safetensors")
    (source / "tokenizer.json").write_text('{"mine": 1}')
    with make_group(source, optimizer=ADAMW) as group:
        fit(group, parquet, save_to=tmp_path / "saves", max_steps=2)
    with make_group(tmp_path / "saves" / "step-2", optimizer=ADAMW) as group:
        options: dict[str, Any] = {"save_to": tmp_path / "saves", "save_every": 2, "keep_last": 1, "resume": True}
        for is_async in (False, True):
            fit(group, parquet, **options, async_save=is_async, max_steps=8, epochs=1 + is_async)
    (left,) = (tmp_path / "saves").iterdir()
    assert (left / "tokenizer.json").read_text() == '{"mine": 1}'


@pytest.mark.full
def test_a_save_that_older_ones_were_removed_for_is_found(checkpoint: Path, parquet: Path, tmp_path: Path) -> None:
    """As if rank 0 had died after the commit, before the driver heard of it."""
    with make_group(checkpoint, optimizer=ADAMW) as group:
        fit(group, parquet, save_to=tmp_path, max_steps=4)
        weights = group.state_dict()
        (tmp_path / "step-4").rename(tmp_path / "step-8")
        report = group.restart(world_size=1)
        assert report.checkpoint == str(tmp_path / "step-8")
        assert all(torch.equal(value, weights[name]) for name, value in group.state_dict().items())


@pytest.mark.full
def test_rows_in_other_blocks_are_other_data(fresh: ShardedModelGroup, parquet: Path, tmp_path: Path) -> None:
    """A random order hangs on the sizes of row groups; in order, rows are rows."""
    table = pq.read_table(parquet)
    pq.write_table(table, tmp_path / "rows.parquet", row_group_size=20)
    fit(fresh, parquet, shuffle=True, max_steps=3)
    with pytest.raises(DataError, match="had layout="):
        fit(fresh, tmp_path / "rows.parquet", shuffle=True, resume=True)
    fit(fresh, parquet, max_steps=3)
    assert fit(fresh, tmp_path / "rows.parquet", resume=True).num_steps == 8


@pytest.mark.full
def test_a_dataset_comes_in_its_own_order(fresh: ShardedModelGroup, checkpoint: Path) -> None:
    """Blocks whose tasks end in another order are trained on in theirs."""
    data = pytest.importorskip("ray.data")

    def backwards() -> Callable[[Any], Any]:
        def slow_first(batch: Any) -> Any:
            import time

            time.sleep(0.6 if float(batch["id"][0]) < 10 else 0.0)
            return batch

        return slow_first

    def make(rows: list[Any]) -> dict[str, torch.Tensor]:
        return {"input": torch.ones(len(rows), 8), "target": torch.tensor([float(row["id"]) for row in rows])}

    dataset = data.range(40, override_num_blocks=4).map_batches(backwards())
    expected = fit(fresh, [{"id": number} for number in range(40)], batch_size=8, collate_fn=make).history["loss"]
    fresh.load(checkpoint)
    fresh.set_optimizer(ADAMW)
    assert fit(fresh, dataset, batch_size=8, collate_fn=make).history["loss"] == pytest.approx(expected, rel=1e-5)


class Closing:
    """A callback that lets a save fail, raises, and wants to be closed."""

    is_closed = False

    def __init__(self, sign: Path) -> None:
        self._sign = sign

    def __call__(self, step: FitStep) -> None:
        self._sign.touch()
        time.sleep(1.0)  # the driver may hear of it meanwhile
        raise RuntimeError("the user's own")

    def close(self) -> None:
        self.is_closed = True


def test_the_users_error_is_not_masked(checkpoint: Path, parquet: Path, tmp_path: Path) -> None:
    """A save that has failed in the background does not take its place, and everything is closed."""
    with make_group(checkpoint, optimizer=ADAMW) as group:
        sign = tmp_path / "now"

        def broken(sign: str) -> None:
            import os
            import time

            from raysharding.checkpoint.writing import FileWriter

            def close(self: Any) -> None:
                # Not before the run has begun: its calls would raise this.
                until = time.monotonic() + 60
                while not os.path.exists(sign) and time.monotonic() < until:
                    time.sleep(0.05)
                raise OSError("the disk")

            FileWriter.close = close  # type: ignore[method-assign]

        group.call(broken, str(sign))
        call = group.save.remote(tmp_path / "saved", async_save=True)
        call.result()
        closing = Closing(sign)
        with pytest.raises(RuntimeError, match="the user's own"):
            group.fit(
                parquet, batch_size=BATCH, loss=regression(), collate_fn=collate(), callbacks=[closing], max_steps=2
            )
        assert closing.is_closed
        with pytest.raises((CheckpointError, GroupError), match="the disk"):
            group.wait_for_save()
        assert group.state is GroupState.READY
