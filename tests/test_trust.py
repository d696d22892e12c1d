"""What SECURITY.md says, as far as no other test shows it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
from torch.distributed import TCPStore

from raysharding.distributed.comm.rendezvous import serve_store

ROOT = Path(__file__).resolve().parents[1]
UNPICKLING = {"raysharding/group/rpc/messages.py"}
"""What ranks and driver send each other, over Ray or signed (see `group/rpc/connection.py`); no file is read there."""


def calls() -> Iterator[tuple[str, str, ast.Call]]:
    """(file, dotted name, call) of every call in the package."""
    for path in sorted((ROOT / "raysharding").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call):
                yield str(path.relative_to(ROOT)), ast.unparse(node.func), node


def test_pickles_are_read_in_the_group_only() -> None:
    readers = {file for file, name, _ in calls() if re.fullmatch(r"(cloud)?pickle\.(loads?|Unpickler)", name)}
    assert readers == UNPICKLING
    for path in (ROOT / "raysharding").rglob("*.py"):
        assert not re.search(r"from (cloud)?pickle import", path.read_text()), f"{path}: the calls would not be seen"


def test_torch_load_is_told_to_run_nothing() -> None:
    found = [(file, call) for file, name, call in calls() if name == "torch.load"]
    assert found
    for file, call in found:
        told = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
        assert told.get("weights_only") == "True", f"{file}:{call.lineno}"


def test_no_collective_pickles_and_no_code_comes_with_a_checkpoint() -> None:
    for file, name, call in calls():
        where = f"{file}:{call.lineno}"
        assert not re.search(r"(gather|broadcast|scatter|send|recv)_object(_list)?$", name), (
            f"{where}: {name} is pickle"
        )
        assert name not in ("eval", "exec"), where
        assert "trust_remote_code" not in {keyword.arg for keyword in call.keywords}, where


def test_each_store_has_a_prefix_of_its_own_that_nobody_can_guess() -> None:
    stores = [serve_store("127.0.0.1", timeout_s=5.0) for _ in range(3)]
    prefixes = {address.prefix for _, address in stores}
    assert len(prefixes) == 3
    assert all(re.fullmatch(r"[0-9a-f]{16}", prefix) for prefix in prefixes)  # 64 random bits


def test_a_store_asks_nobody_who_he_is() -> None:
    # Why the network must be trusted. If torch learns to ask, SECURITY.md can say so.
    server, address = serve_store("127.0.0.1", timeout_s=5.0)
    server.set("key", "secret")
    stranger = TCPStore(address.host, address.port, is_master=False, timeout=timedelta(seconds=5))
    assert stranger.get("key") == b"secret"


@pytest.mark.parametrize(
    "path",
    sorted(set((ROOT / "cluster").rglob("*")) - set((ROOT / "cluster").rglob("*.pyc"))),
    ids=lambda path: str(path.relative_to(ROOT)),
)
def test_what_starts_a_cluster_asks_for_a_token(path: Path) -> None:
    text = path.read_text(errors="replace") if path.is_file() else ""
    if re.search(r"ray[\"', ]+start|rayStartParams|rayClusterConfig", text):
        token = r"RAY_AUTH_MODE(\W+|, value: )token|^ *authOptions:\s+mode: token"
        assert re.search(token, text, re.MULTILINE), f"{path} starts Ray without token authentication"
    if re.search(r"\W127\.0\.0\.1:8265:8265\W", text):
        return  # a container's own interfaces: the machine passes its loopback's port on, and no other
    assert not re.search(r"dashboard-host[=\"', :]+(0\.0\.0\.0|::)", text), f"{path} opens the dashboard to everybody"
