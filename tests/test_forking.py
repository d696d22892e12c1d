"""Forked workers: their server outlives the clients that Ray kills while it starts workers."""

from __future__ import annotations

import socket
import subprocess
from pathlib import Path

from tests.clock import wait_until


def test_a_client_that_goes_away_leaves_the_server_alive(worker_python: Path, tmp_path: Path) -> None:
    script, made = tmp_path / "setup_worker.py", tmp_path / "made"
    script.write_text(f"open({str(made)!r}, 'w').close()")
    address = next(word for word in worker_python.read_text().split() if word.endswith("/socket"))
    for sent in (b"", b'{"argv": '):
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
            client.connect(address)
            client.sendall(sent)
    subprocess.run([worker_python, script], check=True, timeout=30)
    wait_until(made.exists, 30, "a worker is forked")
