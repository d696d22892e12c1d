"""Rendezvous without Ray: the store listens on one address, and ranks that do not come are named."""

from __future__ import annotations

import os
import socket
import struct
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from raysharding import ShardedModelGroup, current_worker
from raysharding.distributed.comm.rendezvous import (
    StoreAddress,
    collective_counters,
    interface_of,
    join_process_group,
    leave_process_group,
    serve_store,
)
from raysharding.errors import RendezvousError
from raysharding.torch_internals import num_process_groups
from tests.clock import now
from tests.distributed.comm.test_ranks import gets_in, listening

HOST = "127.0.0.1"


def listening_on(port: int) -> list[str]:
    """Return the addresses on which this machine listens at a port, from the kernel's own table."""
    found = []
    for table, family in (("/proc/net/tcp", socket.AF_INET), ("/proc/net/tcp6", socket.AF_INET6)):
        if not os.path.exists(table):
            continue
        with open(table) as lines:
            rows = [line.split() for line in lines][1:]
        for row in rows:
            address, _, row_port = row[1].partition(":")
            if row[3] == "0A" and int(row_port, 16) == port:
                words = [struct.pack("<I", int(address[at : at + 8], 16)) for at in range(0, len(address), 8)]
                found.append(socket.inet_ntop(family, b"".join(words)))
    return found


def join(address: StoreAddress, server: Any, world_size: int, rendezvous_s: float) -> None:
    join_process_group(
        address,
        rank=0,
        world_size=world_size,
        device=torch.device("cpu"),
        node_ip=HOST,
        rendezvous_s=rendezvous_s,
        timeout_s=10.0,
        server=server,
    )


@pytest.fixture(autouse=True)
def same_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.setenv(name, "x")
        monkeypatch.delenv(name)


def test_the_store_listens_on_one_address_and_serves_a_group() -> None:
    server, address = serve_store(HOST, timeout_s=5.0)
    assert listening_on(address.port) == [HOST]
    join(address, server, world_size=1, rendezvous_s=5.0)
    try:
        tensor = torch.ones(3)
        dist.all_reduce(tensor)  # alone in the group: nobody to wait for
        assert tensor.tolist() == [1.0] * 3
        assert os.environ["GLOO_SOCKET_IFNAME"] == "lo"
    finally:
        leave_process_group()
    assert not dist.is_initialized()


def test_missing_ranks_are_named_at_the_deadline() -> None:
    server, address = serve_store(HOST, timeout_s=5.0)
    begun = now()
    with pytest.raises(RendezvousError, match="did not arrive: 1, 2") as caught:
        join(address, server, world_size=3, rendezvous_s=1.0)
    assert caught.value.missing_ranks == (1, 2)
    assert now() - begun < 3.0


def test_a_store_that_is_not_there_is_rank_0_missing() -> None:
    with socket.create_server((HOST, 0)) as closed:
        port = closed.getsockname()[1]
    with pytest.raises(RendezvousError, match="cannot reach rank 0's store") as caught:
        join_process_group(
            StoreAddress(HOST, port, "x"),
            rank=1,
            world_size=2,
            device=torch.device("cpu"),
            node_ip=HOST,
            rendezvous_s=1.0,
            timeout_s=10.0,
        )
    assert caught.value.missing_ranks == (0,)


def test_a_gloo_that_cannot_connect_is_a_rendezvous_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "none0")
    server, address = serve_store(HOST, timeout_s=5.0)
    with pytest.raises(RendezvousError, match=r"met all ranks at .* but cannot connect") as caught:
        join(address, server, world_size=1, rendezvous_s=5.0)
    assert not isinstance(caught.value.__cause__, dist.DistError), "gloo's own errors are plain"


def test_an_address_of_another_machine_is_refused() -> None:
    with pytest.raises(RendezvousError, match=r"cannot listen on 203\.0\.113\.7"):
        serve_store("203.0.113.7", timeout_s=1.0)


def test_the_interface_is_found_by_its_address_and_the_users_choice_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    assert interface_of(HOST) == "lo"
    assert interface_of("203.0.113.7") is None
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "mine")
    server, address = serve_store(HOST, timeout_s=5.0)
    with pytest.raises(RendezvousError):
        join(address, server, world_size=2, rendezvous_s=0.2)
    assert os.environ["GLOO_SOCKET_IFNAME"] == "mine"


def descriptors(pid: int) -> Counter[str]:
    """Return what a process holds open; a socket bears a number that no other has."""
    found: Counter[str] = Counter()
    for name in os.listdir(f"/proc/{pid}/fd"):
        with suppress(FileNotFoundError):  # closed since it was listed
            found[os.readlink(f"/proc/{pid}/fd/{name}")] += 1
    return found


def test_a_rank_lets_nobody_in_when_all_have_met(group: ShardedModelGroup, tmp_path: Path) -> None:
    """Of its process group, and of that of saves in the background. Rank 0 serves the store besides."""

    def num_groups() -> int:
        """Process groups, and those that span another group, to which a test before has copied."""
        return num_process_groups() + len(current_worker()._copies)

    group.save(tmp_path / "saved", async_save=True)
    group.wait_for_save()
    ends = listening(group.ranks[1].pid)
    assert len(ends) == group.call(num_groups)[1] >= 2
    before = descriptors(group.ranks[1].pid)
    assert not [end for end in ends if gets_in(end)]
    # Not their number: another of the rank's own may end meanwhile, and would hide a stranger's.
    assert not descriptors(group.ranks[1].pid) - before
    assert group.call(max, 1, 2) == [2, 2]


def test_a_backend_that_does_not_count_its_collectives_is_left_out() -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        assert dist.group.WORLD is not None
        assert collective_counters(dist.group.WORLD) == []
    finally:
        dist.destroy_process_group()
