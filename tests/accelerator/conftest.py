"""Skips the tests of the simulated device where it cannot be built, and builds it before the first."""

from __future__ import annotations

import pytest

from tests.accelerator.build import load_extension, why_unavailable


@pytest.fixture(scope="session", autouse=True)
def built() -> None:
    """Build the extension, for half a minute to two, once for a machine."""
    if (why := why_unavailable()) is not None:
        pytest.skip(why)
    load_extension()
