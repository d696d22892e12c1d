"""`python -m tests.bench.loading`, run as a program: output, errors, and no process left however it ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import save_file

from tests.bench.checkpoints import make
from tests.bench.loading import main
from tests.bench.rank_set import ROOT

LOADING = (sys.executable, "-m", "tests.bench.loading")
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Llama."""
    directory = tmp_path_factory.mktemp("made") / "dense"
    make("dense", directory, 0.01)
    return directory


def run(checkpoint: Path, *words: str) -> tuple[list[dict[str, Any]], str]:
    """Lines of JSON from stdout, and stderr."""
    command = (*LOADING, "--checkpoint", str(checkpoint), *words, "--json")
    done = subprocess.run(command, cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()], done.stderr


@pytest.mark.timeout(220)
def test_loading(checkpoint: Path, tmp_path: Path) -> None:
    plot = tmp_path / "out.png"
    arms = ["scatter_wire", "broadcast", "preadv_floor", "scatter_floor"]
    words = ("--world-size", "2", "--rounds", "1", "--arms", ",".join(arms), "--plot", str(plot))
    lines, told = run(checkpoint, *words)
    loads = [line for line in lines if line["kind"] == "load"]
    assert [load["arm"] for load in loads if not load["counted"]] == ["auto", *arms]
    assert sorted(load["arm"] for load in loads if load["counted"]) == sorted(arms)
    num_bytes = loads[0]["report"]["checkpoint_bytes"]
    for load in loads:
        assert load["arm"] == "scatter_floor" or num_bytes <= load["read_bytes"] <= 1.1 * num_bytes
        # Half of the bytes go to the other rank, all of them under broadcast; no wire without root.
        wire = {"scatter_wire": 0.5, "broadcast": 1.0, "scatter_floor": 0.5}.get(load["arm"])
        assert load["wire_bytes"] is None or wire is None or wire <= load["wire_bytes"] / num_bytes <= wire + 0.1
    assert {line["name"] for line in lines if line["kind"] == "ratio"} == {
        "scatter_wire ÷ scatter_floor",
        "broadcast ÷ scatter_floor",
    }
    assert "auto takes " in told.splitlines()[-1]
    assert "warm, 2 ranks, 1 rounds" in told
    assert plot.read_bytes().startswith(b"\x89PNG")


@pytest.mark.full
@pytest.mark.timeout(220)
def test_loading_in_fresh_processes(checkpoint: Path) -> None:
    lines, told = run(checkpoint, "--mode", "fresh", "--rounds", "1", "--world-size", "1", "--arms", "torch,scatter")
    loads = [line for line in lines if line["kind"] == "load"]
    assert [(load["arm"], load["mode"], load["counted"]) for load in loads] == [
        ("torch", "fresh", True),
        ("scatter", "fresh", True),
    ]
    assert loads[0]["digests"] == loads[1]["digests"] != []
    assert all(isinstance(load["extra_bytes"], int) for load in loads)
    assert "torch ÷ scatter" in told


@contextmanager
def started(checkpoint: Path) -> Iterator[tuple[subprocess.Popen[str], list[psutil.Process]]]:
    """The command amid its rounds, and its ranks."""
    arms = ("--arms", "scatter", "--world-size", "1", "--rounds", "1000")
    command = (*LOADING, "--checkpoint", str(checkpoint), *arms)
    process = subprocess.Popen(command, cwd=ROOT, env=ENVIRONMENT, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        while "warm-up" not in process.stderr.readline():
            assert process.poll() is None
        ranks = psutil.Process(process.pid).children(recursive=True)
        assert ranks
        yield process, ranks
    finally:
        process.kill()
        process.communicate()


def is_alive(process: psutil.Process) -> bool:
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE


@pytest.mark.full
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_ends_the_ranks(checkpoint: Path, number: signal.Signals) -> None:
    with started(checkpoint) as (process, ranks):
        process.send_signal(number)
        assert process.wait(20) == 128 + number
        assert not [rank for rank in ranks if is_alive(rank)]


@pytest.mark.full
def test_killed_command_leaves_no_rank(checkpoint: Path) -> None:
    with started(checkpoint) as (_, ranks):
        pass
    deadline = time.monotonic() + 30
    while any(map(is_alive, ranks)):
        assert time.monotonic() < deadline, "ranks went on without their driver"
        time.sleep(0.2)


def test_checkpoint_that_cannot_be_loaded_is_one_error(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=f"^bench: {tmp_path}/nothing: no such file or directory$"):
        main(["--checkpoint", str(tmp_path / "nothing")])
    save_file({"a": torch.ones(2)}, tmp_path / "model.safetensors")
    words = ["--arms", "scatter", "--world-size", "1", "--rounds", "1", "--timeout-s", "30"]
    with pytest.raises(SystemExit, match=r"no arm could load it:\n  PlanError: .*there is no config.json"):
        main(["--checkpoint", str(tmp_path), *words])
