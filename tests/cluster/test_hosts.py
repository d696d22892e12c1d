"""Hosts of network namespaces: honest rates, names of their own, and nothing left behind. Need root, else skipped."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from cluster.local import hosts as hosts_module
from cluster.local.hosts import Host, Hosts, HostsError, why_unavailable
from tests.bench.wire import ROOT

REASON = why_unavailable()
pytestmark = pytest.mark.skipif(REASON is not None, reason=f"no network namespaces here: {REASON}")

RECEIVE = """
import socket
server = socket.create_server(("0.0.0.0", 5000))
print("listening", flush=True)
connection, _ = server.accept()
buffer = bytearray(1 << 20)
total = 0
while count := connection.recv_into(buffer):
    total += count
print(total)
"""

SEND = """
import socket, sys, time
start_s = time.monotonic()
with socket.create_connection((sys.argv[1], 5000)) as connection:
    for _ in range(int(sys.argv[2])):
        connection.sendall(bytes(1 << 20))
    connection.shutdown(socket.SHUT_WR)
    connection.recv(1)  # the receiver has read everything
print(time.monotonic() - start_s)
"""


def transfer(source: Host, target: Host, num_mib: int, watch: Callable[[], None] = lambda: None) -> float:
    """Send over TCP; returns seconds from before the connection to the last byte read. `watch` runs meanwhile."""
    receiver: Any = target.popen([sys.executable, "-c", RECEIVE], stdout=subprocess.PIPE, text=True)
    assert receiver.stdout.readline() == "listening\n"
    sender = source.popen([sys.executable, "-c", SEND, target.name, str(num_mib)], stdout=subprocess.PIPE, text=True)
    while sender.poll() is None:
        watch()
        time.sleep(0.05)
    assert int(receiver.communicate(timeout=30)[0]) == num_mib << 20
    return float(sender.communicate(timeout=30)[0])


def listening(host: Host, address: str, port: int) -> subprocess.Popen[str]:
    """A process that listens there."""
    code = f"import socket, time; s = socket.create_server(('{address}', {port})); print(1, flush=True); time.sleep(60)"
    server: Any = host.popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    server.stdout.readline()
    return server


def connect(address: str, port: int) -> list[str]:
    """The command that prints 0 if it connects."""
    return [sys.executable, "-c", f"import socket; print(socket.socket().connect_ex(('{address}', {port})))"]


def leftovers(pid: int) -> list[str]:
    """Namespaces and files of the hosts that a process made."""
    return [str(path) for root in ("/run/netns", "/etc/netns") for path in Path(root).glob(f"rs{pid}-*")]


def test_no_window_of_a_fifth_of_a_second_is_faster_than_the_rate_and_without_one_links_are_fast() -> None:
    rate_mbit, num_mib = 200, 20
    with Hosts(2, rate_mbit=rate_mbit) as hosts:
        for source, target in ((0, 1), (1, 0)):
            # Times before and after each look at the counter: what it counted came in between, at the most.
            looks: list[tuple[float, int, float]] = []

            def look(host: Host = hosts[source], looks: list[tuple[float, int, float]] = looks) -> None:
                before_s = time.monotonic()
                looks.append((before_s, host.link_bytes().sent, time.monotonic()))

            look()
            seconds = transfer(hosts[source], hosts[target], num_mib, look)
            look()
            assert 1.04 < (looks[-1][1] - looks[0][1]) / (num_mib << 20) < 1.06, "headers are 4.6 % at 1,500 bytes"
            for first, last in itertools.combinations(looks, 2):
                allowed_bytes = rate_mbit * 1e6 / 8 * (last[2] - first[0]) + hosts.burst_bytes
                assert last[1] - first[1] <= 1.001 * allowed_bytes
            assert hosts.burst_bytes < 0.03 * rate_mbit * 1e6 / 8 * 0.2
            need_s = 1.046 * (num_mib << 20) * 8e-6 / rate_mbit
            assert 0.95 * need_s < seconds < 1.6 * need_s
        hosts.set_rate(None)
        before = hosts[1].link_bytes()
        seconds = transfer(hosts[0], hosts[1], 64)
        assert 64 * 8.4 / seconds > 1_000, "Mbit/s"
        assert 64 << 20 < (hosts[1].link_bytes() - before).received < 1.1 * (64 << 20)


def test_a_host_has_a_name_a_loopback_and_paths_of_its_own_and_is_cut_off_and_comes_back(tmp_path: Path) -> None:
    own, path = tmp_path / "own", tmp_path / "path"
    own.mkdir()
    path.mkdir()
    (own / "file").touch()
    with Hosts(3) as hosts:
        assert [host.name for host in hosts] == [host.run("uname", "-n").strip() for host in hosts]
        assert hosts[2].run("getent", "hosts", "host0").split() == [hosts[0].address, "host0"]
        assert "inet6" not in hosts[0].run("ip", "address")
        own_server = listening(hosts[0], "127.0.0.1", 5001)
        assert hosts[1].run(*connect("127.0.0.1", 5001)) != "0\n"
        assert hosts[0].run(*connect("127.0.0.1", 5001)) == "0\n"

        hosts[1].show_alone(own, path)
        assert [host.run("ls", str(path)) for host in hosts] == ["", "file\n", ""]
        hosts[1].hide(path)
        assert hosts[1].run("ls", str(path)) == ""
        assert list(path.iterdir()) == []

        listening(hosts[1], "", 5002)
        assert hosts[0].run(*connect("host1", 5002)) == "0\n"
        hosts[1].cut()
        with pytest.raises(HostsError, match="longer than 2 s"):
            hosts[0].run(*connect("host1", 5002), timeout_s=2.0)
        hosts[1].mend()
        assert hosts[0].run(*connect("host1", 5002)) == "0\n"
        hosts[1].kill()
        assert hosts[1].pids() == []
        assert hosts[1].run("uname", "-n") == "host1\n", "it can start anew"
    assert own_server.returncode == -signal.SIGKILL


def test_nothing_is_left_after_an_error() -> None:
    pids = []
    before = leftovers(os.getpid())

    def fail_on_hosts() -> None:
        with Hosts(2, rate_mbit=100) as hosts:
            # A child that outlives the process that was started, in a session of its own.
            pids.append(int(hosts[1].run("setsid", "sh", "-c", "sleep 61 > /dev/null 2>&1 & echo $!")))
            assert is_sleeping(pids[0])
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail_on_hosts()
    assert leftovers(os.getpid()) == before, "the hosts of the other tests, where they ran first"
    assert not is_sleeping(pids[0])


def is_sleeping(pid: int) -> bool:
    """Whether a process is the `sleep 61` of the test, and not dead."""
    try:
        return "sleep" in Path(f"/proc/{pid}/cmdline").read_text()
    except FileNotFoundError:
        return False


def test_nothing_is_left_after_sigterm() -> None:
    code = "from cluster.local.hosts import Hosts\nimport time\nwith Hosts(2) as hosts:\n"
    code += " hosts[0].popen(['sleep', '60'])\n print('up', flush=True)\n time.sleep(60)"
    process: Any = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "up\n"
    assert leftovers(process.pid)
    process.terminate()
    assert process.wait(timeout=20) == 128 + signal.SIGTERM
    assert leftovers(process.pid) == []


def test_what_was_just_started_is_killed_on_its_way_in() -> None:
    """And the child that a process leaves behind which enters the host after the host was looked at."""
    with Hosts(1) as hosts:
        for _ in range(10):
            process = hosts[0].popen(["sleep", "60"])
            process.send_signal(signal.SIGSTOP)  # a busy machine: it is in no namespace of the host yet
            hosts[0].kill(timeout_s=5)
            assert process.returncode == -signal.SIGKILL

        process = hosts[0].popen(["sh", "-c", "sleep 62 & exit 0"])
        process.send_signal(signal.SIGSTOP)
        run = hosts_module._run
        looked: list[tuple[str, ...]] = []

        def look_and_go_on(*command: str) -> str:
            said = run(*command)
            if not looked:
                looked.append(command)
                process.send_signal(signal.SIGCONT)
                process.wait(5)
            return said

        with mock.patch.object(hosts_module, "_run", look_and_go_on):
            hosts[0].kill(timeout_s=5)
        assert looked[0][:3] == ("ip", "netns", "pids")
        assert hosts[0].pids() == []


def test_a_failing_command_is_named_and_leaves_nothing() -> None:
    before = leftovers(os.getpid())
    with pytest.raises(HostsError, match=r"`tc .* failed with \d+: .+"), Hosts(2, rate_mbit=1e-9):
        pass
    assert leftovers(os.getpid()) == before
    with pytest.raises(ValueError, match="num_hosts=0"):
        Hosts(0)
    with pytest.raises(ValueError, match="rate_mbit=-1"):
        Hosts(2, rate_mbit=-1)
