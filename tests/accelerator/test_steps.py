"""What the host waits for and launches in a training step on an accelerator; see Note [Waits] in `training/step.py`."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from raysharding.batch import Split, deal
from raysharding.config import Sharding
from raysharding.data import SequenceRows
from raysharding.distributed import init_mesh, shard_module, train_step
from raysharding.distributed.comm.abort import connections, shut_down
from raysharding.distributed.fully_shard import is_torn, local_tensor
from raysharding.distributed.training import DataPlan, Fit, FitPlan
from raysharding.errors import EmptyBatchError
from tests.accelerator.build import load_extension
from tests.accelerator.device import sim
from tests.accelerator.fault_checks import lost_in_backward
from tests.spawn import run_ranks

WIDTH, ROWS = 16, 8
SMALL_LAUNCHES = 80
"""Launches of a step more than FSDP2's by hand, whatever the number of layers: the loss over all ranks, the norm."""


def blocks(num_blocks: int) -> nn.Module:
    """A model whose blocks are FSDP groups."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(num_blocks)))


def square(output: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Sum and count of the squares where targets are not NaN."""
    counted = targets.isfinite()
    return ((output - targets.nan_to_num()).square() * counted).sum(), counted.sum()


def sharded(module: nn.Module) -> nn.Module:
    """Cut a module over the ranks' devices."""
    sharding = Sharding(wrap=["Sequential"]) if isinstance(module, nn.Sequential) else Sharding()
    return shard_module(module.to("sim"), init_mesh("sim", sharding), sharding)


def rows(targets: torch.Tensor | None = None) -> Any:
    """This rank's rows, in pageable memory."""
    values = torch.linspace(-1, 1, ROWS * WIDTH).view(ROWS, WIDTH)
    batch = {"input": Split(values), "targets": Split(values.flip(0) if targets is None else targets)}
    return deal((), batch, dist.get_world_size())[dist.get_rank()]


def counts_of(call: Callable[[], object]) -> dict[str, int]:
    """Return what the host has waited for and launched in a call, after two others."""
    for _ in range(2):
        call()
    sim().synchronize()
    before = load_extension().counts()
    call()
    return {name: number - before[name] for name, number in load_extension().counts().items()}


def counts_of_a_step(num_blocks: int) -> dict[str, int]:
    """Those of `train_step`."""
    module = sharded(blocks(num_blocks))
    optimizer = torch.optim.AdamW(module.parameters(), fused=True)
    return counts_of(lambda: train_step(module, optimizer, rows(), loss=square, max_grad_norm=1.0))


def counts_by_hand(num_blocks: int) -> dict[str, int]:
    """Those of the same step by hand with FSDP2."""
    module, mesh = blocks(num_blocks).to("sim"), init_mesh("sim")
    for block in module.children():
        fully_shard(block, mesh=mesh)
    fully_shard(module, mesh=mesh)
    optimizer = torch.optim.AdamW(module.parameters(), fused=True)
    kwargs = {name: value.pin_memory() for name, value in rows().kwargs.items()}

    def step() -> None:
        optimizer.zero_grad()
        batch = {name: value.to("sim", non_blocking=True) for name, value in kwargs.items()}
        total, count = square(module(batch["input"]), batch["targets"])
        (total / count).backward()
        nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()

    return counts_of(step)


def counts_on_ranks() -> dict[str, Any]:
    """All counts of a rank: a process group costs more than they do."""
    kinds = (("ours", counts_of_a_step), ("by hand", counts_by_hand))
    found: dict[str, Any] = {f"{name} {number}": counts(number) for name, counts in kinds for number in (2, 6)}
    if dist.get_world_size() > 1:
        found |= {"others": counts_of_other_steps(), "fit": counts_in_a_fit(), "skips": weights_after_skips()}
    return found


Counted = dict[int, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def counted() -> Counted:
    """World size → counts of each rank."""
    return {size: run_ranks(size, counts_on_ranks, device="sim") for size in (1, 2)}


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_step_leaves_the_queue_full_where_the_host_waits(world_size: int, counted: Counted) -> None:
    """Two waits, for the numbers of the loss and for the norm: behind the first the backward is queued, behind the
    second the update. More layers add no more launches than with FSDP2 by hand.
    """
    names = ("ours 2", "ours 6", "by hand 2", "by hand 6")
    ours, more, hand, more_by_hand = (counted[world_size][0][name] for name in names)
    for counts in (ours, more):
        assert (counts["waits"], counts["drains"]) == (2, 0), counts
    assert more["launches"] - ours["launches"] <= more_by_hand["launches"] - hand["launches"], (ours, more)
    assert 0 < ours["launches"] - hand["launches"] < SMALL_LAUNCHES, (ours, hand)


class WithScale(nn.Module):
    """A parameter of no dims is not sharded, and its gradient is averaged. Positions are an expanded tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = blocks(2)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, input: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return self.blocks(input + positions) * self.scale


def counts_of_other_steps() -> list[dict[str, int]]:
    """Those of a step in four parts, and of one with a replicated parameter."""
    module = sharded(blocks(2))
    optimizer = torch.optim.AdamW(module.parameters(), fused=True)
    parts = counts_of(lambda: train_step(module, optimizer, rows(), loss=square, gradient_accumulation_steps=4))
    scaled = sharded(WithScale())
    another = torch.optim.AdamW(scaled.parameters(), fused=True)
    batch = {**rows().kwargs, "positions": torch.arange(WIDTH).expand(len(rows().kwargs["input"]), -1)}
    return [parts, counts_of(lambda: train_step(scaled, another, batch, loss=square))]


def test_parts_and_replicated_parameters_add_no_wait_that_drains(counted: Counted) -> None:
    """A wait for the numbers of each part, behind which its backward is queued."""
    parts, scaled = counted[2][0]["others"]
    assert (parts["waits"], parts["drains"]) == (5, 0), parts
    assert (scaled["waits"], scaled["drains"]) == (2, 0), scaled


class Rows:
    """Rows for a run."""

    def __init__(self, targets: torch.Tensor) -> None:
        self.targets = targets

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input": self.input(index), "targets": self.targets[index]}

    @staticmethod
    def input(index: int) -> torch.Tensor:
        """The input of a row."""
        return torch.linspace(-1, 1, WIDTH) * (index + 1)


def fit_of(targets: torch.Tensor) -> Fit:
    """A run of a batch a step."""
    plan = DataPlan(SequenceRows(Rows(targets)), ROWS)
    return Fit(FitPlan(plan, loss=square, max_grad_norm=1.0), torch.device("sim", dist.get_rank()))


def counts_in_a_fit() -> list[dict[str, int]]:
    """Those of each step of a run, and what is known of the gradient norms after each."""
    module = sharded(blocks(2))
    optimizer, found, taken = torch.optim.AdamW(module.parameters()), [], []
    run = fit_of(torch.randn(5 * ROWS, WIDTH, generator=torch.Generator().manual_seed(1)))
    for _ in range(5):
        before = load_extension().counts()
        step: Any = run.step(module, optimizer)
        taken.append(step.metrics)
        found.append({name: number - before[name] for name, number in load_extension().counts().items()})
        norms = [metrics["grad_norm"] for metrics in taken]
        assert all(norm > 0 for norm in norms[:-1])
        assert math.isnan(norms[-1])
    assert run.step(module, optimizer) is None
    assert taken[-1]["grad_norm"] > 0
    return found


def test_a_run_reads_the_norm_of_a_step_when_the_next_is_queued(counted: Counted) -> None:
    for counts in counted[2][0]["fit"][2:]:
        assert (counts["waits"], counts["drains"]) == (2, 0), counts


def make_targets() -> torch.Tensor:
    """Four batches, of which the second and the last have nothing that counts."""
    targets = torch.randn(4 * ROWS, WIDTH, generator=torch.Generator().manual_seed(1))
    targets[ROWS : 2 * ROWS] = targets[3 * ROWS :] = math.nan
    return targets


def weights_after_skips() -> list[torch.Tensor]:
    """The weights after a run over them, and a step that raises."""
    module = sharded(blocks(2))
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
    run = fit_of(make_targets())
    assert [bool(step and step.skipped) for step in (run.step(module, optimizer) for _ in range(4))] == [0, 1, 0, 1]
    run.settle()
    with pytest.raises(EmptyBatchError):
        train_step(module, optimizer, rows(torch.full((ROWS, WIDTH), math.nan)), loss=square)
    return [local_tensor(parameter).cpu() for parameter in module.parameters()]


def test_a_batch_that_is_skipped_leaves_no_update_queued(counted: Counted) -> None:
    module, targets = blocks(2), make_targets()
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
    for first in (0, 2 * ROWS):
        indices = range(first, first + ROWS)
        optimizer.zero_grad()
        total, count = square(module(torch.stack([Rows.input(index) for index in indices])), targets[indices])
        (total / count).backward()
        nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
    found = [one["skips"] for one in counted[2]]
    for index, expected in enumerate(module.parameters()):
        torch.testing.assert_close(torch.cat([shards[index] for shards in found]), expected.detach())


def lost_square(output: torch.Tensor, targets: torch.Tensor) -> Any:
    """As `square`; rank 1 raises in the backward."""
    return square(lost_in_backward(output, "raises"), targets)


def state_after_a_lost_rank() -> tuple[bool, bool, bool]:
    """Return whether the update was queued, the error says that the weights are torn, and they have changed."""
    module = sharded(blocks(2))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    train_step(module, optimizer, rows(), loss=square)
    before = [local_tensor(parameter).cpu() for parameter in module.parameters()]
    queued: list[bool] = []
    optimizer.register_step_post_hook(lambda *_: queued.append(True))
    with pytest.raises(RuntimeError) as caught:
        train_step(module, optimizer, rows(), loss=lost_square)
    if dist.get_rank() == 1:
        shut_down(connections())  # as its death does, so that the other rank's collective ends
    for _ in range(8):  # each of the streams raises its error once
        with suppress(dist.DistBackendError):
            sim().synchronize()
    after = [local_tensor(parameter).cpu() for parameter in module.parameters()]
    return bool(queued), is_torn(caught.value), not all(map(torch.equal, before, after))


def test_a_rank_that_is_lost_in_the_backward_leaves_weights_that_are_not_used() -> None:
    """The other rank's update is queued behind a reduction that ends by an abort, and runs: its error says so."""
    assert run_ranks(2, state_after_a_lost_rank, device="sim") == [(True, True, True), (False, False, False)]
