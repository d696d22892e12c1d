"""The connections between driver and ranks: who may take part, what they carry, and what becomes of a broken one."""

from __future__ import annotations

import gc
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import ray

from raysharding import GroupBrokenError, GroupError, RendezvousError
from raysharding.distributed.reachability import listen
from raysharding.group.actor import CONCURRENCY_GROUPS, RankActor
from raysharding.group.line import GREETING_BYTES, KEY_BYTES, Line, RankLine, greeting
from raysharding.group.lines import _Door, _still_asked
from raysharding.group.ranks import Member, RankInfo
from tests.conftest import make_group

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with listen("127.0.0.1") as listener:
        yield listener


@pytest.fixture
def ends(listener: socket.socket) -> Iterator[tuple[Line, RankLine]]:
    """A driver's end and a rank's."""
    key = secrets.token_bytes(KEY_BYTES)
    there = RankLine(listener.getsockname(), key, 5.0)
    connection, _ = listener.accept()
    assert connection.recv(GREETING_BYTES) == greeting(key)
    here = Line(connection, key)
    yield here, there
    here.close()
    there.close()


def wait_for(is_so: Callable[[], bool], seconds: float = 10.0) -> None:
    until = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < until
        time.sleep(0.01)


def test_frames_arrive_whole_and_in_order_and_the_driver_never_waits(ends: tuple[Line, RankLine]) -> None:
    here, there = ends
    sent = [b"", b"x", secrets.token_bytes(3 << 20), secrets.token_bytes(8 << 20), b"last"]
    assert not [here.send(data) for data in sent][-1], "the kernel took 11 MB that nobody read"
    heard: list[bytes] = []
    reading = threading.Thread(target=lambda: heard.extend(there.receive() for _ in sent), daemon=True)
    reading.start()
    wait_for(here.flush)
    reading.join(10.0)
    assert heard == sent

    def answer() -> None:
        for data in sent:
            there.send(data)

    answering = threading.Thread(target=answer, daemon=True)
    answering.start()
    answers: list[bytes] = []
    while len(answers) < len(sent):
        answers += receive(here)
    assert answers == sent
    assert here.receive() == []


def receive(line: Line) -> list[bytes]:
    until = time.monotonic() + 10.0
    while not (found := line.receive()):
        assert time.monotonic() < until
        time.sleep(0.01)
    return found


def captured(listener: socket.socket, key: bytes, *sent: bytes) -> tuple[bytes, list[bytes]]:
    """What a rank says on the wire: greeting and frames."""
    there = RankLine(listener.getsockname(), key, 5.0)
    with listener.accept()[0] as connection:
        connection.settimeout(5.0)
        said = connection.recv(GREETING_BYTES)
        frames = []
        for data in sent:
            there.send(data)
            frames.append(connection.recv(1 << 16))
    there.close()
    return said, frames


def pair() -> tuple[socket.socket, socket.socket]:
    with listen("127.0.0.1") as listener:
        mine = socket.create_connection(listener.getsockname())
        return mine, listener.accept()[0]


@pytest.mark.parametrize("forge", ["changed", "repeated", "left out", "other key", "own words"])
def test_what_the_other_end_did_not_sign_ends_the_line(listener: socket.socket, forge: str) -> None:
    key, data = secrets.token_bytes(KEY_BYTES), [b"first frame", b"second frame"]
    _, (first, second) = captured(listener, key, *data)
    mine, theirs = pair()
    line = Line(theirs, secrets.token_bytes(KEY_BYTES) if forge == "other key" else key)
    spoiled = bytearray(first)
    spoiled[-1] ^= 1
    said = {"changed": bytes(spoiled), "repeated": first + first, "left out": second, "other key": first}
    if forge == "own words":  # what the driver said itself
        line.send(b"an order")
        said[forge] = mine.recv(1 << 16)
    with mine:
        mine.sendall(said[forge])
        with pytest.raises(ConnectionAbortedError, match="did not sign"):
            wait_for(lambda: line.receive() is None)
    line.close()


def test_strangers_do_not_get_in_and_hold_nobody_up(listener: socket.socket) -> None:
    key = secrets.token_bytes(KEY_BYTES)
    strangers = [socket.create_connection(listener.getsockname()) for _ in range(4)]
    strangers[0].sendall(b"GET / HTTP/1.1\r\n\r\n" + bytes(64))
    strangers[1].sendall(secrets.token_bytes(GREETING_BYTES))
    strangers[2].sendall(b"half a greeting")
    strangers[3].close()
    waiting = {greeting(key): 7}
    with _Door(listener) as door:
        guest = RankLine(listener.getsockname(), key, 5.0)
        begun = time.monotonic()
        while waiting:
            door.admit(waiting, 0.1)
            assert time.monotonic() - begun < 5.0
        found = door.take()
        assert list(found) == [7]
        again = RankLine(listener.getsockname(), key, 5.0)  # a greeting is good for once
        for _ in range(5):
            door.admit(waiting, 0.05)
        assert door.take() == {}
    line = Line(found[7], key)
    guest.send(b"hello")
    assert receive(line) == [b"hello"]
    for one in (guest, again, line):
        one.close()
    for stranger in strangers:
        stranger.close()


@pytest.mark.usefixtures("cluster")
def test_the_driver_listens_only_while_its_ranks_come(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def listening() -> set[tuple[str, int]]:
        found = psutil.Process().net_connections("tcp")
        return {(one.laddr.ip, one.laddr.port) for one in found if one.status == psutil.CONN_LISTEN}

    seen = []
    admit = _Door.admit

    def look_and_admit(door: _Door, waiting: dict[bytes, int], timeout_s: float) -> None:
        seen.append(listening())
        admit(door, waiting, timeout_s)

    monkeypatch.setattr(_Door, "admit", look_and_admit)
    before = listening()
    with make_group(checkpoint):
        assert listening() == before
    hosts = {host for host, _ in seen[0] - before}
    assert hosts == {ray.util.get_node_ip_address()}, "one address, not all"


@pytest.mark.usefixtures("cluster")
def test_a_rank_that_cannot_reach_the_driver_is_named() -> None:
    actor = ray.remote(concurrency_groups=CONCURRENCY_GROUPS)(RankActor).options(num_cpus=0).remote()
    try:
        with listen("127.0.0.1") as closed:
            address = closed.getsockname()
        ref = actor.connect.remote(0, address, secrets.token_bytes(KEY_BYTES), 5.0)
        ray.wait([ref], timeout=30.0)
        member = Member(RankInfo(3, "node", "10.0.0.3", 1, 0, "cpu"), actor, 0)
        with pytest.raises(RendezvousError, match=rf"rank 3 on 10.0.0.3 .* 127.0.0.1:{address[1]}: ConnectionRefused"):
            _still_asked({ref: member}, address)
    finally:
        ray.kill(actor, no_restart=True)


@pytest.mark.usefixtures("nothing_left")
def test_a_rank_that_lives_but_cannot_be_reached_is_lost(checkpoint: Path) -> None:
    """Its line breaks and Ray says nothing, because it is well."""

    def hang_up() -> None:
        import torch.distributed as dist

        from raysharding.group.line import RankLine

        if dist.get_rank() == 1:
            [line] = [one for one in gc.get_objects() if isinstance(one, RankLine)]
            threading.Timer(0.5, line.hang_up).start()

    with make_group(checkpoint) as group:
        group.call(hang_up)
        time.sleep(1.0)
        begun = time.monotonic()
        with pytest.raises(GroupError, match="connection to the driver broke") as caught:
            group.call(time.sleep, 0.05)
        assert 3.0 < time.monotonic() - begun < 9.0
        primary = caught.value.primary
        assert primary is not None
        assert (primary.rank, primary.kind) == (1, "died")
        with pytest.raises(GroupBrokenError):
            group.call(time.sleep, 0.0)
