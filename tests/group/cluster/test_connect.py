"""A cluster that is gone is an error, not a wait. In a process of its own: this one may have joined Ray."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests import programs

ROOT = Path(__file__).resolve().parents[3]
CONNECT = """
import ray
from raysharding.errors import PlacementError
from raysharding.group.cluster.connect import connect

try:
    connect()
except PlacementError as error:
    assert not ray.is_initialized()
    print(error)
"""


@pytest.fixture
def dead_address() -> str:
    """An address at which nothing listens."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return f"127.0.0.1:{listener.getsockname()[1]}"


ATTACH = """
import ray
from raysharding import PlacementError, ShardedModelGroup

try:
    ShardedModelGroup.attach("llama")
except PlacementError as error:
    assert not ray.is_initialized()
    print(error)
"""


def connect(environment: dict[str, str], code: str = CONNECT, before: Sequence[str] = ()) -> str:
    """What `connect` says under these variables in place of this process's own."""
    others = {name: value for name, value in os.environ.items() if name not in ("RAY_ADDRESS", "RAY_TMPDIR", "TMPDIR")}
    if before:
        command = [*before, sys.executable, "-c", code]
        done = subprocess.run(command, cwd=ROOT, env=others | environment, capture_output=True, text=True, timeout=60)
    else:
        done = programs.run(code, environment=others | environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("variable", ["RAY_TMPDIR", pytest.param("TMPDIR", marks=pytest.mark.full)])
def test_the_address_file_of_a_cluster_that_died(variable: str, dead_address: str, tmp_path: Path) -> None:
    left = tmp_path / "ray" / "ray_current_cluster"
    left.parent.mkdir()
    left.write_text(f"{dead_address}\n")
    said = connect({variable: str(tmp_path)})
    assert f"{dead_address}, which {left} names" in said
    assert "ray stop" in said


@pytest.mark.full
def test_an_address_in_the_environment(dead_address: str) -> None:
    said = connect({"RAY_ADDRESS": dead_address})
    assert f"{dead_address}, which RAY_ADDRESS names" in said
    assert "unset it" in said


@pytest.mark.parametrize("address", [None, *(pytest.param(one, marks=pytest.mark.full) for one in ("auto", "local"))])
def test_attach_starts_no_cluster_and_says_where_it_looked(address: str | None, tmp_path: Path) -> None:
    if address == "auto" and os.geteuid() != 0:
        pytest.skip("Ray would find a cluster that somebody runs here: only root can hide their processes")
    hidden = ["unshare", "--pid", "--fork", "--mount-proc"] if address == "auto" else []
    named = {} if address is None else {"RAY_ADDRESS": address}
    said = connect({"RAY_TMPDIR": str(tmp_path), **named}, ATTACH, hidden)
    assert "has not called ray.init()" in said
    assert f"RAY_ADDRESS is {'not set' if address is None else repr(address)}" in said
    assert f"{tmp_path}/ray/ray_current_cluster names none" in said
    assert not list(tmp_path.glob("ray/session_*"))
