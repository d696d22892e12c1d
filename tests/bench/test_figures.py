"""Figures, table and plot from loads that are made up; floors and counters on real ranks."""

from __future__ import annotations

import json
import os
import socket
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from raysharding.checkpoint import open_checkpoint
from raysharding.distributed import init_mesh, load_checkpoint, materialize, shard_module
from raysharding.distributed.fully_shard.layout import local_tensor
from raysharding.units import GIB, MIB
from tests.bench import arms as bench_arms
from tests.bench.checkpoints import make
from tests.bench.counters import Counters, count_operations
from tests.bench.floors import own_ranges, prepare_preadv_floor, prepare_scatter_floor, wire_bytes
from tests.bench.network import join_network, private_network
from tests.bench.plot import save_plot
from tests.bench.rank import digest
from tests.bench.ratios import Figure, conclusion, groups, json_lines, named_ratios, table
from tests.bench.rounds import Load, Operations, Results, load_line
from tests.spawn import run_ranks


def load(arm: str, round_index: int, seconds: float, world_size: int = 2, **changes: Any) -> Load:
    fields: dict[str, Any] = {"mode": "warm", "counted": round_index > 0, "shard_bytes": 4 * MIB, "read_bytes": 8 * MIB}
    fields |= {"fault_bytes": 0, "wire_bytes": 4 * MIB, "digests": ()}
    return Load(arm=arm, round=round_index, seconds=seconds, world_size=world_size, **(fields | changes))


@pytest.fixture
def results() -> Results:
    """Two world sizes; the first round is slow, and must not count."""
    loads = [load(arm, 0, 99.0, size) for size in (2, 8) for arm in ("scatter", "scatter_floor", "torch")]
    seconds = {
        (2, "scatter"): (1.0, 2.0, 4.0),
        (2, "scatter_floor"): (1.0, 1.0, 1.0),
        (2, "torch"): (3.0, 4.0, 20.0),
        (8, "scatter"): (2.0, 6.0, 4.0),
        (8, "scatter_floor"): (2.0, 2.0, 2.0),
    }
    for (size, arm), values in seconds.items():
        loads += [load(arm, index, value, size) for index, value in enumerate(values, 1)]
    loads += [load("scatter", 0, 2.5, 4, mode="fresh", counted=True, wire_bytes=None)]
    return Results(loads, [Operations(2, "scatter", 3, 42)], {(8, "mmap"): "ValueError: not here"})


def test_ratios_are_taken_round_by_round(results: Results) -> None:
    found = {(item.mode, item.world_size, item.name): item.figure for item in named_ratios(results.loads)}
    assert found == {
        ("warm", 2, "torch ÷ scatter"): Figure(3.0, 2.0, 5.0, 3),
        ("warm", 2, "scatter ÷ scatter_floor"): Figure(2.0, 1.0, 4.0, 3),
        ("warm", 8, "scatter ÷ scatter_floor"): Figure(2.0, 1.0, 3.0, 3),
        # The arm grew 2, 3 and 1 times, the floor twice.
        ("warm", 8, "growth of scatter from W=2 to 8 ÷ scatter_floor's"): Figure(1.0, 0.5, 1.5, 3),
    }
    assert list(groups(results.loads)[0].loads) == ["scatter", "scatter_floor", "torch"]


def test_table(results: Results) -> None:
    lines = table(results, 8 * MIB, "scatter").splitlines()
    rows = {line.split()[0]: line.split() for line in lines[2:5]}
    assert lines[0] == "warm, 2 ranks, 3 rounds, 8 MiB"
    # seconds, range, ratio, range, GiB/s, wire, read, touched, operations
    scatter = [
        "scatter",
        "2.000",
        "1.00",
        "–",
        "4.00",
        "1.00",
        "1.00",
        "–",
        "1.00",
        "0.00",
        "0.500",
        "1.000",
        "0.000",
        "-",
    ]
    assert rows["scatter"] == [*scatter, "3", "+", "42"]
    assert rows["torch"][:8] == ["torch", "4.000", "3.00", "–", "20.00", "3.00", "2.00", "–"]
    assert any(line.startswith("fresh, 4 ranks, 1 rounds") for line in lines)
    assert "left out: W=8 mmap: ValueError: not here" in lines
    assert any(line.startswith("wire: not counted") for line in lines)
    assert "warm W=2  torch ÷ scatter: 3.00 (2.00 – 5.00), 3 rounds" in lines


def test_conclusion(results: Results) -> None:
    report = {"transport": "scatter", "transport_reason": "why", "checkpoint_bytes": GIB}
    results.loads.append(load("auto", 0, 9.0, report=report))
    told = "auto takes scatter at W=2 (why): 2.00 s, 0.50 GiB/s, 2.00 × the scatter floor (1.00 – 4.00)"
    assert conclusion(results) == [told]
    results.loads.extend(load("local", index, 0.5) for index in (1, 2, 3))
    assert conclusion(results) == [f"{told}; here local was faster, 0.50 s"]


def test_json(results: Results) -> None:
    lines = [json.loads(line) for line in json_lines(results)]
    assert [line["kind"] for line in lines] == ["operations", *["ratio"] * 4, "left out"]
    assert json.loads(load_line(results.loads[-1]))["mode"] == "fresh"


def test_plot_is_a_png(results: Results, tmp_path: Path) -> None:
    save_plot(tmp_path / "out.png", results, "title")
    data = (tmp_path / "out.png").read_bytes()
    assert data.startswith(b"\x89PNG")
    assert len(data) > 10_000


def check_floors(directories: dict[str, str]) -> dict[str, Any]:
    """On every rank: what the floors read and move, against a load."""
    mesh = init_mesh("cpu")
    found: dict[str, Any] = {}
    for kind, directory in directories.items():
        case, _ = bench_arms.make_case({"checkpoint": directory, "kind": kind})
        checkpoint = open_checkpoint(directory)

        def new(build: Any = case.build) -> torch.nn.Module:
            return shard_module(build(), mesh)

        loaded, floor = new(), new()
        load_checkpoint(loaded, directory)
        run = prepare_preadv_floor(case, floor)
        before = Counters.now()
        run()
        read_bytes = Counters.now().since(before).read_bytes
        real = new()
        materialize(real, torch.device("cpu"))
        planned = sum(item.view.nbytes for item in own_ranges(real, checkpoint))
        moved = count_operations(prepare_scatter_floor(case, new()))
        found[kind] = {
            "same": digest(floor) == digest(loaded),
            "read": read_bytes - planned,
            "planned": planned,
            "wire": wire_bytes(floor, checkpoint, dist.get_rank()),
            "shard": sum(local_tensor(parameter).nbytes for parameter in loaded.parameters()),
            "moved": moved,
        }
    return found


@pytest.mark.full
def test_floors_move_the_bytes_of_the_shards(tmp_path: Path) -> None:
    for kind, size_gib in (("dense", 0.01), ("odd", 0.022), ("fp32", 0.01)):
        make(kind, tmp_path / kind, size_gib)
    ranks = run_ranks(3, check_floors, {kind: str(tmp_path / kind) for kind in ("dense", "odd", "fp32")})
    for found in ranks:
        for kind in found:
            assert 0 <= found[kind]["read"] < 4096, "of the files the floor reads what it planned, and nothing else"
            assert set(found[kind]["moved"]) == {"scatter"}
        assert found["dense"]["same"]
        assert found["odd"]["same"]
        assert not found["fp32"]["same"], "files of another dtype are read into scratch"
        assert found["dense"]["planned"] == found["dense"]["wire"] == found["dense"]["shard"]
        # The wire carries the narrower dtype.
        assert found["fp32"]["wire"] == found["dense"]["wire"]
    total = sum(found["dense"]["planned"] for found in ranks)
    assert total == open_checkpoint(tmp_path / "dense").num_bytes


def count_loopback(descriptor: int) -> int:
    """Join a namespace in a thread of its own, send there, and count."""
    counted: list[int] = []

    def run() -> None:
        join_network(descriptor)
        before = Counters.now()
        with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as client:
            peer, _ = server.accept()
            with peer:
                client.sendall(bytes(100_000))
                left = 100_000
                while left:
                    left -= len(peer.recv(left))
        counted.append(Counters.now().since(before).loopback_bytes)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return counted[0]


def test_private_network_counts_its_own_bytes_only() -> None:
    with private_network() as descriptor:
        if descriptor is None:
            pytest.skip("a network namespace needs root")
        assert 100_000 <= count_loopback(os.dup(descriptor)) < 110_000
