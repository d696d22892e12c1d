"""A group of two ranks that loses one: the error names it, and a restart makes the group whole.

`python -m tests.gpu.lost_ranks cuda|cpu|sim`. Each line says after how many seconds the error came, of which rank it
is, in which state the group was, how it restarted; its forward is then that of one process.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from raysharding import CallTimeoutError, FitStep, GroupError, ShardedModelGroup, Split, current_worker
from tests.accelerator.fault_checks import kill_device, lost_in_backward
from tests.gpu.driver import TIMEOUTS, alone, batch, cluster, differ, forward, ids, logits, start
from tests.gpu.equal_checks import ADAMW, BATCH, train_alone, write_rows
from tests.gpu.record import Record

CALL_S = 12.0
LOST = 1
"""The rank that is lost."""


def raise_alone() -> None:
    """Only the lost rank raises."""
    if dist.get_rank() == LOST:
        raise ValueError("rank 1 is lost")


def raise_beside_a_collective() -> None:
    """The other rank waits for it."""
    raise_alone()
    on_device = torch.ones(1, device=current_worker().device)
    dist.all_reduce(on_device)
    on_device.item()


def hang_beside_a_collective(timeout_s: float) -> None:
    """The other rank waits for it, in a group whose own time-out comes before that of the call."""
    own = dist.new_group(timeout=timedelta(seconds=timeout_s))
    on_device = torch.ones(1, device=current_worker().device)
    dist.all_reduce(on_device, group=own)  # makes the communicator
    if dist.get_rank() == LOST:
        time.sleep(60)
    dist.all_reduce(on_device, group=own)
    on_device.item()


def kill_device_alone() -> None:
    """A device-side assert on one rank."""
    if dist.get_rank() == LOST:
        kill_device()


def kill_all_devices(group: ShardedModelGroup) -> None:
    """A device-side assert on all ranks, which the error names."""
    try:
        group.call(kill_device)
    except GroupError as error:
        assert "device-side assert" in str(error), error  # noqa: PT017
        assert group.state.value == "broken", group.state
        raise


def raise_in_a_block() -> None:
    """The next forward of the second block raises on one rank, once."""

    def hook(*_: Any) -> None:
        handle.remove()
        raise ValueError("rank 1 is lost")

    if dist.get_rank() == LOST:
        handle = current_worker().module.get_submodule("model.layers.1").register_forward_pre_hook(hook)


def loss(how: str, output: Any) -> tuple[torch.Tensor, int]:
    """A loss in whose backward rank 1 `raises`, `dies` or `hangs`."""
    return lost_in_backward(output.logits, how).square().sum(), output.logits.numel()


def step(group: ShardedModelGroup, how: str) -> None:
    """A step in whose backward rank 1 is lost."""
    group.set_optimizer(torch.optim.SGD, lr=0.0)
    group.train_step(input_ids=Split(ids()), loss=partial(loss, how))


def forward_with_an_error(group: ShardedModelGroup) -> None:
    """A forward in which rank 1 raises."""
    group.call(raise_in_a_block)
    group.forward(input_ids=Split(ids()))


def stop_before_a_step(group: ShardedModelGroup) -> None:
    """SIGSTOP, then a step."""
    group.set_optimizer(torch.optim.SGD, lr=0.0)
    os.kill(group.ranks[LOST].pid, signal.SIGSTOP)
    rows: dict[str, Any] = {name: Split(value) for name, value in batch(0).items()}
    group.train_step(**rows)


def hang_beside(group: ShardedModelGroup, timeout_s: float) -> None:
    """A hang in a call."""
    group.call(hang_beside_a_collective, timeout_s)


def lose(
    group: ShardedModelGroup,
    expected: torch.Tensor,
    fault: Callable[[ShardedModelGroup], object],
    primary_is: int | None,
) -> str:
    """Lose a rank; its group says so, restarts, and computes what it did."""
    begun = time.monotonic()
    error = None
    try:
        fault(group)
    except GroupError as raised:
        error = raised
    assert error is not None, "no error was raised"
    kinds = {rank: failure.kind for rank, failure in sorted(error.failures.items())}
    primary = error.primary.rank if error.primary else None
    took = time.monotonic() - begun
    said = f"error after {took:.2f} s, {type(error).__name__}, primary rank {primary}, {kinds}, "
    said += str(group.state.value)
    if group.state.value == "broken":
        report = group.restart()
        said += f"; restart {report.seconds:.1f} s"
    said += f"; {forward(group, expected)}"
    assert primary_is in (None, primary), f"{said}; the error: {error}"
    assert not isinstance(error, CallTimeoutError) or took < CALL_S + 10, said
    if isinstance(error, CallTimeoutError) and primary_is is not None:
        said_of = ["waits in a collective"]
        if fault is stop_before_a_step and group.device.type != "cpu":
            said_of.append("its device computes, or waits for other ranks")  # transformers reads its masks on the host
        waits = [rank for rank, one in error.failures.items() if any(words in one.message for words in said_of)]
        assert waits == [rank.rank for rank in group.ranks if rank.rank != LOST], f"{said}; the error: {error}"
    return said


def check_fit(group: ShardedModelGroup, path: Path) -> str:
    """A fit that loses a rank has the losses of one that does not."""
    data = path.with_name("rows.parquet")
    killed: list[int] = []
    batches = write_rows(data)
    group.load(path)
    group.set_optimizer(torch.optim.AdamW, lr=1e-2)

    def kill(found: FitStep) -> None:
        if found.num_steps == 3 and not killed:
            killed.append(group.ranks[LOST].pid)
            os.kill(killed[0], signal.SIGKILL)

    saves: dict[str, Any] = {"save_to": path.with_name("steps"), "save_every": 2, "async_save": True}
    report = group.fit(data, batch_size=BATCH, epochs=2, callbacks=[kill], progress=False, max_grad_norm=0.5, **saves)
    assert killed
    losses = list(report.history["loss"])
    expected = train_alone(alone(path), 2 * batches)
    return f"{report.num_restarts} restart(s), {differ(f'{len(losses)} losses', losses, expected)}"


FAULTS: dict[str, Callable[[ShardedModelGroup], object]] = {
    "error in a call": lambda group: group.call(raise_alone),
    "error while the other waits in an all-reduce": lambda group: group.call(raise_beside_a_collective),
    "error in a forward": forward_with_an_error,
    "error in a backward": partial(step, how="raises"),
    "SIGKILL in a backward": partial(step, how="dies"),
    f"SIGSTOP before a step, call_s {CALL_S:g}": stop_before_a_step,
    f"a hang in a backward, call_s {CALL_S:g}": partial(step, how="hangs"),
}
ON_DEVICES: dict[str, Callable[[ShardedModelGroup], object]] = {
    "device-side assert of one": lambda group: group.call(kill_device_alone),
}
OF_ALL: dict[str, Callable[[ShardedModelGroup], object]] = {"device-side assert of all": kill_all_devices}
OF_NO_RANK: dict[str, Callable[[ShardedModelGroup], object]] = {
    "a hang that ends by the time-out of a process group of the caller's, 4 s": partial(hang_beside, timeout_s=4.0),
}
"""Which rank is named is only told: the driver hears of a rank that gave up before one that hangs."""


def main(kind: str) -> int:
    """Number of checks that failed."""
    record = Record.of_this_part()
    named = FAULTS if kind == "cpu" else FAULTS | ON_DEVICES
    others = OF_NO_RANK if kind == "cpu" else OF_ALL | OF_NO_RANK
    options: dict[str, Any] = {
        "timeouts": replace(TIMEOUTS, call_s=CALL_S, drain_s=2.0),
        "max_restarts": 1,
        "optimizer": ADAMW,
    }
    groups: list[ShardedModelGroup] = []
    with cluster(kind) as root:
        path = root / "model"
        expected = logits(path)

        def check(what: str, run: Callable[[ShardedModelGroup], str]) -> None:
            if not groups:  # the first, or the last check has left one that no restart could mend
                record.check("W=2: starts", lambda: groups.append(start(path, kind, 2, **options)))
            if groups:
                record.check(f"W=2: {what}", lambda: run(groups[0]))
                if groups[0].state.value != "ready":
                    groups.pop().shutdown()

        try:
            for what, fault in (named | others).items():
                check(what, partial(lose, expected=expected, fault=fault, primary_is=LOST if what in named else None))
            check("fit, a rank killed, goes on", partial(check_fit, path=path))
        finally:
            for group in groups:
                group.shutdown()
    return record.failures


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]) > 0)
