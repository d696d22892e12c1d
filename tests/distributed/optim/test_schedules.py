"""Learning-rate schedules: the rates, losses and weights of one process, through saves and at another world size."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import lr_scheduler
from transformers import get_cosine_schedule_with_warmup

from raysharding import ParamGroups, Scheduled
from raysharding.config import Sharding
from raysharding.distributed import load_checkpoint, load_optimizer_state, save_checkpoint
from raysharding.distributed.comm.device_mesh import init_mesh
from raysharding.distributed.fully_shard.recovery import is_recoverable, is_torn
from raysharding.distributed.fully_shard.shard import shard_module
from raysharding.distributed.optim.factories import attach_schedule, bound, make_optimizer, schedule_of, step_schedule
from raysharding.distributed.training.step import Accumulation, optim_step, train_step
from raysharding.errors import PlanError
from tests.distributed.checks import on_ranks
from tests.distributed.training.test_training import Pair, batch_of, each, full
from tests.distributed.training.training_cases import CASES
from tests.spawn import device_type, run_ranks

ADAM = partial(torch.optim.AdamW, lr=1e-2, eps=1e-5)


def warm_up_then_fall(optimizer: torch.optim.Optimizer) -> lr_scheduler.LRScheduler:
    parts: list[Any] = [
        lr_scheduler.LinearLR(optimizer, 0.1, total_iters=3),
        lr_scheduler.MultiStepLR(optimizer, [1, 1, 3], gamma=0.5),
    ]
    return lr_scheduler.SequentialLR(optimizer, parts, milestones=[3])


SCHEDULES: dict[str, Any] = {
    "cosine": partial(lr_scheduler.CosineAnnealingLR, T_max=5),
    "warm-up": warm_up_then_fall,
    "multi-step": partial(lr_scheduler.MultiStepLR, milestones=[1, 2, 2, 4]),
    "plateau": partial(lr_scheduler.ReduceLROnPlateau, patience=0, threshold=0.5),
    "one cycle": partial(lr_scheduler.OneCycleLR, max_lr=0.1, total_steps=20),
    "lambda": partial(lr_scheduler.LambdaLR, lr_lambda=lambda step: 1 / (1 + step)),
}


class ScheduledPair(Pair):
    def __init__(self, kind: str) -> None:
        super().__init__(CASES["token_mean"].build, "adamw")
        self.kind = kind
        self.optimizer = make_optimizer(self.module, Scheduled(ADAM, SCHEDULES[kind]))
        self.twin_optimizer = ADAM(self.twin.parameters())
        self.twin_schedule = SCHEDULES[kind](self.twin_optimizer)

    def both(self, rows: dict[str, torch.Tensor]) -> dict[str, float]:
        case = CASES["token_mean"]
        rate = self.twin_optimizer.param_groups[0]["lr"]
        loss, _ = self.twin_step(case, rows, None)
        self.twin_schedule.step(*([loss] if self.kind == "plateau" else []))
        said = train_step(self.module, self.optimizer, batch_of(rows), loss=case.loss)
        assert said["lr"] == pytest.approx(rate, rel=1e-6)
        assert said["loss"] == pytest.approx(loss, abs=1e-5)
        return said


def train(kind: str, path: Path) -> None:
    """Steps, a save, and steps after it, in the same module and in a new one that loads the save."""
    pair, rows = ScheduledPair(kind), CASES["token_mean"].rows()
    for _ in range(3):
        pair.both(rows)
    save_checkpoint(pair.module, path, optimizer=pair.optimizer)
    after = [pair.both(rows) for _ in range(4)]
    assert len({step["lr"] for step in after}) > 1, "the rate moves"
    pair.compare()
    assert resumed(kind, path, 4) == after


def resumed(kind: str, path: Path, num_steps: int) -> list[dict[str, float]]:
    module, case = sharded(), CASES["token_mean"]
    load_checkpoint(module, path)
    optimizer = make_optimizer(module, Scheduled(bound(ADAM, {"lr": 5.0}), SCHEDULES[kind]))
    load_optimizer_state(module, optimizer, path)
    return [train_step(module, optimizer, batch_of(case.rows()), loss=case.loss) for _ in range(num_steps)]


def train_all(folder: Path) -> list[dict[str, float]]:
    """Each schedule; return the steps after a save once more."""
    each(train, [(kind, folder / kind) for kind in SCHEDULES])
    return resumed("warm-up", folder / "warm-up", 4)


@pytest.mark.timeout(180)
def test_rates_and_losses_equal_one_process_and_go_on_after_a_save(tmp_path: Path) -> None:
    two, *others = run_ranks(2, train_all, tmp_path, timeout_s=150)
    three, *more = run_ranks(3, resumed, "warm-up", tmp_path / "warm-up", 4)
    assert (others, more) == ([two], [three, three])
    assert three == [pytest.approx(step, rel=1e-4) for step in two]


@on_ranks(2)
def test_another_schedule_than_the_saved_one_is_refused(root: Path) -> None:
    pair = ScheduledPair("cosine")
    rows = CASES["token_mean"].rows()
    pair.both(rows)
    save_checkpoint(pair.module, root / "saved", optimizer=pair.optimizer)
    for factory in (ADAM, Scheduled(ADAM, SCHEDULES["multi-step"])):
        optimizer = make_optimizer(pair.module, factory)
        with pytest.raises(PlanError, match="the schedule CosineAnnealingLR was saved, the optimizer has"):
            load_optimizer_state(pair.module, optimizer, root / "saved")
    plain = make_optimizer(pair.module, ADAM)
    save_checkpoint(pair.module, root / "plain", optimizer=plain)
    scheduled = make_optimizer(pair.module, Scheduled(ADAM, SCHEDULES["cosine"]))
    load_optimizer_state(pair.module, scheduled, root / "plain")  # a schedule may begin where there was none


def test_parts_go_together() -> None:
    module = nn.Linear(2, 2)
    factory = bound(Scheduled(ParamGroups(ADAM, {"bias": {"lr": 3.0}}), SCHEDULES["cosine"]), {"lr": 2.0})
    optimizer = factory(list(module.named_parameters()))
    assert [group["lr"] for group in optimizer.param_groups] == [3.0, 2.0]
    first = schedule_of(optimizer)
    assert isinstance(first, lr_scheduler.CosineAnnealingLR)
    attach_schedule(optimizer, SCHEDULES["multi-step"])
    assert isinstance(schedule_of(optimizer), lr_scheduler.MultiStepLR)
    assert schedule_of(ADAM(module.parameters())) is None
    with pytest.raises(ValueError, match=r"give a class of torch\.optim\.lr_scheduler"):
        Scheduled(ADAM, first)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="the schedule's factory returned a int"):
        attach_schedule(optimizer, lambda optimizer: 3)  # type: ignore[arg-type, return-value]


def warm_and_cosine(steps: int) -> Any:
    def schedule(optimizer: torch.optim.Optimizer) -> lr_scheduler.LRScheduler:
        parts: list[Any] = [
            lr_scheduler.LinearLR(optimizer, 0.1, total_iters=3),
            lr_scheduler.CosineAnnealingLR(optimizer, T_max=steps - 3),
        ]
        return lr_scheduler.SequentialLR(optimizer, parts, milestones=[3])

    return schedule


def chained(steps: int) -> Any:
    def schedule(optimizer: torch.optim.Optimizer) -> lr_scheduler.LRScheduler:
        return lr_scheduler.ChainedScheduler(
            [lr_scheduler.ConstantLR(optimizer), lr_scheduler.PolynomialLR(optimizer, total_iters=steps)]
        )

    return schedule


HORIZONS: dict[str, Callable[[int], Any]] = {
    "cosine": lambda steps: partial(lr_scheduler.CosineAnnealingLR, T_max=steps),
    "transformers": lambda steps: partial(
        get_cosine_schedule_with_warmup, num_warmup_steps=2, num_training_steps=steps
    ),
    "lambda": lambda steps: partial(lr_scheduler.LambdaLR, lr_lambda=lambda step: max(0.0, 1 - step / steps)),
    "one cycle": lambda steps: partial(lr_scheduler.OneCycleLR, max_lr=0.1, total_steps=steps),
    "warm-up": warm_and_cosine,
    "chained": chained,
}


def take(optimizer: torch.optim.Optimizer, num_steps: int) -> list[float]:
    rates = []
    for _ in range(num_steps):
        optimizer.step()
        rates.append(step_schedule(optimizer, None)["lr"])
    return rates


def sharded() -> nn.Module:
    return shard_module(CASES["token_mean"].build(), init_mesh(device_type(), Sharding()), Sharding())


@on_ranks(1)
def test_a_run_that_is_lengthened_has_the_rates_of_the_longer_schedule(root: Path) -> None:
    """By `attach_schedule`, 10 steps and then 20; a load into the longer schedule has them, too, or warns."""
    said = {}
    for kind, schedule in HORIZONS.items():
        module, path = sharded(), root / kind
        expected = take(make_optimizer(module, Scheduled(ADAM, schedule(20))), 20)
        optimizer = make_optimizer(module, Scheduled(ADAM, schedule(10)))
        assert take(optimizer, 9) != expected[:9]
        take(optimizer, 1)
        save_checkpoint(module, path, optimizer=optimizer)
        for factory in (ADAM, bound(ADAM, {"lr": 3.0})):  # another `lr=` changes nothing
            loaded = make_optimizer(module, Scheduled(factory, schedule(10)))
            load_optimizer_state(module, loaded, path)
            assert attach_schedule(loaded, schedule(20)) == ("continues at step 11", "")
            found = take(loaded, 10)
            assert found == expected[10:], (kind, found, expected[10:])
        given = make_optimizer(module, Scheduled(ADAM, schedule(20)))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            load_optimizer_state(module, given, path)
        said[kind] = [str(one.message) for one in caught if "schedule" in str(one.message)]
        if not said[kind]:
            assert take(given, 10) == expected[10:], f"{kind}: silent"
    assert {kind for kind, lines in said.items() if not lines} == {"transformers", "lambda"}
    [line] = said["cosine"]
    assert "T_max is 10 in the save, 20 was given" in line
    assert "group.set_scheduler" in line
    assert "total_steps is 10 in the save, 20 was given" in said["one cycle"][0]


def test_a_schedule_that_cannot_continue_leaves_the_earlier_one() -> None:
    module = nn.Linear(2, 2)
    optimizer = Scheduled(ADAM, HORIZONS["cosine"](10))(list(module.named_parameters()))
    schedule = schedule_of(optimizer)
    for _ in range(6):
        optimizer.step()
        step_schedule(optimizer, None)
    before = [dict(group) for group in optimizer.param_groups]
    with pytest.raises(ValueError, match="Tried to step 6 times"):
        attach_schedule(optimizer, HORIZONS["one cycle"](5))
    assert schedule_of(optimizer) is schedule
    assert optimizer.param_groups == before
    rate = f"{before[0]['lr']:g}"
    assert attach_schedule(optimizer, SCHEDULES["plateau"]) == (
        f"begins with the current rate, {rate}, and no earlier loss",
        "",
    )
    assert optimizer.param_groups[0]["lr"] == before[0]["lr"], "a plateau goes on from the rate that is"


ONE_CYCLE = partial(lr_scheduler.OneCycleLR, max_lr=0.1, total_steps=20)
CYCLIC = partial(lr_scheduler.CyclicLR, base_lr=0.002, max_lr=0.1)


def after_warm_up(schedule: Any) -> Any:
    def made(optimizer: torch.optim.Optimizer) -> lr_scheduler.LRScheduler:
        return lr_scheduler.SequentialLR(optimizer, [lr_scheduler.LinearLR(optimizer), schedule(optimizer)], [2])

    return made


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        (
            ONE_CYCLE,
            SCHEDULES["cosine"],
            r"CosineAnnealingLR takes lr=0.004, betas=\(0.8\d*, 0.999\), which OneCycleLR",
        ),
        (CYCLIC, SCHEDULES["cosine"], r"CosineAnnealingLR takes lr=0.002, betas=\(0.8\d*, 0.999\), which CyclicLR"),
        (after_warm_up(ONE_CYCLE), SCHEDULES["lambda"], r"LambdaLR takes lr=0.004, betas=.* which OneCycleLR"),
        (partial(ONE_CYCLE, cycle_momentum=False), SCHEDULES["cosine"], r"CosineAnnealingLR takes lr=0.004, which One"),
        (ONE_CYCLE, partial(ONE_CYCLE, cycle_momentum=False), r"OneCycleLR takes lr=.*, betas=.* which OneCycleLR"),
        (SCHEDULES["plateau"], SCHEDULES["cosine"], r"CosineAnnealingLR takes lr=0.0001, which ReduceLROnPlateau"),
        (ONE_CYCLE, partial(ONE_CYCLE, total_steps=30), None),
        (partial(ONE_CYCLE, cycle_momentum=False), partial(CYCLIC, cycle_momentum=False), None),
        (SCHEDULES["plateau"], ONE_CYCLE, None),
        (SCHEDULES["cosine"], SCHEDULES["plateau"], None),
    ],
)
def test_what_a_replaced_schedule_wrote_over_is_told(old: Any, new: Any, said: str | None) -> None:
    """Such schedules write the rate or momentum of the beginning into the param groups; a new optimizer has its own."""
    optimizer = Scheduled(ADAM, old)(list(nn.Linear(2, 2).named_parameters()))
    for _ in range(3):
        optimizer.step()
        step_schedule(optimizer, 1.0)
    told = attach_schedule(optimizer, new)[1]
    assert told == "" if said is None else re.match(said, told), told


@on_ranks(2)
def test_a_rate_that_a_load_drops_is_told(root: Path) -> None:
    module = sharded()
    save_checkpoint(module, root / "rate", optimizer=make_optimizer(module, ADAM))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for factory in (ADAM, bound(ADAM, {"lr": 3.0})):
            load_optimizer_state(module, make_optimizer(module, factory), root / "rate")
    assert len(caught) == (dist.get_rank() == 0), "rank 0 alone warns"
    assert all("lr is 0.01 in the save, 3.0 was given" in str(one.message) for one in caught)


@on_ranks(2)
def test_a_schedule_that_lacks_a_loss_is_refused_before_the_update() -> None:
    pair = ScheduledPair("plateau")
    before = [full(one).clone() for one in pair.module.parameters()]
    for one in pair.module.parameters():
        one.grad = torch.ones_like(one)
    with pytest.raises(ValueError, match="ReduceLROnPlateau looks at the loss") as caught:
        optim_step(pair.module, pair.optimizer, Accumulation())
    assert is_recoverable(caught.value)
    assert not is_torn(caught.value)
    assert all(torch.equal(full(one), old) for one, old in zip(pair.module.parameters(), before, strict=True))


@on_ranks(2)
def test_a_rate_that_was_reduced_is_no_other_rate(root: Path) -> None:
    pair, rows = ScheduledPair("plateau"), CASES["token_mean"].rows()
    for _ in range(4):
        pair.both(rows)
    assert pair.optimizer.param_groups[0]["lr"] < 0.01, "or no rate was reduced"
    save_checkpoint(pair.module, root / "reduced", optimizer=pair.optimizer)
    fresh = ScheduledPair("plateau")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        load_optimizer_state(fresh.module, fresh.optimizer, root / "reduced")
    assert not [str(one.message) for one in caught if "goes on as saved" in str(one.message)]
