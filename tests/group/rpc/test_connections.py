"""The connections between driver and ranks: who may take part, what they carry, and what becomes of a broken one."""

from __future__ import annotations

import contextlib
import gc
import os
import random
import re
import resource
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import ray

from raysharding import GroupBrokenError, GroupError, Placement, RendezvousError, ShardedModelGroup
from raysharding.cli import main
from raysharding.distributed.comm.rendezvous import listen, serve_store
from raysharding.group import GroupState
from raysharding.group.actors.actor import REMOTE_RANK_ACTOR
from raysharding.group.actors.title import Title
from raysharding.group.actors.work_thread import WorkThread
from raysharding.group.ranks import Member, RankInfo
from raysharding.group.rpc.connection import (
    HANDSHAKE_BYTES,
    KEY_BYTES,
    MAX_PENDING,
    Connection,
    Handshakes,
    _pending,
    connect_to_driver,
    handshake,
)
from tests.conftest import make_group
from tests.spawn import run_ranks

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with listen("127.0.0.1") as listener:
        yield listener


@pytest.fixture
def ends(listener: socket.socket) -> Iterator[tuple[Connection, Connection]]:
    """The driver's end and a rank's."""
    key = secrets.token_bytes(KEY_BYTES)
    there = connect_to_driver(listener.getsockname(), key, 5.0)
    sock, _ = listener.accept()
    assert sock.recv(HANDSHAKE_BYTES) == handshake(key)
    here = Connection(sock, key, is_driver=True)
    yield here, there
    here.close()
    there.close()


def wait_for(is_so: Callable[[], bool], seconds: float = 10.0) -> None:
    until = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < until
        time.sleep(0.01)


def test_messages_arrive_whole_and_in_order_and_the_driver_never_waits(ends: tuple[Connection, Connection]) -> None:
    here, there = ends
    sent = [b"", b"x", secrets.token_bytes(3 << 20), secrets.token_bytes(8 << 20), b"last"]
    assert not [here.send(data) for data in sent][-1], "the kernel took 11 MB that nobody read"
    heard: list[bytes] = []

    def read() -> None:
        while len(heard) < len(sent):
            heard.extend(there.receive())

    reading = threading.Thread(target=read, daemon=True)
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


def receive(connection: Connection) -> list[bytes]:
    until = time.monotonic() + 10.0
    while not (found := connection.receive()):
        assert time.monotonic() < until
        time.sleep(0.01)
    return found


def captured(listener: socket.socket, key: bytes, *sent: bytes) -> tuple[bytes, list[bytes]]:
    """What a rank sends on the wire: handshake and messages."""
    there = connect_to_driver(listener.getsockname(), key, 5.0)
    with listener.accept()[0] as sock:
        sock.settimeout(5.0)
        said = sock.recv(HANDSHAKE_BYTES)
        messages = []
        for data in sent:
            there.send(data)
            messages.append(sock.recv(1 << 16))
    there.close()
    return said, messages


def pair() -> tuple[socket.socket, socket.socket]:
    with listen("127.0.0.1") as listener:
        mine = socket.create_connection(listener.getsockname())
        return mine, listener.accept()[0]


@pytest.mark.parametrize("forge", ["changed", "repeated", "left out", "other key", "own words"])
def test_what_the_other_end_did_not_sign_closes_the_connection(listener: socket.socket, forge: str) -> None:
    key, data = secrets.token_bytes(KEY_BYTES), [b"first message", b"second message"]
    _, (first, second) = captured(listener, key, *data)
    mine, theirs = pair()
    connection = Connection(theirs, secrets.token_bytes(KEY_BYTES) if forge == "other key" else key, is_driver=True)
    spoiled = bytearray(first)
    spoiled[-1] ^= 1
    said = {"changed": bytes(spoiled), "repeated": first + first, "left out": second, "other key": first}
    if forge == "own words":  # what the driver itself has sent
        connection.send(b"a command")
        said[forge] = mine.recv(1 << 16)
    with mine:
        mine.sendall(said[forge])
        with pytest.raises(ConnectionAbortedError, match="did not sign"):
            wait_for(lambda: connection.receive() is None)
    connection.close()


def test_strangers_do_not_get_in_and_hold_nobody_up(listener: socket.socket) -> None:
    key = secrets.token_bytes(KEY_BYTES)
    strangers = [socket.create_connection(listener.getsockname()) for _ in range(4)]
    strangers[0].sendall(b"GET / HTTP/1.1\r\n\r\n" + bytes(64))
    strangers[1].sendall(secrets.token_bytes(HANDSHAKE_BYTES))
    strangers[2].sendall(b"half a handshake")
    strangers[3].close()
    with Handshakes(listener, [secrets.token_bytes(KEY_BYTES), key]) as handshakes:
        guest = connect_to_driver(listener.getsockname(), key, 5.0)
        begun = time.monotonic()
        while 1 in handshakes.missing.values():
            handshakes.poll(0.1)
            assert time.monotonic() - begun < 5.0
        found = handshakes.take()
        assert list(found) == [1]
        again = connect_to_driver(listener.getsockname(), key, 5.0)  # a key is good for one connection
        for _ in range(5):
            handshakes.poll(0.05)
        assert handshakes.take() == {}
    guest.send(b"hello")
    assert receive(found[1]) == [b"hello"]
    for one in (guest, again, found[1]):
        one.close()
    for stranger in strangers:
        stranger.close()


@contextlib.contextmanager
def descriptors_used_up() -> Iterator[list[int]]:
    """Leave this process no descriptor; who closes one of the list has that one."""
    before, taken = resource.getrlimit(resource.RLIMIT_NOFILE), [os.dup(0)]
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + 32, before[1]))
    try:
        with contextlib.suppress(OSError):
            while True:
                taken.append(os.dup(0))
        yield taken
    finally:
        for one in taken:
            os.close(one)
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_strangers_that_use_up_the_descriptors_keep_nobody_out() -> None:
    # In a process of its own: the threads of Ray that this one has need descriptors, too.
    run_ranks(1, let_in_without_descriptors)


def let_in_without_descriptors() -> None:
    """A guest gets in where strangers hold all descriptors but a few."""
    with listen("127.0.0.1") as listener:
        key = secrets.token_bytes(KEY_BYTES)
        strangers = [socket.create_connection(listener.getsockname()) for _ in range(200)]
        guest = connect_to_driver(listener.getsockname(), key, 5.0)
        with Handshakes(listener, [key]) as handshakes:
            with descriptors_used_up() as taken:
                begun, worked = time.monotonic(), time.process_time()
                while time.monotonic() - begun < 1.0:
                    handshakes.poll(0.1)
                assert time.process_time() - worked < 0.5, "it spins"
                assert "Too many open files" in str(handshakes.error)
                for _ in range(4):
                    os.close(taken.pop())
                while handshakes.missing:
                    handshakes.poll(0.1)
                    assert time.monotonic() - begun < 10.0
            [connection] = handshakes.take().values()
        guest.close()
        connection.close()
        for stranger in strangers:
            stranger.close()


def test_strangers_are_few_and_do_not_stay(listener: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    strangers = [socket.create_connection(listener.getsockname()) for _ in range(200)]
    before = psutil.Process().num_fds()
    with Handshakes(listener, []) as handshakes:
        for _ in range(200):
            handshakes.poll(0.1)
        assert psutil.Process().num_fds() - before <= MAX_PENDING + 2
        monkeypatch.setattr("raysharding.group.rpc.connection.HANDSHAKE_S", 0.0)
        handshakes.poll(0.1)
        assert psutil.Process().num_fds() - before <= 2
    for stranger in strangers:
        stranger.close()


@pytest.mark.usefixtures("cluster")
def test_the_driver_listens_only_while_its_ranks_come(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def listening() -> set[tuple[str, int]]:
        found = psutil.Process().net_connections("tcp")
        return {(one.laddr.ip, one.laddr.port) for one in found if one.status == psutil.CONN_LISTEN}

    seen = []
    poll = Handshakes.poll

    def look_and_poll(handshakes: Handshakes, timeout_s: float) -> None:
        seen.append(listening())
        poll(handshakes, timeout_s)

    monkeypatch.setattr(Handshakes, "poll", look_and_poll)
    before = listening()
    with make_group(checkpoint):
        assert listening() == before
    hosts = {host for host, _ in seen[0] - before}
    assert hosts == {ray.nodes()[0]["NodeManagerAddress"]}, "one address, not all"


@contextlib.contextmanager
def taken(num_ports: int) -> Iterator[list[socket.socket]]:
    """Listen on consecutive ports; closing a listener frees its port."""
    with contextlib.ExitStack() as stack:
        listeners: list[socket.socket] = []
        while len(listeners) < num_ports:
            first = random.randrange(10_000, 30_000)  # below those that the kernel chooses
            stack.close()
            with contextlib.suppress(OSError):
                opened = (socket.create_server((own_address(), port)) for port in range(first, first + num_ports))
                listeners = [stack.enter_context(listener) for listener in opened]
        yield listeners


def own_address() -> str:
    return str(ray.nodes()[0]["NodeManagerAddress"])


def listening(process: psutil.Process) -> set[int]:
    return {one.laddr.port for one in process.net_connections("tcp") if one.status == psutil.CONN_LISTEN}


@pytest.mark.usefixtures("cluster")
def test_the_driver_and_the_store_listen_in_the_port_range(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: set[int] = set()
    poll = Handshakes.poll

    def look_and_poll(handshakes: Handshakes, timeout_s: float) -> None:
        seen.update(listening(psutil.Process()))
        poll(handshakes, timeout_s)

    def fail_alone() -> None:
        import torch.distributed as dist

        if dist.get_rank() == 1:
            raise ValueError("on rank 1")
        dist.barrier()  # which rank 1 does not enter: the driver ends it

    monkeypatch.setattr(Handshakes, "poll", look_and_poll)
    with taken(3) as listeners:
        ports = [listener.getsockname()[1] for listener in listeners]
        for listener in listeners[1:]:
            listener.close()
        before = listening(psutil.Process())
        with make_group(checkpoint, placement=Placement(port_range=(ports[0], ports[-1]))) as group:
            assert seen - before == {ports[1]}, "the first one that is free"
            rank_0 = psutil.Process(group.ranks[0].pid)
            assert listening(rank_0) & set(ports) == {ports[1]}, (
                "the driver listens no more, and the store took its port"
            )
            with pytest.raises(GroupError, match="rank 1 raised"):
                group.call(fail_alone)
            assert group.restart().how == "in place"
            assert ports[2] in listening(rank_0), "the old store was still open"
            assert group.call(max, 1, 2) == [2, 2]


@pytest.mark.usefixtures("nothing_left")
def test_a_port_range_that_is_full_is_the_error(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with taken(2) as listeners:
        first, last = (listener.getsockname()[1] for listener in listeners)
        said = rf"the driver cannot listen on .*: every port from {first} to {last} is taken; set Placement.port_range"
        with pytest.raises(RendezvousError, match=said):
            make_group(checkpoint, placement=Placement(port_range=(first, last)))
        assert main(["doctor", "--port-range", f"{first}-{last}"]) == 1
        assert re.search(said, capsys.readouterr().out)
        with pytest.raises(RendezvousError, match="rank 0 cannot listen") as caught:
            serve_store(own_address(), timeout_s=5.0, port_range=(first, last))
        assert caught.value.missing_ranks == (0,)


@pytest.mark.usefixtures("cluster")
def test_a_rank_that_cannot_reach_the_driver_is_named() -> None:
    actor = REMOTE_RANK_ACTOR.options(num_cpus=0).remote(Title("model", "group a", 0))
    try:
        with listen("127.0.0.1") as closed:
            address = closed.getsockname()
        ref = actor.connect.remote(0, address, secrets.token_bytes(KEY_BYTES), 5.0)
        ray.wait([ref], timeout=30.0)
        member = Member(RankInfo(3, "node", "10.0.0.3", 1, 0, "cpu"), actor, 0)
        with pytest.raises(RendezvousError, match=rf"rank 3 on 10.0.0.3 .* 127.0.0.1:{address[1]}: ConnectionRefused"):
            _pending({ref: member}, address)
    finally:
        ray.kill(actor, no_restart=True)


def disconnect_soon() -> Callable[[], None]:
    """A function that breaks rank 1's connection after a while, and pickles by value."""

    def disconnect() -> None:
        import gc
        import threading

        import torch.distributed as dist

        from raysharding.group.rpc.connection import Connection

        if dist.get_rank() == 1:
            [connection] = [one for one in gc.get_objects() if isinstance(one, Connection)]
            threading.Timer(0.5, connection.shutdown).start()

    return disconnect


@pytest.mark.usefixtures("nothing_left")
def test_a_rank_that_lives_but_cannot_be_reached_is_lost(checkpoint: Path) -> None:
    """Its connection breaks and Ray says nothing, because it is well: it is stopped, not left on its CPU."""
    with make_group(checkpoint) as group:
        group.call(disconnect_soon())
        time.sleep(0.7)
        begun = time.monotonic()
        with pytest.raises(GroupError, match="its connection to the driver had broken before") as caught:
            group.call(time.sleep, 0.05)
        assert time.monotonic() - begun < 3.5
        primary = caught.value.primary
        assert primary is not None
        assert (primary.rank, primary.kind) == (1, "died")
        with pytest.raises(GroupBrokenError):
            group.call(time.sleep, 0.0)


def raising(kind: str) -> Callable[[], None]:
    def fail() -> None:
        import asyncio

        class Odd(RuntimeError):
            def __str__(self) -> str:
                raise LookupError("no words")

        errors: dict[str, BaseException] = {
            "cancelled": asyncio.CancelledError(),
            "interrupt": KeyboardInterrupt("on a rank"),
            "exit": SystemExit(3),
            "no words": Odd(),
            "large": ValueError("x" * (80 << 20)),
        }
        if kind == "cause without words":
            raise ValueError("has a cause") from Odd()
        raise errors[kind]

    return fail


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("cancelled", "CancelledError"),
        ("interrupt", "KeyboardInterrupt"),
        ("exit", "SystemExit"),
        ("no words", "its __str__ raised LookupError"),
        ("cause without words", "has a cause"),
        ("large", "ValueError: xxx"),
    ],
)
def test_whatever_a_rank_raises_comes_back_at_once(group: ShardedModelGroup, kind: str, expected: str) -> None:
    begun = time.monotonic()
    with pytest.raises(GroupError, match=expected) as caught:
        group.call(raising(kind))
    assert time.monotonic() - begun < 5.0
    assert len(str(caught.value)) < 1 << 20
    assert group.state is GroupState.READY
    assert group.call(max, 1, 2) == [2, 2]


@pytest.mark.usefixtures("nothing_left")
def test_a_death_is_seen_though_a_forked_child_lives_on(checkpoint: Path) -> None:
    """The child has copies of Ray's connections, so Ray does not see it; its copy of the connection closes itself."""

    def fork_and_die() -> int | None:
        import os
        import signal
        import threading
        import time

        import torch.distributed as dist

        if dist.get_rank() == 0:
            time.sleep(60.0)
            return None
        child = os.fork()
        if child == 0:
            time.sleep(20.0)
            os._exit(0)
        threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGKILL)).start()
        time.sleep(60.0)
        return None

    with make_group(checkpoint) as group:
        begun = time.monotonic()
        with pytest.raises(GroupError, match="rank 1 died"):
            group.call(fork_and_die)
        assert time.monotonic() - begun < 4.5


def test_a_connection_of_an_earlier_driver_does_not_displace_a_later_one(listener: socket.socket) -> None:
    worker = WorkThread(lambda frame, beside: b"done: " + frame)
    key = secrets.token_bytes(KEY_BYTES)
    later = connect_to_driver(listener.getsockname(), key, 5.0)
    sock, _ = listener.accept()
    sock.recv(HANDSHAKE_BYTES)
    worker.obey(2, later)
    worker.obey(1, connect_to_driver(listener.getsockname(), key, 5.0))
    connection = Connection(sock, key, is_driver=True)
    connection.send(b"command")
    assert receive(connection) == [b"done: command"]
    connection.close()


def test_a_message_that_nobody_would_send_is_not_waited_for(listener: socket.socket) -> None:
    mine, theirs = pair()
    connection = Connection(theirs, secrets.token_bytes(KEY_BYTES), is_driver=True)
    mine.sendall((1 << 40).to_bytes(8, "big") + bytes(32))
    with pytest.raises(ConnectionAbortedError, match="was announced"):
        wait_for(lambda: connection.receive() is None)
    mine.close()
    connection.close()


@pytest.mark.usefixtures("cluster")
def test_descriptors_are_back_when_a_group_is_closed(checkpoint: Path) -> None:
    with make_group(checkpoint):
        pass
    before = psutil.Process().num_fds()
    for _ in range(2):
        with make_group(checkpoint):
            pass
        gc.collect()
        assert psutil.Process().num_fds() <= before + 1
