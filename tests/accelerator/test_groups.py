"""Groups through Ray whose ranks compute on the simulated device."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.accelerator.group_checks import CHECKS


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Check → traceback, of one driver that ran them all."""
    command = [sys.executable, "-m", "tests.accelerator.group_checks", str(tmp_path_factory.mktemp("groups"))]
    driver = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert driver.returncode == 0, driver.stderr
    found: dict[str, str] = json.loads(driver.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("check", [check.__name__ for check in CHECKS])
def test_group(check: str, outcomes: dict[str, str]) -> None:
    assert not outcomes[check], outcomes[check]
