"""`fit`: the steps of one process, whatever the data is given as; saves, resumes, restarts, Ctrl-C."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import signal
import threading
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from raysharding import CheckpointError, DataError, EmptyBatchError, FitStep, GroupError, Scheduled, ShardedModelGroup
from raysharding.config import Loading
from raysharding.group import GroupState
from raysharding.group.fit.datasets import dataset_handle
from tests.conftest import make_group, make_mlp
from tests.group.fit.runs import ADAMW, BATCH, NUM_ROWS, alone, collate, fit, regression

pytestmark = pytest.mark.usefixtures("cluster")


@pytest.mark.parametrize("who", ["from_checkpoint", "set_optimizer", "fit"])
def test_one_warning_of_trained_weights_in_bf16(
    checkpoint: Path, rows: list[dict[str, Any]], who: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """An optimizer whose warning is made an error is set nevertheless."""
    options: dict[str, Any] = {"optimizer": ADAMW} if who == "from_checkpoint" else {}

    def set_it() -> None:
        from raysharding import current_worker

        current_worker().trainer.set_optimizer(torch.optim.SGD, {"lr": 0.1})

    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        with make_group(checkpoint, world_size=1, loading=Loading(dtype="bf16"), **options) as group:
            if who == "set_optimizer":
                with warnings.catch_warnings():
                    warnings.simplefilter("error")
                    with pytest.raises(UserWarning) as raised:
                        group.set_optimizer(ADAMW)
            elif who == "fit":
                with pytest.raises(ValueError, match="fit needs an optimizer"):
                    fit(group, rows)
                group.call(set_it)
                assert not told
            for _ in range(2):
                fit(group, rows, max_steps=1, collate_fn=collate(torch.bfloat16))
            group.set_optimizer(ADAMW)
    if who == "set_optimizer":
        assert not told
        message = str(raised.value)
    else:
        (one,) = told
        message = str(one.message)
        assert Path(one.filename).parent.name in ("tests", "fit"), "the line of the program"
    said = (
        r"4 of 4 trained parameters are stored in torch.bfloat16.*Loading\(dtype=.float32.\).* for 424 B more over all"
    )
    assert re.match(said, message)
    assert "trained parameters are stored" not in capfd.readouterr().err, "on the rank"


@pytest.mark.parametrize("of", ["loss", "data"])
def test_steps_before_an_error_are_told(fresh: ShardedModelGroup, rows: list[dict[str, Any]], of: str) -> None:
    """Steps 2 to 8 are one call of the ranks, which raises in step 6."""
    expected, mean, make = alone(fresh.state_dict(), rows, 1)[:5], regression(), collate()
    bad = [one["y"] for one in rows[5 * BATCH : 6 * BATCH]]

    def loss(output: torch.Tensor, *, target: torch.Tensor) -> torch.Tensor:
        if target.ndim == 2:
            raise RuntimeError("this row")
        return mean(output, target=target)

    def bring(rows: list[Any]) -> Any:
        made, is_bad = make(rows), rows[0]["y"] in bad
        if is_bad and of == "data":
            raise RuntimeError("this row")
        return made | {"target": made["target"][:, None]} if is_bad else made

    seen: list[FitStep] = []
    with pytest.raises((GroupError, DataError), match="this row"):
        fit(fresh, rows, loss=loss, collate_fn=bring, callbacks=[seen.append])
    last = fresh.last_fit
    assert last is not None
    assert last.history["loss"] == pytest.approx(expected, abs=1e-4)
    assert [one.num_steps for one in seen] == [1, 2, 3, 4, 5]
    assert [one.metrics["loss"] for one in seen] == list(last.history["loss"])
    assert last.num_rows == 5 * BATCH


def as_dataset(parquet: Path, rows: list[dict[str, Any]]) -> Any:
    data = pytest.importorskip("ray.data")
    return data.from_arrow(list(pq.read_table(parquet).to_batches(max_chunksize=9)) and [
        pa.Table.from_batches([batch]) for batch in pq.read_table(parquet).to_batches(max_chunksize=9)
    ])  # fmt: skip


@pytest.mark.parametrize("in_background", [False, True])
@pytest.mark.usefixtures("few_steps_a_call")
def test_a_save_on_ctrl_c_that_fails(
    fresh: ShardedModelGroup,
    rows: list[dict[str, Any]],
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    in_background: bool,
) -> None:
    target = tmp_path / "saves"

    def stop(step: FitStep) -> None:
        if step.num_steps == 4:
            shutil.rmtree(target)
            target.write_text("the run's directory is a file")
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt) as raised:
        fit(fresh, rows, epochs=3, save_to=target, save_on_signal=True, async_save=in_background, callbacks=[stop])
    assert isinstance(raised.value.__cause__, CheckpointError)
    last = fresh.last_fit
    assert last is not None
    assert last.saved is None
    line = f"raysharding: fit: Ctrl-C ended the run after step {last.num_steps}; then came CheckpointError: "
    assert line in capfd.readouterr().err
    assert fresh.evaluate(rows, batch_size=BATCH, loss=regression(), collate_fn=collate())["loss"] > 0


def test_epochs_count_the_whole_run(fresh: ShardedModelGroup, parquet: Path, rows: list[dict[str, Any]]) -> None:
    expected = alone(fresh.state_dict(), rows, 3)
    first = fit(fresh, parquet, epochs=2)
    for epochs in (2, 1):
        done = fit(fresh, parquet, epochs=epochs, resume=True)
        assert (done.num_steps, done.first_step, done.history) == (16, 16, {})
        assert done.loss == first.loss
        assert str(done) == f"step 16, loss {first.loss:.4g}: no step was left to take"
        assert first.then(done).history == first.history
    told: list[FitStep] = []
    more = fit(fresh, parquet, epochs=3, resume=True, callbacks=[told.append])
    assert more.history["loss"] == pytest.approx(expected[16:], abs=1e-5)
    assert {step.epoch for step in told} == {2}
    assert first.then(more).loss == more.loss


def written(folder: Path, rows: list[dict[str, Any]]) -> Path:
    """JSON Lines, in a folder that Hugging Face's `datasets` takes for a dataset."""
    folder.mkdir(exist_ok=True)
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder / "train.jsonl"


GIVEN: dict[str, Callable[[Path, list[dict[str, Any]]], Any]] = {
    "list": lambda parquet, rows: rows,
    "parquet": lambda parquet, rows: parquet,
    "uri": lambda parquet, rows: f"file://{parquet.parent}",
    "dataset": as_dataset,
    "jsonl": lambda parquet, rows: written(parquet.parent / "text", rows),
    "name": lambda parquet, rows: f"{written(parquet.parent / 'hub', rows).parent}:train",
    "columns": lambda parquet, rows: {"x": [row["x"] for row in rows], "y": [row["y"] for row in rows]},
    "function": lambda parquet, rows: lambda: iter(rows),
}


@pytest.mark.parametrize(
    "kind", [pytest.param(one, marks=pytest.mark.full) if one == "dataset" else one for one in GIVEN]
)
def test_the_steps_are_those_of_one_process(
    fresh: ShardedModelGroup, kind: str, parquet: Path, rows: list[dict[str, Any]]
) -> None:
    expected = alone(fresh.state_dict(), rows, 2)
    told: list[FitStep] = []
    report = fit(fresh, GIVEN[kind](parquet, rows), epochs=2, callbacks=[told.append])
    assert report.history["loss"] == pytest.approx(expected, abs=1e-5)
    assert (report.num_steps, report.first_step, report.num_rows) == (16, 0, 2 * NUM_ROWS)
    assert [step.num_steps for step in told] == list(range(1, 17))
    assert [step.num_rows for step in told] == [*[7] * 7, 1] * 2
    assert [step.epoch for step in told] == [0] * 8 + [1] * 8
    assert tuple(step.metrics["loss"] for step in told) == report.history["loss"]


def test_a_shuffled_run_repeats(fresh: ShardedModelGroup, checkpoint: Path, parquet: Path) -> None:
    first = fit(fresh, parquet, shuffle=True, seed=5).history["loss"]
    for seed, is_same in ((5, True), (6, False)):
        fresh.load(checkpoint)
        fresh.set_optimizer(ADAMW)
        again = fit(fresh, parquet, shuffle=True, seed=seed).history["loss"]
        assert (again == pytest.approx(first, abs=1e-6)) is is_same


def test_saves_and_a_resume_in_another_group(
    fresh: ShardedModelGroup, parquet: Path, tmp_path: Path, checkpoint: Path
) -> None:
    whole = fit(fresh, parquet, epochs=3, shuffle=True, save_to=tmp_path / "all", save_every=5, keep_last=2)
    assert sorted(path.name for path in (tmp_path / "all").iterdir()) == ["step-20", "step-24"]
    assert whole.saved == str(tmp_path / "all" / "step-24")
    fresh.load(checkpoint)
    fresh.set_optimizer(ADAMW)
    fit(fresh, parquet, epochs=3, shuffle=True, save_to=tmp_path / "half", max_steps=11)
    with pytest.raises(CheckpointError, match="half: holds step-11 of another run") as refused:
        fit(fresh, parquet, save_to=tmp_path / "half")
    assert not hasattr(refused.value, "__notes__"), "the ranks' end of the run is no second error"
    # At as many ranks as before: `test_jobs.py`.
    with make_group(tmp_path / "half" / "step-11", world_size=3, optimizer=ADAMW) as again:
        report = fit(again, parquet, epochs=3, shuffle=True, resume=True)
        assert report.first_step == 11
        assert report.history["loss"] == pytest.approx(whole.history["loss"][11:], abs=1e-5)
        with pytest.raises(DataError, match="had batch_size=7, and this one has batch_size=8"):
            fit(again, parquet, batch_size=8, epochs=3, shuffle=True, resume=True)
        assert again.state is GroupState.READY


def test_saves_of_a_run_whose_loss_is_nan_remove_no_good_one(
    fresh: ShardedModelGroup, rows: list[dict[str, Any]], tmp_path: Path
) -> None:
    broken = [dict(row) for row in rows]
    broken[3 * 7]["x"] = [math.nan] * len(rows[0]["x"])  # in the fourth step
    with pytest.warns(UserWarning, match="the loss is nan from step 4 on"):
        fit(fresh, broken, save_to=tmp_path, save_every=1, keep_last=1, max_steps=6)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-3", "step-4", "step-5", "step-6"]


def test_what_cannot_be_fitted_is_refused(fresh: ShardedModelGroup, parquet: Path, tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    for data, error, said in (
        ([], ValueError, "data has no rows"),
        (iter([1]), ValueError, "give a function that returns it"),
        (7, TypeError, "data is a int: give a ray.data.Dataset, a path"),
        (tmp_path / "absent.parquet", DataError, "is not there, as rank 0 sees it"),
        ({"x": [1], "y": [1, 2]}, ValueError, "columns need the same number of rows"),
        (pa.table({"x": [1]}), TypeError, r"give its rows, table\.to_pylist"),
        ({1, 2}, TypeError, "whose order differs between processes"),
        (DataLoader(TensorDataset(torch.ones(2))), TypeError, "give its dataset, and batch_size="),
        (datasets.DatasetDict({"train": 1, "test": 2}), TypeError, "give one of its splits, 'train', 'test'"),
        (f"{tmp_path}:dev", DataError, "load_dataset"),
    ):
        with pytest.raises(error, match=said):
            fit(fresh, data)
    for options, said in (
        ({"batch_size": 0}, "batch_size=0"),
        ({"batch_size": 5, "rows_per_item": 2}, "batch_size=5 is no multiple of rows_per_item=2"),
        ({"save_every": 5}, "give a directory, save_to="),
        ({"keep_last": 0, "save_to": tmp_path}, "keep_last=0"),
        ({"max_grad_norm": -1.0}, "max_grad_norm=-1.0"),
        ({"columns": ["z"]}, "has no column 'z'"),
    ):
        with pytest.raises(ValueError, match=said):
            fit(fresh, parquet, **options)
    with pytest.raises(DataError, match="data: 3 rows do not divide by rows_per_item=2"):
        fit(fresh, parquet, eval_data=[{}] * 3, batch_size=4, rows_per_item=2)
    with pytest.raises(GroupError, match="there is no run to resume"):
        fit(fresh, parquet, resume=True)
    with pytest.raises(DataError, match="data: 3 rows do not divide by rows_per_item=2"):
        fresh.evaluate([{}] * 3, batch_size=4, rows_per_item=2)
    assert fresh.state is GroupState.READY
    assert fit(fresh, parquet, max_steps=1).num_steps == 1


def test_a_run_that_is_lengthened(
    checkpoint: Path,
    parquet: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A cosine over 5 steps, saved, and continued to 8 steps of a cosine over 8."""
    cosine, saved = torch.optim.lr_scheduler.CosineAnnealingLR, tmp_path / "step-5"
    with make_group(checkpoint, optimizer=Scheduled(ADAMW, partial(cosine, T_max=8))) as group:
        whole = fit(group, parquet, max_steps=8).history["lr"]
        group.set_optimizer(Scheduled(ADAMW, partial(cosine, T_max=5)))
        assert fit(group, parquet, max_steps=5, save_to=tmp_path).history["lr"] != whole[:5]
    with make_group(saved) as group:
        group.set_optimizer(Scheduled(ADAMW, partial(cosine, T_max=8)))
        with pytest.raises(
            GroupError, match=r"no run to resume: .* with an optimizer set, as by optimizer= of from_ch"
        ):
            fit(group, parquet, resume=True)
        group.load(saved)  # warns on rank 0
        group.set_scheduler(partial(cosine, T_max=8))
        assert fit(group, parquet, max_steps=6, resume=True, save_to=tmp_path).history["lr"] == whole[5:6]
        group.restart(tmp_path / "step-6")
        again = fit(group, parquet, max_steps=8, resume=True)
        assert again.history["lr"] == whole[6:], "the new horizon"
    monkeypatch.chdir(tmp_path)  # a relative path is the driver's: the ranks have another directory
    with make_group(Path("step-5"), optimizer=Scheduled(ADAMW, partial(cosine, T_max=5))) as group:
        assert fit(group, parquet, max_steps=6, resume=True).first_step == 5
    assert "raysharding: set_scheduler: continues at step 6" in capfd.readouterr().err


@pytest.mark.usefixtures("few_steps_a_call")
def test_a_run_that_is_interrupted_or_fails_leaves_its_report(
    fresh: ShardedModelGroup, parquet: Path, undisturbed: list[float]
) -> None:
    main = threading.main_thread().ident
    assert main is not None

    def slow(output: torch.Tensor, *, target: torch.Tensor) -> torch.Tensor:
        import time

        time.sleep(0.02)
        return (output.mean(dim=1) - target).square().mean()

    def stop(step: FitStep) -> None:
        seen.append(step.num_steps)
        if step.num_steps == 4:  # from another thread: it arrives while the ranks take the next steps
            threading.Timer(0.01, signal.pthread_kill, (main, signal.SIGINT)).start()

    seen: list[int] = []
    with pytest.raises(KeyboardInterrupt):
        fit(fresh, parquet, epochs=3, callbacks=[stop], loss=slow)
    last = fresh.last_fit
    assert last is not None
    assert 4 <= last.num_steps < 24
    assert seen == list(range(1, last.num_steps + 1)), "callbacks saw every step"

    def fail(step: FitStep) -> None:
        if step.num_steps == last.num_steps + 2:
            raise RuntimeError("enough")

    with pytest.raises(RuntimeError, match="enough"):
        fit(fresh, parquet, epochs=3, resume=True, callbacks=[fail])
    failed = fresh.last_fit
    assert failed is not None
    assert failed.first_step == last.num_steps, "no step that the ranks took is missing"
    with pytest.raises(ValueError, match="batch_size"):
        fit(fresh, parquet, batch_size=0)
    assert fresh.last_fit is failed
    report = fit(fresh, parquet, epochs=3, resume=True)
    assert fresh.last_fit is report
    whole = last.then(failed).then(report)
    assert whole.num_steps == 24
    assert whole.history["loss"] == pytest.approx(undisturbed[:24], abs=1e-4)


def test_a_rank_killed_in_a_run_without_restarts(checkpoint: Path, parquet: Path, tmp_path: Path) -> None:
    """With them: `test_beside_fit.py -k saves_weights_alone`."""

    def kill(step: FitStep) -> None:
        if step.num_steps == 15 and not killed:
            killed.append(group.ranks[1].pid)
            os.kill(group.ranks[1].pid, signal.SIGKILL)

    killed: list[int] = []
    with make_group(checkpoint, optimizer=ADAMW) as group:
        with pytest.raises(GroupError, match="rank 1"):
            fit(group, parquet, epochs=4, save_every=6, save_to=tmp_path, callbacks=[kill])
        assert group.state is GroupState.BROKEN


def test_the_report_is_for_people_too(fresh: ShardedModelGroup, parquet: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    report = fit(fresh, parquet)
    assert f"step 8, loss {report.loss:.4g}: 8 steps in" in str(report)
    report.plot(tmp_path / "curve.png")
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")
    assert report.as_dict()["num_steps"] == 8


def test_columns_that_the_model_does_not_take(
    fresh: ShardedModelGroup, rows: list[dict[str, Any]], capfd: pytest.CaptureFixture[str]
) -> None:
    """They are left out, and named once; what the loss takes stays."""
    expected = alone(fresh.state_dict(), rows, 1)
    data = [{"input": row["x"], "target": row["y"], "text": "some", "id": 7} for row in rows]
    held_out = [{"input": row["x"], "target": row["y"], "note": "some"} for row in rows]
    report = fit(fresh, data, collate_fn=None, callbacks=[], eval_data=held_out, eval_every=3)
    assert report.history["loss"] == pytest.approx(expected, abs=1e-5)
    said = [line for line in capfd.readouterr().err.splitlines() if "dropped" in line]
    assert said == [
        "raysharding: fit: the model takes no id, text: dropped from the data (collate_fn= gets all columns)",
        "raysharding: fit: the model takes no note: dropped from eval_data (collate_fn= gets all columns)",
    ]
    assert fresh.evaluate(data, batch_size=9, loss=regression())["num_rows"] == NUM_ROWS
    with pytest.raises(DataError, match="rows have the columns x, y, and the model takes only input, target: rename"):
        fit(fresh, rows, collate_fn=None)


@pytest.mark.full
def test_a_dataset_that_a_rank_cannot_load_is_named(fresh: ShardedModelGroup, tmp_path: Path) -> None:
    """The driver can: on rank 1, the cache of `datasets` is no directory."""
    pytest.importorskip("datasets")
    folder, cache = tmp_path / "rows", tmp_path / "no-cache"
    folder.mkdir()
    (folder / "train.jsonl").write_text('{"input": [1.0], "target": 1.0}\n' * 8)
    cache.touch()

    def without_cache(place: str) -> None:
        import datasets
        import torch.distributed as dist

        if dist.get_rank() == 1:
            datasets.config.HF_DATASETS_CACHE = place

    fresh.call(without_cache, str(cache))
    with pytest.raises(DataError) as caught:
        fit(fresh, f"{folder}:train", collate_fn=None)
    # Rank 0's copy of the error has the number of the rank; rank 1's own, which may come first, has it in its cause.
    said = f"{caught.value} {caught.value.__cause__}"
    assert f"datasets.load_dataset('{folder}', split='train')" in said
    assert "rank 1" in said
    assert str(cache) in said


def of_known() -> Callable[..., Any]:
    """The mean over rows whose target is known."""

    def loss(output: torch.Tensor, *, target: torch.Tensor) -> tuple[torch.Tensor, int]:
        known = ~target.isnan()
        return ((output.mean(dim=1) - target.nan_to_num()) * known).square().sum(), int(known.sum())

    return loss


def test_a_batch_in_which_nothing_counts(fresh: ShardedModelGroup, rows: list[dict[str, Any]]) -> None:
    data = [{**row, "y": float("nan")} if BATCH <= index < 2 * BATCH else row for index, row in enumerate(rows)]
    told: list[FitStep] = []
    with pytest.warns(UserWarning, match="fit: step 2 was skipped, as others like it will be") as warned:
        report = fit(fresh, data, loss=of_known(), epochs=2, callbacks=[told.append])
    assert report.skipped == (2, 10)
    assert sum("skipped" in str(one.message) for one in warned) == 1
    assert (report.num_steps, report.num_rows) == (16, 2 * (NUM_ROWS - BATCH))
    assert [number for number, loss in enumerate(report.history["loss"], 1) if loss != loss] == [2, 10]
    assert [step.num_steps for step in told if step.is_skipped] == [2, 10]
    assert report.loss == report.history["loss"][-1]
    assert "16 steps, 2 of them skipped" in str(report)
    with pytest.raises(EmptyBatchError, match="nothing counts"):
        fit(fresh, data, loss=of_known(), on_empty="raise")
    assert fresh.state is GroupState.READY
    with pytest.raises(ValueError, match="on_empty="):
        fit(fresh, data, on_empty="ignore")
    with pytest.warns(UserWarning, match="fit: the loss is inf from step 2 on"):
        fit(fresh, [*rows[:BATCH], {**rows[0], "y": float("inf")}], loss=of_known())


def near() -> Callable[..., Any]:
    """A metric that pickles by value: rows whose target is met within 0.5."""

    def metric(output: torch.Tensor, target: torch.Tensor) -> Any:
        return ((output.mean(dim=1) - target).abs() < 0.5).sum(), len(target)

    return metric


def test_floats_of_a_dataset_are_no_ids() -> None:
    data = pytest.importorskip("ray.data").from_arrow(pa.table({"input_ids": [[1.0, 2.0]], "x": [0.5]}))
    with pytest.raises(DataError, match="the column 'input_ids' holds lists of floats, and the model takes ids"):
        dataset_handle(data, None, 60, ["input_ids", "labels"])
    assert dataset_handle(data, ["x"], 60, ["input_ids"]).refs


def test_evaluation_is_that_of_one_process(
    fresh: ShardedModelGroup, parquet: Path, rows: list[dict[str, Any]], tmp_path: Path
) -> None:
    module = make_mlp()()
    module.load_state_dict(fresh.state_dict())
    batch = collate()(rows)
    with torch.no_grad():
        output = module(batch["input"])
    expected = {
        "loss": pytest.approx(regression()(output, target=batch["target"]).item(), rel=1e-5),
        "near": pytest.approx(float(near()(output, batch["target"])[0]) / NUM_ROWS),
        "num_rows": NUM_ROWS,
    }
    options: dict[str, Any] = {"loss": regression(), "collate_fn": collate(), "metrics": {"near": near()}}
    for data, batch_size in ((parquet, 1), (rows, 7), (parquet, 50), (as_dataset(parquet, rows), 9)):
        assert fresh.evaluate(data, batch_size=batch_size, **options) == expected
    call = fresh.evaluate.remote(parquet, batch_size=2, **options)
    assert call.result() == expected
    with pytest.raises(DataError, match=r"absent\.parquet: is not there"):
        fresh.evaluate(tmp_path / "absent.parquet", batch_size=2, **options)
    assert fresh.state is GroupState.READY
