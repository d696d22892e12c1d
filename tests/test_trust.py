"""What SECURITY.md says, as far as no other test shows it."""

from __future__ import annotations

import ast
import json
import re
import shutil
import socket
import sys
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch.distributed import TCPStore

from raysharding.distributed.comm.rendezvous import serve_store
from raysharding.errors import CheckpointError
from raysharding.group.launch.spec import GroupSpec, open_spec

ROOT = Path(__file__).resolve().parents[1]
UNPICKLING = {
    "raysharding/group/cluster/ray_internals.py",
    "raysharding/group/messages/packing.py",
    "raysharding/group/messages/remote_error.py",
}
"""What drivers, controller and ranks send each other over Ray, and the record in Ray's KV; no file is read there."""


@cache
def calls() -> list[tuple[str, str, ast.Call]]:
    """(file, dotted name, call) of every call in the package."""
    return [
        (str(path.relative_to(ROOT)), ast.unparse(node.func), node)
        for path in sorted((ROOT / "raysharding").rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
    ]


def test_pickles_are_read_in_the_group_only() -> None:
    readers = {file for file, name, _ in calls() if re.fullmatch(r"(cloud)?pickle\.(loads?|Unpickler)", name)}
    assert readers == UNPICKLING
    for path in (ROOT / "raysharding").rglob("*.py"):
        assert not re.search(r"from (cloud)?pickle import", path.read_text()), f"{path}: the calls would not be seen"


def test_no_collective_pickles_and_no_code_comes_with_a_checkpoint() -> None:
    for file, name, call in calls():
        where, told = f"{file}:{call.lineno}: {name}", {one.arg: ast.unparse(one.value) for one in call.keywords}
        assert name != "torch.load" or told.get("weights_only") == "True", where
        assert not re.search(r"(gather|broadcast|scatter|send|recv)_object(_list)?$", name), f"{where} is pickle"
        assert name not in ("eval", "exec"), where
        assert "trust_remote_code" not in told, where
    assert "torch.load" in {name for _, name, _ in calls()}


def test_a_store_asks_nobody_who_he_is_and_has_a_prefix_that_nobody_can_guess() -> None:
    stores = [serve_store("127.0.0.1", timeout_s=5.0) for _ in range(3)]
    prefixes = {address.prefix for _, address in stores}
    assert len(prefixes) == 3
    assert all(re.fullmatch(r"[0-9a-f]{16}", prefix) for prefix in prefixes)  # 64 random bits
    # Why the network must be trusted. If torch learns to ask, SECURITY.md can say so.
    server, address = stores[0]
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


def adapters_of(path: Path, base: object, **fields: object) -> Path:
    """A directory of adapters, as a stranger might write it, whose files name `base`."""
    path.mkdir(parents=True, exist_ok=True)
    save_file({"base_model.model.a.lora_A.weight": torch.ones(2, 2)}, path / "adapter_model.safetensors")
    written = {"peft_type": "LORA", "base_model_name_or_path": base, **fields}
    (path / "adapter_config.json").write_text(json.dumps(written))
    return path


_opened: list[str] = []


def _note_opened(event: str, args: tuple[Any, ...]) -> None:
    if event in ("open", "os.listdir", "os.scandir"):
        _opened.append(str(args[0]))


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "form", ["{}", "file://{}", "{}/../secret", "s3", "out/secret", "~/secret", "hf", "gpt2", "revision"]
)
def test_what_adapters_name_as_their_base_is_opened_only_on_the_callers_word(
    form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("AWS_ACCESS_KEY_ID", "key"), ("AWS_SECRET_ACCESS_KEY", "secret"), ("HOME", str(tmp_path))):
        monkeypatch.setenv(name, value)
    secret = tmp_path / "out" / "secret"
    secret.mkdir(parents=True)
    save_file({"a": torch.ones(2)}, secret / "model.safetensors")
    shutil.copytree(secret, tmp_path / "secret")
    monkeypatch.chdir(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.2)
        address = f"http://127.0.0.1:{server.getsockname()[1]}"
        base = {"s3": f"s3://bucket/x?endpoint_override={address}", "hf": "hf://org/name", "revision": "org/name"}
        given = adapters_of(tmp_path / "adapters", base.get(form, form.format(secret)))
        if form == "revision":
            adapters_of(given, "org/name", revision="../../../../" * 4 + str(secret / "model.safetensors"))
        sys.addaudithook(_note_opened)  # stays until the process ends: that is all a hook can do
        _opened.clear()
        with pytest.raises(CheckpointError, match=r"give base=, the path, URI or hub id|give a branch") as found:
            open_spec(GroupSpec(str(given)), alone=True)
        assert "names the base model" in str(found.value) or "revision=" in str(found.value)
        with pytest.raises(TimeoutError):
            server.accept()
    assert not [path for path in _opened if "secret" in path]


def test_the_callers_base_is_opened_in_place_of_the_files(tmp_path: Path) -> None:
    given, base = adapters_of(tmp_path / "adapters", "/etc/passwd"), tmp_path / "base"
    base.mkdir()
    save_file({"a": torch.ones(2)}, base / "model.safetensors")
    spec, opened, _ = open_spec(GroupSpec(str(given), base=str(base)), alone=True)
    assert (opened.base.path, opened.model.base) == (str(base), str(base))
    again = open_spec(GroupSpec(str(given), model=opened.model), alone=True)[1]  # as a restart of the group does
    assert again.base.path == str(base)
    assert spec.of_files(str(base)).base is None
    with pytest.raises(ValueError, match="holds no LoRA adapters alone: leave base out"):
        open_spec(GroupSpec(str(base), base=str(base)), alone=True)
    with pytest.raises(CheckpointError, match="holds adapters as well"):
        open_spec(GroupSpec(str(given), base=str(given)), alone=True)
