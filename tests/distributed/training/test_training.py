"""`train_step` equals one process: loss, gradient norm and every parameter, for W = 1 to 4, also after failures."""

from __future__ import annotations

import copy
import itertools
import math
import traceback
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from raysharding.batch import RankBatch, deal
from raysharding.config import Sharding
from raysharding.distributed.comm.device_mesh import init_mesh
from raysharding.distributed.fully_shard.internals import reshard
from raysharding.distributed.fully_shard.recovery import is_recoverable, recover_after
from raysharding.distributed.fully_shard.shard import shard_module
from raysharding.distributed.training.step import Accumulation, forward_backward, optim_step, train_step, zero_grad
from tests.distributed.checks import on_ranks
from tests.distributed.training.training_cases import CASES, Case, Rows, Scaled, batch_of, part_of, token_mean
from tests.spawn import device_type

pytest.importorskip("transformers")

TOLERANCE = 1e-5

MAIN = ("llama", "t5", "bert_classifier", "token_mean", "sum_and_count", "row_mean")
"""Cases that also run with AdamW, on fewer rows than ranks, and in parts."""

Optimizers = dict[str, Callable[[Any], torch.optim.Optimizer]]
OPTIMIZERS: Optimizers = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, eps=1e-5),
}


def full(parameter: torch.Tensor) -> torch.Tensor:
    return (parameter.full_tensor() if isinstance(parameter, DTensor) else parameter.detach()).cpu()


def each(check: Callable[..., object], cases: Iterable[tuple[Any, ...]]) -> None:
    """Check all cases, also behind one that fails; then raise what was found of each."""
    failures = []
    for case in cases:
        try:
            check(*case)
        except (Exception, pytest.fail.Exception):
            failures.append(f"{case}:\n{traceback.format_exc()}")
    assert not failures, f"{len(failures)} cases\n" + "\n".join(failures)


class Pair:
    """A module and its one-process twin, with an optimizer each.

    Args:
        build: Makes the model.
        optimizer: One of `OPTIMIZERS`, or what makes one of parameters.
        sharding: Default: over all ranks.
        is_sharded: False for a plain module on every rank.
    """

    tolerance = TOLERANCE

    def __init__(
        self, build: Callable[[], nn.Module], optimizer: Any, sharding: Sharding | None = None, is_sharded: bool = True
    ) -> None:
        torch.manual_seed(0)
        self.twin = build()
        self.module = copy.deepcopy(self.twin)
        sharding = sharding or Sharding()
        if is_sharded:
            self.module = shard_module(self.module, init_mesh(device_type(), sharding), sharding)
        make = OPTIMIZERS.get(optimizer, optimizer)
        self.optimizer = make(self.module.parameters())
        self.twin_optimizer = make(self.twin.parameters())

    def step(
        self,
        case: Case,
        rows: Rows,
        max_grad_norm: float | None = None,
        num_parts: int = 1,
        batch: RankBatch | None = None,
    ) -> None:
        """A step of both on all rows, of which a rank has `batch`; default: by `Split`."""
        metrics = train_step(
            self.module,
            self.optimizer,
            batch or batch_of(rows, case.dim, case.rows_per_item),
            loss=case.loss,
            max_grad_norm=max_grad_norm,
            training=case.training,
            gradient_accumulation_steps=num_parts,
        )
        self.agree(metrics, self.twin_step(case, rows, max_grad_norm))

    def in_calls(
        self, case: Case, rows: Rows, cuts: Sequence[int], max_grad_norm: float | None = None, sync: bool = False
    ) -> None:
        """A step of both; the module takes the rows in calls of `forward_backward`, which reduce if `sync`."""
        done, calls = Accumulation(), list(itertools.pairwise(cuts))
        zero_grad(self.module, self.optimizer)
        for start, end in calls:
            batch = batch_of(part_of(rows, start, end), case.dim)
            is_last = end == cuts[-1]
            options: dict[str, Any] = {"loss": case.loss, "training": case.training, "sync": is_last or sync}
            assert "loss" in forward_backward(self.module, batch, done, **options)
        metrics = optim_step(self.module, self.optimizer, done, max_grad_norm=max_grad_norm)
        self.agree(metrics, self.twin_step(case, rows, max_grad_norm))

    def twin_step(self, case: Case, rows: Rows, max_grad_norm: float | None = None) -> tuple[float, float]:
        """Loss and gradient norm of the twin's step on all rows at once."""
        self.twin.train(case.training)
        self.twin_optimizer.zero_grad()
        loss = case.reference(self.twin, rows)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(self.twin.parameters(), max_grad_norm or math.inf)
        self.twin_optimizer.step()
        return loss.item(), norm.item()

    def agree(self, metrics: dict[str, float], expected: tuple[float, float]) -> None:
        loss, norm = expected
        assert type(metrics["loss"]) is float
        assert type(metrics["grad_norm"]) is float
        assert abs(metrics["loss"] - loss) < TOLERANCE, (metrics, expected)
        assert abs(metrics["grad_norm"] - norm) < TOLERANCE * max(1.0, norm), (metrics, expected)

    def compare(self) -> None:
        reshard(self.module)
        twin = dict(self.twin.named_parameters())
        for name, parameter in self.module.named_parameters():
            difference = (full(parameter) - twin[name]).abs().max().item()
            assert difference < self.tolerance, f"{name} differs by {difference}"


def check(name: str, optimizer: str, num_rows: int, max_grad_norm: float | None, sharding: Sharding | None) -> None:
    case = CASES[name]
    pair = Pair(case.build, optimizer, sharding)
    rows = case.rows()
    if num_rows < 4 and "labels" in rows:  # keep something that counts among the first rows
        rows = {key: value.roll(-3 if num_rows > 1 else -4, dims=0) for key, value in rows.items()}
    for _ in range(3):
        pair.step(case, part_of(rows, 0, num_rows), max_grad_norm)
    pair.compare()


@on_ranks(2, full=(1, 3, 4), sim=(2,))
def test_train_step_equals_one_process() -> None:
    """Every case on 7 rows; the main ones also with AdamW, on fewer rows than ranks, under HSDP, and offloaded."""
    world_size = dist.get_world_size()
    fewer = {2: [1], 4: [1, 3]}.get(world_size, [])
    plans: list[tuple[str, str, int, float | None, Sharding | None]] = []
    plans += [(name, "sgd", 7, 0.5, None) for name in (CASES if world_size < 4 else MAIN)]
    plans += [(name, "adamw", 7, None, None) for name in MAIN]
    for num_rows in fewer:
        plans += [(name, "sgd", num_rows, None, None) for name in MAIN]
    if world_size == 4:
        plans.append(("llama", "sgd", 7, 0.5, Sharding(replicate_size=2)))
        plans.append(("token_mean", "adamw", 7, 0.1, Sharding(replicate_size=2)))
    if device_type() != "cpu":
        plans += [(name, "adamw", 7, 0.5, Sharding(cpu_offload=True)) for name in ("llama", "token_mean")]
    each(check, plans)


class _RaiseInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        raise ArithmeticError("raised in backward")


def raise_in_loss(output: Any, **kwargs: Any) -> torch.Tensor:
    raise LookupError("raised in the loss")


class Tripwire(nn.Module):
    """Passes a value on; when armed, its backward raises with half of the model's backward done."""

    def __init__(self) -> None:
        super().__init__()
        self.armed = False

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        if not self.armed:
            return value
        out: torch.Tensor = _RaiseInBackward.apply(value)  # type: ignore[no-untyped-call]
        return out


class Breakable(Scaled):
    """Raises in the middle of backward when armed: the head's gradient is there, the embedding's is not."""

    def __init__(self) -> None:
        super().__init__()
        self.tripwire = Tripwire()

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.tripwire(self.embed(tokens) + torch.tanh(self.blocks[0](self.embed(tokens))))
        hidden = hidden + torch.tanh(self.blocks[1](hidden))
        logits: torch.Tensor = self.head(hidden) * self.scale
        return logits


def fail_then_go_on(kind: str) -> None:
    """One good step, a failing one, then a forward and two steps that equal one process's."""
    case = Case(Breakable, CASES["token_mean"].rows, token_mean)
    pair = Pair(Breakable, "adamw")
    rows = case.rows()
    pair.step(case, rows, 0.5)
    tripwire = pair.module.get_submodule("tripwire")
    assert isinstance(tripwire, Tripwire)
    bad = dict(rows)
    if kind == "forward":
        bad["tokens"] = rows["tokens"].clone()
        bad["tokens"][:, 2] = 10_000
    tripwire.armed = kind == "backward"
    expected = {"forward": IndexError, "loss": LookupError, "backward": ArithmeticError}[kind]
    loss = raise_in_loss if kind == "loss" else token_mean
    with pytest.raises(expected) as caught:
        train_step(pair.module, pair.optimizer, batch_of(bad), loss=loss)
    assert is_recoverable(caught.value)
    assert any("later steps are right" in note for note in caught.value.__notes__)
    tripwire.armed = False
    with torch.no_grad():
        difference = (pair.module(rows["tokens"]) - pair.twin(rows["tokens"])).abs().max().item()
    assert difference < TOLERANCE, f"forward after the failure differs by {difference}"
    for _ in range(2):
        pair.step(case, rows, 0.5)
    pair.compare()


def of_this_rank(output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return token_mean(output, labels) * (1 + dist.get_rank())


def fail_at_once() -> None:
    """The first step of all fails, before FSDP has set itself up: the error names its cause, later steps are right."""
    case = CASES["token_mean"]
    pair = Pair(case.build, "sgd")
    rows = case.rows()
    with pytest.raises(ValueError, match=r"different terms \(rank 0: cross_entropy x 1; rank 1: .* x 2;") as caught:
        train_step(pair.module, pair.optimizer, batch_of(rows), loss=of_this_rank)
    assert is_recoverable(caught.value)
    pair.step(case, rows)
    pair.compare()
    error = ValueError("the caller's")
    # torch refuses to reset a group that is not the root.
    assert not recover_after(error, pair.module.get_submodule("blocks.0"))
    assert "resetting the module failed too: RuntimeError" in error.__notes__[0]
    # A GPU's own error, or one that it caused: its context may be dead, whatever can be reset without it.
    lost, wrapped = torch.AcceleratorError("CUDA error: device-side assert triggered"), RuntimeError("the step failed")
    wrapped.__cause__ = lost
    for dead in (lost, wrapped):
        assert not is_recoverable(dead)
        assert not recover_after(dead, pair.module)


def nothing_counts(name: str) -> None:
    """A batch in which no label counts is refused on every rank alike, and leaves the module right."""
    case = CASES[name]
    pair, rows = Pair(case.build, "sgd"), case.rows()
    masked = {**rows, "labels": torch.full_like(rows["labels"], -100)}
    with pytest.raises(ValueError, match="nothing counts in"):
        train_step(pair.module, pair.optimizer, batch_of(masked))
    pair.step(case, rows)
    pair.compare()


def replicated_rows(name: str) -> None:
    """Without a `Split` every rank computes all rows; the step is still that of one process."""
    case = CASES[name]
    pair, rows = Pair(case.build, "sgd"), case.rows()
    pair.step(case, rows, batch=deal((), rows, dist.get_world_size())[dist.get_rank()])
    pair.compare()


def refuses_bad_losses() -> None:
    """What a loss may not return is refused on every rank."""
    pair = Pair(Scaled, "sgd")
    batch = batch_of(CASES["token_mean"].rows())
    with pytest.raises(ValueError, match=r"shape \(.*\); reduce it"):
        train_step(pair.module, pair.optimizer, batch, loss=lambda output, labels: output)
    with pytest.raises(ValueError, match="is a float"):
        train_step(pair.module, pair.optimizer, batch, loss=lambda output, labels: 1.0)
    rows = {"tokens": CASES["token_mean"].rows()["tokens"]}
    with pytest.raises(ValueError, match="has no loss"):
        train_step(pair.module, pair.optimizer, batch_of(rows))
    with pytest.raises(ValueError, match="nothing counts in pair 0"):
        train_step(pair.module, pair.optimizer, batch, loss=lambda output, labels: (output.sum(), 0))


@on_ranks(3)
def test_steps_are_right_after_failures() -> None:
    each(fail_then_go_on, [("forward",), ("loss",), ("backward",)])
    fail_at_once()
    each(nothing_counts, [("llama",), ("t5",), ("bert_classifier",)])
    each(replicated_rows, [("llama",), ("bert_classifier",), ("row_mean",)])
    refuses_bad_losses()
