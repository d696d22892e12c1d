"""The checks of `tests.accelerator.fault_checks` that need no simulated device, on one and two ranks of any.

`python -m tests.gpu.rank_faults cuda|cpu|sim`.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from tests.accelerator import fault_checks
from tests.distributed.checks import outcome_of
from tests.gpu.record import Record
from tests.spawn import device_type, run_ranks

CHECKS = (
    fault_checks.check_offloaded_state,
    fault_checks.check_offloaded_state_of_whole_matrices,
    fault_checks.check_labels_of_a_loss_function,
    fault_checks.check_generator_after_generate,
)
LAST = (fault_checks.check_dead_device,)
"""Checks after which the process has no device."""


def run_checks(root: Path) -> dict[str, str]:
    """Check → traceback, on a rank."""
    found = {name: outcome_of(partial(fault_checks.check_loss, name)) for name in fault_checks.LOSSES}
    checks = CHECKS if device_type() == "cpu" else (*CHECKS, *LAST)  # an index out of range kills no CPU
    return found | {check.__name__: outcome_of(partial(check, root)) for check in checks}


def judge(name: str, outcomes: list[dict[str, str]]) -> None:
    """Fail with the traceback of the ranks on which a check failed."""
    failed = [f"rank {rank}: {outcome[name]}" for rank, outcome in enumerate(outcomes) if outcome[name]]
    assert not failed, "\n".join(failed)


def judge_hang(name: str, shares: list[dict[str, float]]) -> str:
    """Rank 1 hangs: it is never seen to wait for others, and rank 0 nearly always."""
    waits, hangs = (share[name] for share in shares)
    said = f"rank 0 was seen to wait in {waits:.0%} of the looks, rank 1 in {hangs:.0%}"
    assert hangs == 0, said
    assert waits > 0.8, said
    return said


def extend(found: list[Any], run: Callable[[], list[Any]]) -> None:
    """Add what all ranks return."""
    found.extend(run())


def main(device: str) -> int:
    """Number of checks that failed."""
    record = Record.of_this_part()
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        save_file(fault_checks.make_model().state_dict(), root / "model.safetensors")
        for size in (1, 2):
            outcomes: list[dict[str, str]] = []
            run = partial(run_ranks, size, run_checks, root, device=device)
            record.check(f"W={size}: all checks ended", partial(extend, outcomes, run))
            for name in outcomes[0] if outcomes else ():
                record.check(
                    f"W={size}: {name.removeprefix('check_').replace('_', ' ')}", partial(judge, name, outcomes)
                )
        shares: list[dict[str, float]] = []
        run_hangs = partial(run_ranks, 2, fault_checks.run_hangs, root, device=device)
        record.check("W=2: all hangs ended", partial(extend, shares, run_hangs))
        for name in shares[0] if shares else ():
            record.check(f"W=2: {name.replace('_', ' ')}", partial(judge_hang, name, shares))
    return record.failures


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]) > 0)
