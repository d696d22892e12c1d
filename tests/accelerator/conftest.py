"""Skips the tests of the simulated device where it cannot be built, and builds it before the first."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.accelerator.build import load_extension, why_unavailable


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give the tests here the time for a build, which the first of them pays."""
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.timeout(420))


@pytest.fixture(scope="session", autouse=True)
def built() -> None:
    """Build the extension, in one to two minutes, once for a machine."""
    if (why := why_unavailable()) is not None:
        pytest.skip(why)
    load_extension()
