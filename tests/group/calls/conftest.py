"""A cluster for drivers in processes of their own, for all files here."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.group.standing import StandingCluster, standing_cluster


@pytest.fixture(scope="package")
def standing(worker_python: Path) -> Iterator[StandingCluster]:
    with standing_cluster() as cluster:
        yield cluster
