"""`raysharding bench` and `loading.py`, run as programs: output, errors, and no process left however they end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import save_file

from raysharding.bench import command
from raysharding.bench.rank_set import BenchError
from raysharding.cli import main
from tests.bench.checkpoints import make
from tests.bench.loading import ROOT, python_path

ENVIRONMENT = {**os.environ, "PYTHONPATH": python_path(), "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Llama."""
    directory = tmp_path_factory.mktemp("made") / "dense"
    make("dense", directory, 0.01)
    return directory


def run(*words: str, timeout_s: float = 100.0) -> subprocess.CompletedProcess[str]:
    arguments = [sys.executable, *words]
    return subprocess.run(arguments, cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, timeout=timeout_s)


def test_bench(checkpoint: Path, tmp_path: Path) -> None:
    plot = tmp_path / "out.png"
    words = ("--world-size", "2", "--rounds", "1", "--transports", "scatter_wire,broadcast", "--plot", str(plot))
    done = run("-m", "raysharding", "bench", str(checkpoint), *words, "--json")
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    loads = [line for line in lines if line["kind"] == "load"]
    arms = ["scatter_wire", "broadcast", "preadv_floor", "scatter_floor"]
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
    assert "auto takes " in done.stderr.splitlines()[-1]
    assert "warm, 2 ranks, 1 rounds" in done.stderr
    assert plot.read_bytes().startswith(b"\x89PNG")


@pytest.mark.full
def test_loading_in_fresh_processes(checkpoint: Path) -> None:
    words = ("--mode", "fresh", "--rounds", "1", "--world-size", "1", "--arms", "torch,scatter", "--json")
    done = run("tests/bench/loading.py", "--checkpoint", str(checkpoint), *words)
    assert done.returncode == 0, done.stderr
    loads = [json.loads(line) for line in done.stdout.splitlines() if '"kind": "load"' in line]
    assert [(load["arm"], load["mode"], load["counted"]) for load in loads] == [
        ("torch", "fresh", True),
        ("scatter", "fresh", True),
    ]
    assert loads[0]["digests"] == loads[1]["digests"] != []
    memory = [json.loads(line) for line in done.stdout.splitlines() if '"kind": "memory"' in line]
    assert [item["arm"] for item in memory] == ["torch", "scatter"]
    assert all(isinstance(item["extra_bytes"], int) for item in memory)
    assert "torch ÷ scatter" in done.stderr


@pytest.mark.parametrize("number", [pytest.param(signal.SIGTERM, marks=pytest.mark.full), signal.SIGINT])
def test_signal_ends_the_ranks(checkpoint: Path, number: signal.Signals) -> None:
    words = (sys.executable, "-m", "raysharding", "bench", str(checkpoint), "--world-size", "1", "--rounds", "1000")
    process = subprocess.Popen(words, cwd=ROOT, env=ENVIRONMENT, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        while "warm-up" not in process.stderr.readline():
            assert process.poll() is None
        ranks = psutil.Process(process.pid).children(recursive=True)
        assert ranks
        process.send_signal(number)
        assert process.wait(20) == 128 + number
        assert not [rank for rank in ranks if rank.is_running() and rank.status() != psutil.STATUS_ZOMBIE]
    finally:
        process.kill()
        process.communicate()


@pytest.mark.full
def test_killed_command_leaves_no_rank(checkpoint: Path) -> None:
    words = (sys.executable, "-m", "raysharding", "bench", str(checkpoint), "--world-size", "1", "--rounds", "1000")
    process = subprocess.Popen(words, cwd=ROOT, env=ENVIRONMENT, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        while "warm-up" not in process.stderr.readline():
            assert process.poll() is None
        ranks = psutil.Process(process.pid).children(recursive=True)
    finally:
        process.kill()
        process.communicate()
    deadline = time.monotonic() + 30
    while any(rank.is_running() and rank.status() != psutil.STATUS_ZOMBIE for rank in ranks):
        assert time.monotonic() < deadline, "ranks went on without their driver"
        time.sleep(0.2)


def test_errors_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / "model.safetensors")
    assert main(["bench", str(tmp_path / "nothing")]) == 1
    assert capsys.readouterr().err.splitlines()[-1] == f"raysharding: {tmp_path / 'nothing'}: no such file or directory"
    assert main(["bench", str(tmp_path), "--world-size", "1000000"]) == 1
    assert "1000000 ranks here need about " in capsys.readouterr().err
    for words, message in (
        (["--world-size", "0"], "give a whole number, 1 or more"),
        (["--transports", "scatter,wire"], "'wire': choose from local, "),
        (["--rounds", "many"], "give a whole number, 1 or more"),
    ):
        with pytest.raises(SystemExit):
            main(["bench", str(tmp_path), *words])
        assert message in capsys.readouterr().err


def test_checkpoint_without_a_model_is_one_error(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / "model.safetensors")
    with pytest.raises(BenchError, match=r"no transport could load it:\n  PlanError: .*there is no config.json"):
        command.bench(
            str(tmp_path),
            world_sizes=[1],
            num_rounds=1,
            transports=["scatter"],
            timeout_s=30.0,
            progress=lambda load: None,
        )
