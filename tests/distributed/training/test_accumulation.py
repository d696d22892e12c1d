"""Gradient accumulation equals one process on all rows at once, and reduces gradients once."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from raysharding.config import Sharding
from raysharding.distributed.fully_shard.internals import fsdp_groups
from raysharding.distributed.fully_shard.recovery import is_recoverable
from raysharding.distributed.training.step import Accumulation, forward_backward, optim_step, train_step, zero_grad
from tests.distributed.checks import on_ranks
from tests.distributed.training.test_training import MAIN, Pair, each, raise_in_loss
from tests.distributed.training.training_cases import CASES, Case, Scaled, batch_of, part_of, row_mean, token_mean


def accumulate(name: str, optimizer: str, max_grad_norm: float | None, sync: bool, sharding: Sharding) -> None:
    case = CASES[name]
    pair, rows = Pair(case.build, optimizer, sharding), case.rows()
    pair.step(case, rows, max_grad_norm, 2)
    pair.in_calls(case, rows, [0, 3, 4, 7], max_grad_norm, sync)
    pair.step(case, rows, max_grad_norm, 5)
    pair.compare()


@on_ranks(2, full=(3, 4), sim=(2, 4))
def test_parts_and_calls_equal_one_process_on_all_rows(replicate_size: int) -> None:
    names = MAIN if dist.get_world_size() < 4 else ("llama", "token_mean")
    sharding = Sharding(replicate_size=replicate_size)
    kinds = (("sgd", 0.5, False), ("adamw", None, True))
    each(accumulate, [(name, *kind, sharding) for name in names for kind in kinds])


@on_ranks(2)
def test_parts_in_which_nothing_counts_add_nothing() -> None:
    """Pieces in which nothing counts add nothing; where nothing counts at all, there is an error and no update."""
    case = CASES["token_mean"]
    rows = case.rows()
    rows["labels"][:4] = -100
    pair = Pair(case.build, "sgd")
    pair.in_calls(case, rows, [0, 2, 4, 6, 7])
    pair.compare()
    done = Accumulation()
    said = forward_backward(pair.module, batch_of(part_of(rows, 0, 4)), done, loss=case.loss)
    assert math.isnan(said["loss"])
    with pytest.raises(ValueError, match="nothing counts in cross_entropy in any of the accumulated batches") as caught:
        optim_step(pair.module, pair.optimizer, done)
    assert is_recoverable(caught.value)
    pair.step(case, case.rows(), None, 2)
    pair.compare()


def as_sum(output: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, None]:
    return ((output.mean(dim=(1, 2)) - target) ** 2).sum(), None


@on_ranks(2)
def test_sums_add_up_and_do_not_mix_with_means() -> None:
    case = Case(Scaled, CASES["row_mean"].rows, as_sum)
    pair = Pair(Scaled, "sgd")
    pair.step(case, case.rows(), None, 3)
    pair.in_calls(case, case.rows(), [0, 1, 7], 0.5, sync=True)
    pair.compare()
    done = Accumulation()
    forward_backward(pair.module, batch_of(case.rows()), done, loss=as_sum)
    with pytest.raises(ValueError, match="terms of this batch's loss are mean, those of the batches before it sum 0"):
        forward_backward(pair.module, batch_of(case.rows()), done, loss=row_mean)
    pair.step(case, case.rows())
    pair.compare()


@on_ranks(2)
def test_what_is_given_up_is_in_no_later_update() -> None:
    """What was accumulated before an error, or before `zero_grad`, is in no later update."""
    case = CASES["token_mean"]
    rows = case.rows()
    pair = Pair(case.build, "adamw")
    for sync in (True, False):
        done = Accumulation()
        forward_backward(pair.module, batch_of(rows), done, loss=case.loss, sync=sync)
        with pytest.raises(LookupError):
            forward_backward(pair.module, batch_of(rows), done, loss=raise_in_loss)
        pair.step(case, rows, 0.5, 2)
        done = Accumulation()
        forward_backward(pair.module, batch_of(rows), done, loss=case.loss, sync=sync)
        zero_grad(pair.module, pair.optimizer)
        pair.in_calls(case, rows, [0, 4, 7], 0.5, sync=not sync)
    done = Accumulation()
    forward_backward(pair.module, batch_of(rows), done, loss=case.loss, sync=False)
    with pytest.raises(ValueError, match="last forward_backward before optim_step must have sync=True") as caught:
        optim_step(pair.module, pair.optimizer, done)
    assert is_recoverable(caught.value)
    pair.step(case, rows, None, 3)
    pair.compare()


class Reductions(TorchDispatchMode):
    """Counts the reduce-scatters of this thread and of backward's."""

    num = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num += "reduce_scatter" in str(func)
        return func(*args, **(kwargs or {}))


@on_ranks(2)
def test_gradients_are_reduced_once() -> None:
    """In a step of four parts, as in one of one part; each of four calls that are told to reduces them."""
    case = CASES["token_mean"]
    rows, counts = case.rows(), []
    pair = Pair(case.build, "sgd")
    pair.step(case, rows)  # the first step also asks what the loss does
    for run in (
        lambda: pair.step(case, rows, None, 4),
        lambda: pair.in_calls(case, rows, [0, 2, 4, 6, 7], sync=True),
        lambda: pair.step(case, rows),
    ):
        with Reductions() as seen:  # type: ignore[no-untyped-call]
            run()  # type: ignore[no-untyped-call]
        counts.append(seen.num)
    num_groups = len(fsdp_groups(pair.module))
    assert counts == [num_groups, 4 * num_groups, num_groups]


@on_ranks(2)
def test_steps_in_no_parts_are_refused() -> None:
    case = CASES["token_mean"]
    pair = Pair(case.build, "sgd")
    batch = batch_of(case.rows())
    with pytest.raises(ValueError, match="gradient_accumulation_steps=0: give 1 or more"):
        train_step(pair.module, pair.optimizer, batch, loss=token_mean, gradient_accumulation_steps=0)
    with pytest.raises(ValueError, match="this call has no Split"):
        train_step(pair.module, pair.optimizer, type(batch)(batch.args, batch.kwargs), gradient_accumulation_steps=2)
    pair.step(case, case.rows(), None, 100)  # more parts than rows: as many as there are rows
    pair.compare()
