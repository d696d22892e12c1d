"""Groups through Ray whose ranks compute on the simulated device."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.accelerator.group_checks import CHECKS, FULL


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> dict[str, str]:
    """Check → traceback, of one driver that ran all that this session asks for."""
    names = [item.name.partition("[")[2].rstrip("]") for item in request.session.items if item.path == request.path]
    folder = str(tmp_path_factory.mktemp("groups"))
    command = [sys.executable, "-m", "tests.accelerator.group_checks", folder, *names]
    driver = subprocess.run(command, capture_output=True, text=True, timeout=400)
    assert driver.returncode == 0, driver.stderr
    found: dict[str, str] = json.loads(driver.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize(
    "check",
    [check.__name__ for check in CHECKS] + [pytest.param(check.__name__, marks=pytest.mark.full) for check in FULL],
)
def test_group(check: str, outcomes: dict[str, str]) -> None:
    assert not outcomes[check], outcomes[check]
