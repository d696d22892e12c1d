"""Ranks of one group that share a device: which NCCL can, and who says so."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from raysharding.distributed.comm import join_process_group, rendezvous, serve_store, share_device
from raysharding.distributed.comm.device import passes_shared_device, why_unshareable
from tests.spawn import run_ranks

VARIABLE = "NCCL_MULTI_RANK_GPU_ENABLE"


def test_an_older_nccl_is_refused_by_version_and_cures() -> None:
    why = why_unshareable((2, 28, 9))
    assert why is not None
    assert why.startswith("NCCL 2.28.9 refuses that, 2.30 does not: install a newer nvidia-nccl package, or ")
    assert "Placement(gpus_per_rank=1)" in why
    assert "device='cpu'" in why


def test_the_variable_of_the_user_is_respected(monkeypatch: pytest.MonkeyPatch) -> None:
    for value, expected in (("1", None), ("0", f"{VARIABLE}=0 forbids that to NCCL: set it to 1, or give each rank")):
        monkeypatch.setenv(VARIABLE, value)
        why = why_unshareable((2, 30, 7))
        assert why is None if expected is None else str(why).startswith(expected), why


def test_other_backends_are_asked_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    device = torch.device("xpu", 0)
    share_device(device)
    assert VARIABLE not in os.environ
    assert why_unshareable(None) is None
    # Theirs may refuse two ranks on a device: a copy between groups goes through host memory.
    assert not passes_shared_device(device)


servers: list[Any] = []
"""Stores of rank 0: as in a rank's actor they outlive a refusal, which the other rank may not have read yet."""


def join(folder: Path, number: int, index: int, why: str | None) -> None:
    """Join the next group of two ranks, on the device of an index."""
    rank, file, server = int(os.environ["RANK"]), folder / f"store-{number}", None
    if rank == 0:
        server, address = serve_store("127.0.0.1", timeout_s=30.0)
        servers.append(server)
        (folder / "written").write_text(f"{address.port} {address.prefix}")
        (folder / "written").rename(file)
    until = time.monotonic() + 30
    while not file.exists() and time.monotonic() < until:
        time.sleep(0.01)
    port, prefix = file.read_text().split()
    rendezvous.why_unshareable = lambda version: why  # as that NCCL would say
    address = rendezvous.StoreAddress("127.0.0.1", int(port), prefix)
    options: dict[str, Any] = {"node_ip": "127.0.0.1", "rendezvous_s": 30.0, "timeout_s": 30.0, "server": server}
    join_process_group(address, rank=rank, world_size=2, device=torch.device("sim", index), **options)


def joins(folder: Path) -> list[str]:
    """Try to join on one device with an NCCL that cannot, on one each, and on one device with a backend that can."""
    rank = dist.get_rank()
    os.environ["RANK"] = str(rank)
    outcomes: list[str] = []
    # The NCCL of one node is too old: all ranks refuse.
    old = "NCCL 2.28.9 refuses"
    tries: list[tuple[int, Any]] = [(0, old if rank else None), (rank, old), (0, None)]
    for number, (index, why) in enumerate(tries):
        dist.destroy_process_group() if dist.is_initialized() else None
        torch.get_device_module("sim").set_device(index)
        try:
            join(folder, number, index, why)
        except ValueError as error:
            outcomes.append(f"{dist.is_initialized()} {error}")
            continue
        value = torch.ones(1, device=torch.device("sim", index))
        dist.all_reduce(value)  # both ranks have joined
        outcomes.append(f"{value.item():g}")
    return outcomes


def test_all_ranks_refuse_a_shared_device_before_the_group_is_made(tmp_path: Path) -> None:
    refused = "False ranks 0, 1 share one GPU: NCCL 2.28.9 refuses"
    assert run_ranks(2, joins, tmp_path, device="sim") == [[refused, "2", "2"]] * 2
