"""`RAY_USE_TLS=1` encrypts what a driver sends to its ranks: shown by a capture of the wire between two hosts."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from cluster.local.hosts import INTERFACE, Host, Hosts
from cluster.local.ray_hosts import RayHosts
from raysharding import Split
from raysharding.units import KIB, MIB
from tests.cluster import jobs
from tests.cluster.conftest import joined, require_hosts

pytestmark = [pytest.mark.full, pytest.mark.timeout(240), pytest.mark.usefixtures("worker_python")]

MARKERS = {name: f"<plain:{name:-<16}>".encode() for name in ("argument", "large argument", "batch", "large batch")}
"""What is sent → 24 bytes that it consists of, which are six finite numbers of 32 bits, too."""
SMALL, LARGE = 4 * KIB, 4 * MIB

CAPTURE = """
import socket, sys
wire = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3))
wire.setsockopt(socket.SOL_SOCKET, 33, 256 << 20)  # SO_RCVBUFFORCE
wire.bind((sys.argv[1], 0))
with open(sys.argv[2], "wb") as file:
    print("ready", flush=True)
    while True:
        file.write(wire.recv(1 << 17))
        file.flush()
"""


def send() -> None:
    """Send all that is in `MARKERS` to the ranks."""
    for name in ("argument", "large argument"):
        whole = MARKERS[name] * ((LARGE if "large" in name else SMALL) // 24)
        assert jobs.group().call(len, whole) == [len(whole)] * 2
    for name in ("batch", "large batch"):
        rows = (LARGE if "large" in name else SMALL) // 32 // 3 * 3
        values = torch.frombuffer(bytearray(MARKERS[name] * (rows * 32 // 24)), dtype=torch.float32).reshape(rows, 8)
        assert jobs.group().forward(Split(values)).shape == (rows, 4)


def tls(folder: Path, hosts: Hosts) -> dict[str, str]:
    """Make a certificate of all hosts; returns the variables that make Ray use it."""
    key, certificate = folder / "key.pem", folder / "certificate.pem"
    names = ",".join(["DNS:localhost", "IP:127.0.0.1", *(f"IP:{host.address}" for host in hosts)])
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=ray"]
    command += ["-addext", f"subjectAltName={names}", "-keyout", str(key), "-out", str(certificate)]
    subprocess.run(command, check=True, capture_output=True)
    files = {"SERVER_CERT": certificate, "SERVER_KEY": key, "CA_CERT": certificate}
    return {"RAY_USE_TLS": "1", **{f"RAY_TLS_{name}": str(path) for name, path in files.items()}}


@contextmanager
def captured(host: Host, path: Path) -> Iterator[None]:
    """Write all packets from and to a host into a file."""
    capture: Any = host.popen([sys.executable, "-c", CAPTURE, INTERFACE, str(path)], stdout=subprocess.PIPE)
    assert capture.stdout.readline() == b"ready\n"
    yield
    time.sleep(0.5)
    capture.kill()
    capture.wait(10)


@pytest.mark.parametrize("encrypted", [False, True], ids=["plain", "tls"])
def test_commands_and_batches_are_on_the_wire_as_ray_is_set(encrypted: bool, tmp_path: Path) -> None:
    require_hosts("openssl")
    save_file(jobs.make_mlp()().state_dict(), tmp_path / "model.safetensors")
    with Hosts(2) as hosts:
        environment = tls(tmp_path, hosts) if encrypted else {}
        with (
            RayHosts(list(hosts), cpus_per_host=2, logs_to_driver=False, environment=environment) as rays,
            joined(rays, hosts[0]) as driver,
        ):
            with captured(hosts[1], tmp_path / "wire"):
                elsewhere: dict[str, Any] = {"world_size": 2, "strategy": "PACK", "labels": {"role": "worker"}}
                ranks = driver.run(jobs.start, str(tmp_path / "model.safetensors"), **elsewhere)
                assert {rank.node_ip for rank in ranks} == {hosts[1].address}, "all that is sent passes the wire"
                driver.run(send)
            driver.run(jobs.stop)
    wire = (tmp_path / "wire").read_bytes()
    assert len(wire) > 2 * LARGE
    assert [name for name, marker in MARKERS.items() if marker in wire] == ([] if encrypted else list(MARKERS))
