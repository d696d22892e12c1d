"""Evaluations between the steps of `fit`: their values, what they must not change, the best save, the early stop."""

from __future__ import annotations

import json
import math
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from raysharding import (
    CheckpointError,
    DataError,
    EarlyStop,
    FitStep,
    ShardedModelGroup,
    Sharding,
    current_worker,
)
from raysharding.checkpoint import read_save_record
from raysharding.checkpoint.format import TRAINING_FOLDER, TRAINING_NAME, new_token
from raysharding.group import GroupState
from raysharding.group.fit.evaluations import Evaluations
from raysharding.group.fit.run import FitRun
from tests.conftest import make_group
from tests.group.fit.runs import (
    ADAMW,
    BATCH,
    Killer,
    collate,
    fit,
    noisy_collate,
    regression,
    slow_writes,
    trained_alone,
)
from tests.group.fit.test_fit import near, written

pytestmark = pytest.mark.usefixtures("cluster")

HELD_OUT = 20
"""Rows that are evaluated: three batches, the last of six rows."""
SCORES = {2: 0.1, 4: 0.5, 6: 0.9, 8: 0.3, 10: 0.2, 12: 0.9, 14: 0.4, 16: 0.8}
"""Step → value of the metric of `Scored`: the best comes first after step 6, and again, no better, after step 12."""


class Scored:
    """A metric whose value at each step is known: the driver writes it to a file before the step is taken."""

    every = 1

    def __init__(self, path: Path) -> None:
        self.path = path
        self.seen: list[dict[str, float]] = []
        path.write_text("0")

    def __call__(self, step: FitStep) -> None:
        self.path.write_text(str(SCORES.get(step.num_steps + 1, 0)))
        self.seen.append({name: one for name, one in step.metrics.items() if name.startswith("eval_")})

    def metric(self) -> Callable[..., Any]:
        path = str(self.path)

        def score(output: Any) -> Any:
            with open(path) as file:
                return float(file.read()), 1

        return score

    def options(self, **more: Any) -> dict[str, Any]:
        return {"metrics": {"score": self.metric()}, "eval_every": 2, "callbacks": [self], "epochs": 2, **more}


def position_in(save: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((save / TRAINING_FOLDER / TRAINING_NAME).read_text())["position"]
    return found


def test_values_are_those_of_one_process(fresh: ShardedModelGroup, parquet: Path, rows: list[dict[str, Any]]) -> None:
    """At the end of each epoch, of one process with the same steps; given to callbacks as to the report."""
    held_out = collate()(rows[:HELD_OUT])
    expected = {}
    for epoch in (1, 2):
        module, _ = trained_alone(fresh.state_dict(), rows, epoch)
        with torch.no_grad():
            output = module(held_out["input"])
        share = float(near()(output, held_out["target"])[0]) / HELD_OUT
        loss = regression()(output, target=held_out["target"]).item()
        expected[8 * epoch] = {"eval_loss": pytest.approx(loss, abs=1e-5), "eval_near": pytest.approx(share)}
    told: list[FitStep] = []
    options: dict[str, Any] = {"metrics": {"near": near()}, "epochs": 2, "callbacks": [told.append]}
    report = fit(fresh, parquet, eval_data=rows[:HELD_OUT], **options)
    assert report.evaluations == expected
    seen = {step.num_steps: step.metrics for step in told if "eval_loss" in step.metrics}
    assert {step: {name: one[name] for name in report.evaluations[step]} for step, one in seen.items()} == expected
    assert len(told) == 16


def test_evaluations_change_no_step(
    fresh: ShardedModelGroup, checkpoint: Path, parquet: Path, rows: list[dict[str, Any]]
) -> None:
    """Not even those of data that draws from the generators that training draws from."""

    def seed() -> None:
        torch.manual_seed(5)

    losses = []
    options: tuple[dict[str, Any], ...] = ({}, {"eval_data": rows[:HELD_OUT], "eval_every": 3})
    for more in options:
        fresh.load(checkpoint)
        fresh.set_optimizer(ADAMW)
        fresh.call(seed)
        report = fit(fresh, parquet, shuffle=True, epochs=2, collate_fn=noisy_collate(), **more)
        losses.append(report.history["loss"])
    assert list(report.evaluations) == [3, 6, 9, 12, 15, 16]
    assert losses[1] == losses[0]


def test_an_iterable_is_evaluated_at_its_end(fresh: ShardedModelGroup, rows: list[dict[str, Any]]) -> None:
    """Also where the ranks find the end in a call of their own, after the last step was reported."""

    class Every:
        every = 4

        def __call__(self, step: FitStep) -> None:
            pass

    for more, numbers in (([], [*range(1, 9)]), ([Every()], [*range(1, 9), 8])):
        told: list[FitStep] = []
        report = fit(fresh, lambda: iter(rows), eval_data=rows[:3], callbacks=[told.append, *more])
        assert list(report.evaluations) == [8]
        assert told[-1].metrics["eval_loss"] == report.evaluations[8]["eval_loss"]
        assert [step.num_steps for step in told] == numbers


def test_the_best_save_is_kept(
    fresh: ShardedModelGroup, parquet: Path, rows: list[dict[str, Any]], tmp_path: Path
) -> None:
    scored, saves = Scored(tmp_path / "score"), tmp_path / "saves"
    options = scored.options(keep_best="score", save_to=saves, save_every=5, keep_last=1)
    report = fit(fresh, parquet, eval_data=rows[:3], **options)
    assert {step: one["eval_score"] for step, one in report.evaluations.items()} == SCORES
    assert sorted(path.name for path in saves.iterdir()) == ["step-16", "step-6"]
    assert (report.best.path, report.best.step, report.best.value) == (str(saves / "step-6"), 6, 0.9)
    assert position_in(saves / "step-6")["num_steps"] == 6
    assert f"best in {saves / 'step-6'}" in str(report)
    # A resumed run goes on comparing, and does not remove it either.
    SCORES[18] = 0.85
    try:
        later = fit(fresh, parquet, eval_data=rows[:3], resume=True, **{**options, "epochs": 3, "max_steps": 18})
    finally:
        del SCORES[18]
    assert later.best == report.best
    assert sorted(path.name for path in saves.iterdir()) == ["step-18", "step-6"]


def test_an_early_stop_survives_a_resume(
    fresh: ShardedModelGroup, parquet: Path, rows: list[dict[str, Any]], tmp_path: Path
) -> None:
    scored, saves = Scored(tmp_path / "score"), tmp_path / "saves"
    options = scored.options(save_to=saves, eval_data=rows[:3])
    report = fit(fresh, parquet, **options, stop=EarlyStop("score", patience=2))
    assert (report.num_steps, report.stopped) == (10, "eval_score has not improved in 2 evaluations")
    assert report.saved == str(saves / "step-10")
    fresh.load(saves / "step-10")
    done = fit(fresh, parquet, **options, stop=EarlyStop("score", patience=2), resume=True)
    assert (done.num_steps, done.first_step, done.loss) == (10, 10, report.loss)
    assert "no step was left to take; stopped: eval_score has not improved in 2" in str(done)
    more = fit(fresh, parquet, **options, stop=EarlyStop("score", patience=4), resume=True)
    assert more.num_steps == 14, "improved last after step 6; the fourth evaluation after that is that of step 14"


def test_rows_are_found_once_in_a_fit(
    fresh: ShardedModelGroup, parquet: Path, rows: list[dict[str, Any]], tmp_path: Path
) -> None:
    """The file is not read whole again before each evaluation: later lines are not seen."""
    held_out = written(tmp_path / "held-out", rows[:HELD_OUT])

    def grow(step: FitStep) -> None:
        with open(held_out, "a") as file:
            file.write(json.dumps({"x": rows[0]["x"], "y": 1000.0}) + "\n")

    def far(output: Any, target: torch.Tensor) -> Any:
        return (target > 100).sum(), len(target)

    report = fit(fresh, parquet, eval_data=held_out, eval_every=3, metrics={"far": far}, callbacks=[grow])
    assert {step: values["eval_far"] for step, values in report.evaluations.items()} == {3: 0, 6: 0, 8: 0}
    assert fresh.evaluate(held_out, batch_size=BATCH, collate_fn=collate(), loss=regression())["num_rows"] > HELD_OUT


@pytest.mark.parametrize("saves_elsewhere", [False, True])
def test_a_best_save_that_an_error_cut_off_is_made_on_resume(
    fresh: ShardedModelGroup, parquet: Path, rows: list[dict[str, Any]], tmp_path: Path, saves_elsewhere: bool
) -> None:
    """The older best stays until then; also if the user has saved the weights in a place of their own."""
    scored, saves = Scored(tmp_path / "score"), tmp_path / "saves"

    def fail(step: FitStep) -> None:
        if step.num_steps == 6:
            raise RuntimeError("after the best evaluation, before its save")

    options = scored.options(eval_data=rows[:3], keep_best="score", save_to=saves, keep_last=1, max_steps=8)
    options["callbacks"] = [scored, fail]
    with pytest.raises(RuntimeError, match="before its save"):
        fit(fresh, parquet, **options)
    assert [path.name for path in saves.iterdir()] == ["step-4"]
    if saves_elsewhere:
        fresh.save(tmp_path / "mine")
    report = fit(fresh, parquet, **options, resume=True)
    assert (report.first_step, report.best.step, report.num_steps) == (6, 6, 8)
    assert sorted(path.name for path in saves.iterdir()) == ["step-6", "step-8"]
    assert position_in(saves / "step-6")["num_steps"] == 6


def test_a_last_evaluation_that_an_error_cut_off_is_made_on_resume(
    fresh: ShardedModelGroup, parquet: Path, rows: list[dict[str, Any]], tmp_path: Path
) -> None:
    """With the last save, though no step is left; and once."""
    flag, saves = tmp_path / "flag", tmp_path / "saves"
    path = str(flag)

    def breaks(output: Any) -> Any:
        import os

        if os.path.exists(path):
            raise RuntimeError("not now")
        return 1, 1

    options: dict[str, Any] = {"eval_data": rows[:HELD_OUT], "metrics": {"one": breaks}, "save_to": saves}
    flag.write_text("")
    with pytest.raises(DataError, match=r"metrics\['one'\] raised RuntimeError: not now"):
        fit(fresh, parquet, **options)
    assert fresh.state is GroupState.READY
    flag.unlink()
    report = fit(fresh, parquet, **options, resume=True)
    assert (report.first_step, report.num_steps, list(report.evaluations)) == (8, 8, [8])
    assert [one["step"] for one in position_in(saves / "step-8")["evaluations"]] == [8]
    assert fit(fresh, parquet, **options, resume=True).evaluations == {}


@pytest.mark.parametrize("saves_elsewhere", [False, True])
def test_a_save_that_an_error_cut_off_is_made_on_resume(
    fresh: ShardedModelGroup, parquet: Path, tmp_path: Path, saves_elsewhere: bool
) -> None:
    """Also without evaluations."""

    def fail(step: FitStep) -> None:
        if step.num_steps == 4:
            raise RuntimeError("before the save")

    options: dict[str, Any] = {"save_to": tmp_path / "saves", "save_every": 4}
    with pytest.raises(RuntimeError, match="before the save"):
        fit(fresh, parquet, **options, callbacks=[fail])
    if saves_elsewhere:
        fresh.save(tmp_path / "mine")
    fit(fresh, parquet, **options, resume=True)
    assert position_in(tmp_path / "saves" / "step-4")["num_steps"] == 4


@pytest.mark.parametrize("is_async", [False, True])
def test_a_complete_save_is_not_made_again_on_resume(
    fresh: ShardedModelGroup, parquet: Path, rows: list[dict[str, Any]], tmp_path: Path, is_async: bool
) -> None:
    """Whether the weights are still those of the save, or were saved elsewhere: it may be the best one."""

    def zero() -> None:
        with torch.no_grad():
            for parameter in current_worker().module.parameters():
                parameter.zero_()

    best = {"eval_data": rows[:3], "keep_best": "loss"}
    options: dict[str, Any] = {"save_to": tmp_path / "saves", "save_every": 4, "async_save": is_async, **best}
    last = str(tmp_path / "saves" / "step-8")
    assert fit(fresh, parquet, **options).best.path == last
    token = read_save_record(last).token
    assert token
    assert fit(fresh, parquet, **options, resume=True).num_steps == 8
    assert read_save_record(last).token == token
    fresh.save(tmp_path / "mine")
    fit(fresh, parquet, **options, resume=True)
    assert read_save_record(last).token == token
    fresh.call(zero)
    fit(fresh, parquet, **options, resume=True, epochs=2)
    assert read_save_record(last).token == token


def test_a_complete_save_that_lacks_the_evaluation_is_made_again(
    fresh: ShardedModelGroup, parquet: Path, rows: list[dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if an error cut that off, too."""

    def fail(run: FitRun, **_: Any) -> None:
        raise RuntimeError("between the evaluation and its save")

    fit(fresh, parquet, save_to=tmp_path)
    options: dict[str, Any] = {"save_to": tmp_path, "eval_data": rows[:3], "keep_best": "loss", "resume": True}
    monkeypatch.setattr(FitRun, "_save", fail)
    with pytest.raises(RuntimeError, match="and its save"):
        fit(fresh, parquet, **options)
    monkeypatch.undo()
    assert not position_in(tmp_path / "step-8")["evaluations"]
    assert fit(fresh, parquet, **options).best.step == 8
    assert [one["step"] for one in position_in(tmp_path / "step-8")["evaluations"]] == [8]


def test_a_save_that_is_being_written_is_not_made_again_on_resume(
    checkpoint: Path, parquet: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens: list[str] = []

    def note() -> str:
        tokens.append(new_token())
        return tokens[-1]

    monkeypatch.setattr("raysharding.group.launch.save_load.new_token", note)
    with make_group(checkpoint, optimizer=ADAMW) as group:
        fit(group, parquet, max_steps=4)
        group.call(slow_writes(0.1))
        group.save(tmp_path / "step-4", async_save=True)
        fit(group, parquet, max_steps=4, save_to=tmp_path, save_every=4, resume=True)
    assert tokens == [read_save_record(str(tmp_path / "step-4")).token]


@pytest.mark.full
@pytest.mark.parametrize("is_async", [False, True])
def test_a_finished_run_is_in_files(checkpoint: Path, parquet: Path, tmp_path: Path, is_async: bool) -> None:
    """A restart would lose nothing: the run that follows need not save, and needs no `save_to`."""
    with make_group(checkpoint, optimizer=ADAMW, max_restarts=1) as group:
        fit(group, parquet, save_to=tmp_path, async_save=is_async)
        saves = group.saves
        assert fit(group, parquet, resume=True).num_steps == 8
        assert fit(group, parquet, resume=True, epochs=2).num_steps == 16
        assert group.saves == saves
        with pytest.raises(ValueError, match="a restart would lose that"):
            fit(group, parquet, resume=True, epochs=3)


@pytest.mark.full
def test_generators_go_back_after_an_evaluation_that_was_made_up_for(
    checkpoint: Path, parquet: Path, rows: list[dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank dies after it, before a step: the one that replaces it draws what the lost one would have drawn."""

    def seed() -> None:
        torch.manual_seed(5 + current_worker().rank)

    evaluate = Evaluations.evaluate
    hsdp: dict[str, Any] = {"sharding": Sharding(replicate_size=2), "optimizer": ADAMW}
    losses = []
    for name in ("whole", "killed"):
        options: dict[str, Any] = {"save_to": tmp_path / name, "collate_fn": noisy_collate()}
        with make_group(checkpoint, max_restarts=1, **hsdp) as group:
            fit(group, parquet, **options, max_steps=3)
            group.call(seed)

            def evaluate_and_kill(*args: Any) -> Any:
                values = evaluate(*args)
                os.kill(group.ranks[1].pid, signal.SIGKILL)
                monkeypatch.undo()
                return values

            if name == "killed":
                monkeypatch.setattr(Evaluations, "evaluate", evaluate_and_kill)
            report = fit(group, parquet, **options, resume=True, eval_data=rows[:3], eval_every=3)
        assert (report.num_restarts, report.first_step) == (int(name == "killed"), 3)
        assert list(report.evaluations) == [3, 6, 8]
        losses.append(report.history["loss"])
    assert losses[1] == pytest.approx(losses[0], abs=1e-5)


def test_an_evaluation_that_a_lost_rank_cut_off_is_made_after_the_restart(
    checkpoint: Path, parquet: Path, rows: list[dict[str, Any]], tmp_path: Path
) -> None:
    """No save was made before it: the run begins anew."""
    flag = tmp_path / "flag"
    path = str(flag)

    def kills(output: Any) -> Any:
        import os
        import signal

        import torch.distributed as dist

        if dist.get_rank() == 1 and os.path.exists(path):
            os.unlink(path)
            os.kill(os.getpid(), signal.SIGKILL)
        return 1, 1

    told: list[FitStep] = []
    options: dict[str, Any] = {"metrics": {"one": kills}, "eval_every": 3, "callbacks": [told.append]}
    flag.write_text("")
    with make_group(checkpoint, max_restarts=1, optimizer=ADAMW) as group:
        report = fit(group, parquet, eval_data=rows[:HELD_OUT], **options)
    assert (report.num_restarts, report.num_steps) == (1, 8)
    assert list(report.evaluations) == [3, 6, 8]
    assert [step.num_steps for step in told] == [1, 2, *range(1, 9)]
    assert [step.num_steps for step in told if "eval_one" in step.metrics] == [3, 6, 8]


@pytest.mark.full
def test_they_survive_a_restart(checkpoint: Path, parquet: Path, rows: list[dict[str, Any]], tmp_path: Path) -> None:
    scored, saves = Scored(tmp_path / "score"), tmp_path / "saves"
    killer = Killer(9, 1)
    options = scored.options(keep_best="score", save_to=saves, keep_last=1, stop=EarlyStop("score", patience=4))
    options["callbacks"] = [scored, killer]
    with make_group(checkpoint, optimizer=ADAMW, max_restarts=1) as group:
        killer.group = group
        report = fit(group, parquet, eval_data=rows[:3], **options)
    assert report.num_restarts == 1
    assert (report.best.step, report.num_steps) == (6, 14)
    assert sorted(report.evaluations) == [2, 4, 6, 8, 10, 12, 14]
    assert sorted(path.name for path in saves.iterdir()) == ["step-14", "step-6"]


def test_a_callback_with_every_is_called_at_that_step(
    fresh: ShardedModelGroup, parquet: Path, rows: list[dict[str, Any]], tmp_path: Path
) -> None:
    class Saves:
        every = 4

        def __init__(self) -> None:
            self.steps: list[int] = []

        def __call__(self, step: FitStep) -> None:
            self.steps.append(step.num_steps)
            fresh.save(tmp_path / f"at-{step.num_steps}")

    saves = Saves()
    fit(fresh, parquet, max_steps=3)  # quick steps from now on
    report = fit(fresh, parquet, epochs=3, callbacks=[saves])
    assert saves.steps == [4, 8, 12, 16, 20, 24]
    assert report.num_steps == 24
    assert [position_in(tmp_path / f"at-{step}")["num_steps"] for step in saves.steps] == saves.steps


def test_where_nothing_can_be_saved_no_step_is_taken(fresh: ShardedModelGroup, parquet: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    told: list[FitStep] = []
    with pytest.raises(CheckpointError, match="file/saves: cannot be written to: Not a directory"):
        fit(fresh, parquet, save_to=tmp_path / "file" / "saves", callbacks=[told.append])
    assert told == []
    assert fresh.state is GroupState.READY
    fit(fresh, parquet, save_to=tmp_path / "saves", max_steps=1)
    assert [path.name for path in (tmp_path / "saves").iterdir()] == ["step-1"]


def test_what_cannot_be_evaluated_is_refused_first(
    fresh: ShardedModelGroup, parquet: Path, rows: list[dict[str, Any]], tmp_path: Path
) -> None:
    told: list[FitStep] = []
    with pytest.raises(DataError, match=r"absent\.parquet: is not there"):
        fit(fresh, parquet, eval_data=tmp_path / "absent.parquet", callbacks=[told.append])
    every: Any = told.append
    cases: tuple[tuple[dict[str, Any], str], ...] = (
        ({"eval_every": 2}, "eval_every=2, but nothing is evaluated: give eval_data="),
        ({"stop": EarlyStop("loss")}, "but nothing is evaluated"),
        ({"eval_data": rows, "eval_every": 0}, "eval_every=0"),
        ({"eval_data": rows, "keep_best": "loss"}, "give a directory, save_to="),
        ({"eval_data": rows, "keep_best": "wer", "save_to": tmp_path}, "keep_best='wer' is no metric .* has loss"),
        ({"eval_data": rows, "stop": EarlyStop("-wer")}, "stop='-wer' is no metric"),
        ({"callbacks": [type("Odd", (), {"every": 0, "__call__": every})()]}, "a callback has every=0"),
    )
    for options, said in cases:
        with pytest.raises(ValueError, match=said):
            fit(fresh, parquet, **options)
    assert told == []


def test_when_evaluations_end_a_run() -> None:
    for metric, values, patience, is_over in (
        ("loss", [3, 2, 2, 2], 2, True),
        ("loss", [3, 2, 2, 1], 2, False),
        ("accuracy", [0.1, 0.2, 0.1], 2, False),
        ("-wer", [0.3, 0.2, 0.4], 1, True),
        ("eval_loss", [3, None], 1, True),
        ("loss", [], 1, False),
    ):
        assert EarlyStop(metric, patience).is_over(values) is is_over, (metric, values)
    assert EarlyStop("loss", 1, min_delta=0.5).is_over([3, 2.6])
    for bad in ({"patience": 0}, {"min_delta": -1}, {"min_delta": math.nan}):
        with pytest.raises(ValueError, match="EarlyStop"):
            EarlyStop("loss", **bad)
