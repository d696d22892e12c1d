"""A cluster that is gone is an error that names it, not a wait."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
import ray

from raysharding.errors import PlacementError
from raysharding.group.connect import connect


@pytest.fixture
def dead_address() -> str:
    """An address at which nothing listens."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return f"127.0.0.1:{listener.getsockname()[1]}"


def test_the_address_file_of_a_cluster_that_died(
    dead_address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = tmp_path / "ray" / "ray_current_cluster"
    left.parent.mkdir()
    left.write_text(f"{dead_address}\n")
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    for variable in (None, "auto"):
        if variable is None:
            monkeypatch.delenv("RAY_ADDRESS", raising=False)
        else:
            monkeypatch.setenv("RAY_ADDRESS", variable)
        with pytest.raises(PlacementError, match=f"{dead_address}, which {left} names .*ray stop"):
            connect()
    assert not ray.is_initialized()


def test_an_address_in_the_environment(dead_address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", dead_address)
    with pytest.raises(PlacementError, match=f"{dead_address}, which RAY_ADDRESS names .*unset it"):
        connect()
    assert not ray.is_initialized()
