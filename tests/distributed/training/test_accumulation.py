"""Gradient accumulation equals one process on all rows at once, and reduces gradients once."""

from __future__ import annotations

import itertools
import math
import traceback
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from raysharding.config import Sharding
from raysharding.distributed.fully_shard.internals import fsdp_groups
from raysharding.distributed.fully_shard.recovery import is_recoverable
from raysharding.distributed.training.step import Accumulation, forward_backward, optim_step, train_step, zero_grad
from tests.distributed.training.test_training import Pair, batch_of, raise_in_loss
from tests.distributed.training.training_cases import CASES, Case, Scaled, token_mean
from tests.grid import needs_sim
from tests.spawn import run_ranks

Rows = dict[str, torch.Tensor]


def taken(rows: Rows, start: int, end: int) -> Rows:
    return {key: value[start:end] for key, value in rows.items()}


class AccumulatingPair(Pair):
    """As `Pair`, whose module takes the rows in parts, and whose twin takes all of them at once."""

    def in_parts(self, case: Case, rows: Rows, num_parts: int, max_grad_norm: float | None) -> None:
        """By `train_step`, which cuts the rows of each rank."""
        self.step(case, rows, max_grad_norm, num_parts)

    def in_calls(self, case: Case, rows: Rows, cuts: Sequence[int], max_grad_norm: float | None, sync: bool) -> None:
        """By a `forward_backward` for each piece of the rows."""
        done, losses = Accumulation(), []
        zero_grad(self.module, self.optimizer)
        for start, end in itertools.pairwise(cuts):
            batch, is_last = batch_of(taken(rows, start, end)), end == cuts[-1]
            losses.append(
                forward_backward(
                    self.module, batch, done, loss=case.loss, training=case.training, sync=is_last or sync
                )["loss"]
            )
        metrics = optim_step(self.module, self.optimizer, done, max_grad_norm=max_grad_norm)
        assert len(losses) == len(cuts) - 1
        self.agree(metrics, self.twin_step(case, rows, max_grad_norm))


def accumulate(names: Sequence[str], replicate_size: int) -> list[str]:
    failures = []
    for name in names:
        case = CASES[name]
        rows = case.rows()
        for optimizer, max_grad_norm, sync in (("sgd", 0.5, False), ("adamw", None, True)):
            try:
                pair = AccumulatingPair(case.build, optimizer, Sharding(replicate_size=replicate_size))
                pair.in_parts(case, rows, 2, max_grad_norm)
                pair.in_calls(case, rows, [0, 3, 4, 7], max_grad_norm, sync)
                pair.in_parts(case, rows, 5, max_grad_norm)
                pair.compare()
            except Exception:
                failures.append(f"{name}, {optimizer}:\n{traceback.format_exc()}")
    return failures


NAMES = ("llama", "t5", "bert_classifier", "token_mean", "sum_and_count", "row_mean")


@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    ("device", "world_size", "replicate_size"),
    [
        ("cpu", 2, 1),
        pytest.param("cpu", 3, 1, marks=pytest.mark.full),
        pytest.param("cpu", 4, 2, marks=pytest.mark.full),
        pytest.param("sim", 2, 1, marks=needs_sim),
        pytest.param("sim", 4, 2, marks=needs_sim),
    ],
)
def test_parts_and_calls_equal_one_process_on_all_rows(device: str, world_size: int, replicate_size: int) -> None:
    pytest.importorskip("transformers")
    names = NAMES if world_size < 4 else ("llama", "token_mean")
    outcomes = run_ranks(world_size, accumulate, names, replicate_size, timeout_s=150, device=device)
    for rank, failures in enumerate(outcomes):
        assert not failures, f"rank {rank}: {len(failures)} cases\n" + "\n".join(failures)


def half_masked() -> None:
    """Pieces in which nothing counts add nothing; where nothing counts at all, there is an error and no update."""
    case = CASES["token_mean"]
    rows = case.rows()
    rows["labels"][:4] = -100
    pair = AccumulatingPair(case.build, "sgd")
    pair.in_calls(case, rows, [0, 2, 4, 6, 7], None, sync=False)
    pair.compare()
    done = Accumulation()
    said = forward_backward(pair.module, batch_of(taken(rows, 0, 4)), done, loss=case.loss)
    assert math.isnan(said["loss"])
    with pytest.raises(ValueError, match="nothing counts in cross_entropy in any of the accumulated batches") as caught:
        optim_step(pair.module, pair.optimizer, done)
    assert is_recoverable(caught.value)
    pair.in_parts(case, case.rows(), 2, None)
    pair.compare()


def total(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return ((output.mean(dim=(1, 2)) - target) ** 2).sum()


def as_sum(output: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, None]:
    return total(output, target), None


def as_mean(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return ((output.mean(dim=(1, 2)) - target) ** 2).mean()


def sums_and_means() -> None:
    """Losses that are sums add up; those of two kinds do not mix."""
    case = Case(Scaled, CASES["row_mean"].rows, as_sum)
    pair = AccumulatingPair(Scaled, "sgd")
    pair.in_parts(case, case.rows(), 3, None)
    pair.in_calls(case, case.rows(), [0, 1, 7], 0.5, sync=True)
    pair.compare()
    done = Accumulation()
    forward_backward(pair.module, batch_of(case.rows()), done, loss=as_sum)
    with pytest.raises(ValueError, match="terms of this batch's loss are mean, those of the batches before it sum 0"):
        forward_backward(pair.module, batch_of(case.rows()), done, loss=as_mean)
    pair.in_parts(case, case.rows(), 1, None)
    pair.compare()


def give_up_and_go_on() -> None:
    """What was accumulated before an error, or before `zero_grad`, is in no later update."""
    case = CASES["token_mean"]
    rows = case.rows()
    pair = AccumulatingPair(case.build, "adamw")
    for sync in (True, False):
        done = Accumulation()
        forward_backward(pair.module, batch_of(rows), done, loss=case.loss, sync=sync)
        with pytest.raises(LookupError):
            forward_backward(pair.module, batch_of(rows), done, loss=raise_in_loss)
        pair.in_parts(case, rows, 2, 0.5)
        done = Accumulation()
        forward_backward(pair.module, batch_of(rows), done, loss=case.loss, sync=sync)
        zero_grad(pair.module, pair.optimizer)
        pair.in_calls(case, rows, [0, 4, 7], 0.5, sync=not sync)
    done = Accumulation()
    forward_backward(pair.module, batch_of(rows), done, loss=case.loss, sync=False)
    with pytest.raises(ValueError, match="last forward_backward before optim_step must have sync=True") as caught:
        optim_step(pair.module, pair.optimizer, done)
    assert is_recoverable(caught.value)
    pair.in_parts(case, rows, 3, None)
    pair.compare()


class Reductions(TorchDispatchMode):
    """Counts the reduce-scatters of this thread and of backward's."""

    num = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num += "reduce_scatter" in str(func)
        return func(*args, **(kwargs or {}))


def count_reductions() -> list[int]:
    """Reduce-scatters of gradients in a step of four parts, of four calls that reduce each time, and of one part."""
    case = CASES["token_mean"]
    rows, counts = case.rows(), []
    pair = AccumulatingPair(case.build, "sgd")
    pair.in_parts(case, rows, 1, None)  # the first step also asks what the loss does
    for run in (
        lambda: pair.in_parts(case, rows, 4, None),
        lambda: pair.in_calls(case, rows, [0, 2, 4, 6, 7], None, sync=True),
        lambda: pair.in_parts(case, rows, 1, None),
    ):
        with Reductions() as seen:  # type: ignore[no-untyped-call]
            run()  # type: ignore[no-untyped-call]
        counts.append(seen.num)
    return [*counts, len(fsdp_groups(pair.module))]


def test_gradients_are_reduced_once() -> None:
    for parts, calls, one, num_groups in run_ranks(2, count_reductions):
        assert parts == one == num_groups
        assert calls == 4 * num_groups


def refusals() -> None:
    case = CASES["token_mean"]
    pair = AccumulatingPair(case.build, "sgd")
    batch = batch_of(case.rows())
    with pytest.raises(ValueError, match="gradient_accumulation_steps=0: give 1 or more"):
        train_step(pair.module, pair.optimizer, batch, loss=token_mean, gradient_accumulation_steps=0)
    with pytest.raises(ValueError, match="this call has no Split"):
        train_step(pair.module, pair.optimizer, type(batch)(batch.args, batch.kwargs), gradient_accumulation_steps=2)
    pair.in_parts(case, case.rows(), 100, None)  # more parts than rows: as many as there are rows
    pair.compare()


@pytest.mark.parametrize("job", [half_masked, sums_and_means, give_up_and_go_on, refusals])
def test_what_goes_wrong_leaves_no_trace(job: object) -> None:
    run_ranks(2, job)  # type: ignore[arg-type]
