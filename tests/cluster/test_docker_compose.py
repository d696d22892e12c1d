"""cluster/docker-compose.yaml by the schema of the Compose specification; see docs/pages/one-box.md for what ran."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.cluster.driver import ROOT

FOLDER = ROOT / "cluster"
CPUS, GPUS = FOLDER / "docker-compose.yaml", FOLDER / "docker-compose.gpu.yaml"


def resolve(*files: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """The files as one, with variables filled in, by podman-compose."""
    pytest.importorskip("podman_compose")
    command = [str(Path(sys.executable).with_name("podman-compose"))]
    command += [part for file in files for part in ("--file", str(file))]
    path = {"PATH": os.environ["PATH"]}
    return subprocess.run(
        [*command, "config"], env=path | environment, cwd=FOLDER, capture_output=True, text=True, timeout=60
    )


@pytest.mark.skipif(shutil.which("podman") is None, reason="podman-compose needs podman, also to read a file")
@pytest.mark.parametrize("files", [(CPUS,), (CPUS, GPUS)], ids=["cpus", "gpus"])
def test_the_files_keep_to_the_specification(files: tuple[Path, ...]) -> None:
    compose_spec = pytest.importorskip("compose_spec")
    resolved = resolve(*files, RAY_AUTH_TOKEN="secret")
    compose_spec.PyCompose.from_yaml(resolved.stdout)
    services = yaml.safe_load(resolved.stdout)["services"]
    # Ray runs what it is sent, and Jupyter too: for this machine alone, and with the token.
    assert [port for service in services.values() for port in service["ports"] if port[:10] != "127.0.0.1:"] == []
    assert {service["environment"]["RAY_AUTH_TOKEN"] for service in services.values()} == {"secret"}
    assert ("deploy" in services["head"], "deploy" in services["notebook"]) == (GPUS in files, False)


@pytest.mark.skipif(shutil.which("podman") is None, reason="podman-compose needs podman, also to read a file")
def test_nothing_starts_without_a_token() -> None:
    resolved = resolve(CPUS)
    assert resolved.returncode != 0
    assert "32 random bytes" in resolved.stderr + resolved.stdout
