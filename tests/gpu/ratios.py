"""The ratios that `tests.gpu.checks` prints, on ranks that have the machine for themselves.

`python -m tests.gpu.ratios cuda|cpu|sim`.
"""

from __future__ import annotations

import sys
import tempfile
from functools import partial
from pathlib import Path

from tests.gpu import checks
from tests.gpu.record import Record
from tests.spawn import run_ranks


def main(device: str) -> int:
    """Number of checks that failed."""
    record = Record.of_this_part()
    for check in (checks.check_asynchronous_save, checks.check_load_beside_its_floor):
        for world_size in (1, 2):
            with tempfile.TemporaryDirectory() as folder:
                root = Path(folder, "root")
                checks.write_checkpoints(root, device)
                what = check.__name__.removeprefix("check_").replace("_", " ")
                run = partial(run_ranks, world_size, check, root, device=device, timeout_s=100)
                record.check(f"W={world_size}: {what}", run)
    return record.failures


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]) > 0)
