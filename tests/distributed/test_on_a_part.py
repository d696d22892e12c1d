"""The rooms' own tests once more, with every mesh on a part of a larger world, in which nobody else takes part."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.spawn import OUTSIDERS

ROOT = Path(__file__).resolve().parents[2]
ROOMS = ("fsdp", "loading", "fully_shard", "saving", "optim", "transfer", "accelerate_compat", "training")


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize("room", ROOMS)
def test_where_all_ranks_are_assumed(room: str) -> None:
    """What a test calls must find the ranks by the module: a collective of all ranks would hang."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not full and not all_ranks"]
    command.append(f"tests/distributed/{room}")
    environment = os.environ | {OUTSIDERS: "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=570)
    assert done.returncode == 0, done.stdout[-5000:]
