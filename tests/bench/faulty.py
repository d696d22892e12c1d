"""Arms that fail in every way, for the tests of the harness; made on each rank."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from raysharding.distributed import materialize
from tests.bench.case import Arm, Case, Run


def make_case(options: Mapping[str, Any]) -> tuple[Case, dict[str, Arm]]:
    """A small module, and arms that fill it or fail; `options["refuse"]` fails at the start."""
    if "refuse" in options:
        raise ValueError(options["refuse"])
    arms = [Arm(name, _prepare(run)) for name, run in _RUNS.items()]
    return Case(Path(options["checkpoint"]), _build), {arm.name: arm for arm in arms}


def _build() -> nn.Module:
    return nn.Linear(4, 6, device="meta", dtype=torch.bfloat16)


def _prepare(run: Callable[[nn.Module], None]) -> Callable[[Case, nn.Module], Run]:
    def prepare(case: Case, module: nn.Module) -> Run:
        def fill() -> None:
            materialize(module, torch.device("cpu"))
            for parameter in module.parameters():
                nn.init.constant_(parameter, 1.0)
            run(module)

        return fill

    return prepare


def _fine(module: nn.Module) -> None:
    dist.barrier()


def _different(module: nn.Module) -> None:
    for parameter in module.parameters():
        nn.init.constant_(parameter, 2.0)


def _refuses(module: nn.Module) -> None:
    raise ValueError("not this one")


def _alone(module: nn.Module) -> None:
    if dist.get_rank() == 1:
        raise ValueError("only rank 1")
    dist.barrier()


def _dies(module: nn.Module) -> None:
    if dist.get_rank() == 1:
        raise KeyError("rank 1 died of this")
    dist.barrier()


def _hangs(module: nn.Module) -> None:
    if dist.get_rank() == 1:
        time.sleep(600)


def _prints(module: nn.Module) -> None:
    print("not an answer", flush=True)
    os.write(2, b"nor this\n")


_RUNS = {
    "fine": _fine,
    "different": _different,
    "refuses": _refuses,
    "alone": _alone,
    "dies": _dies,
    "hangs": _hangs,
    "prints": _prints,
}
