"""What a function changes of the thread that runs it is put back; what it sets for the process stays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from raysharding import GroupError, ShardedModelGroup, Split

ROWS = torch.randn(5, 8, generator=torch.Generator().manual_seed(1))


def change() -> Callable[[str], None]:
    """Changes one thing, and leaves it so."""

    def run(what: str) -> None:
        import os

        import torch

        kept: Any = torch  # a context that is collected ends by itself
        kept.entered = {"inference": torch.inference_mode, "autocast": lambda: torch.autocast("cpu", torch.float16)}
        if what in kept.entered:
            kept.entered = kept.entered[what]()
            kept.entered.__enter__()
        elif what == "default dtype":
            torch.set_default_dtype(torch.float64)
        elif what == "default device":
            torch.set_default_device("meta")
        elif what == "grad":
            torch.set_grad_enabled(False)
        elif what == "directory":
            os.chdir("/")
        if what == "grad":
            raise LookupError("changed")

    return run


def state() -> Callable[[], tuple[Any, ...]]:
    """What is to be as it was."""

    def run() -> tuple[Any, ...]:
        import os

        import torch

        nesting = torch.autocast_increment_nesting() - 1
        torch.autocast_decrement_nesting()
        modes = torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_autocast_enabled("cpu"), nesting
        return *modes, torch.get_autocast_dtype("cpu"), torch.get_default_dtype(), torch.ones(1).device, os.getcwd()

    return run


def mean_square() -> Callable[..., torch.Tensor]:
    def loss(output: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        return output.square().mean()

    return loss


@pytest.mark.parametrize("what", ["default dtype", "default device", "grad", "inference", "autocast", "directory"])
def test_what_a_function_leaves_behind_changes_no_later_call(
    group: ShardedModelGroup, reference: nn.Module, what: str
) -> None:
    before = group.call(state())
    try:
        group.call(change(), what)
    except GroupError:
        assert what == "grad", "it raises after the change"
    assert group.call(state()) == before
    torch.testing.assert_close(group.forward(Split(ROWS)), reference(ROWS))
    loss = group.forward_backward(Split(ROWS), loss=mean_square())["loss"]
    group.zero_grad()
    assert loss == pytest.approx(reference(ROWS).square().mean().item())


def test_what_is_set_for_the_process_stays(group: ShardedModelGroup) -> None:
    def settings(threads: int, deterministic: bool, precision: str) -> None:
        import torch

        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(deterministic)
        torch.set_float32_matmul_precision(precision)

    def found() -> tuple[int, bool, str]:
        import torch

        precision = torch.get_float32_matmul_precision()
        return torch.get_num_threads(), torch.are_deterministic_algorithms_enabled(), precision

    before = group.call(found)[0]
    group.call(settings, 2, True, "high")
    assert group.call(found) == [(2, True, "high")] * 2
    group.call(settings, *before)
    assert group.call(found) == [before] * 2


def test_a_function_cannot_set_signal_handlers(group: ShardedModelGroup) -> None:
    def ignore() -> None:
        import signal

        signal.signal(signal.SIGTERM, signal.SIG_IGN)

    with pytest.raises(GroupError, match="signal only works in main thread"):
        group.call(ignore)
