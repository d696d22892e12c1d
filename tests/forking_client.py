"""What Ray starts in place of Python for a worker: has the server of `tests.forking` fork one, and ends.

Usage: forking_client.py ADDRESS PYTHON ARGUMENT...; runs without site-packages, so as to start in milliseconds. A
command line other than a worker's is run by PYTHON itself.
"""

import array
import json
import os
import resource
import socket
import sys
from pathlib import Path


def main(address: str, python: str, arguments: list[str]) -> None:
    """Send the server all that a process gets from the one which starts it."""
    argv = [argument for argument in arguments if argument != "-u"]
    if not argv or not argv[0].endswith(("setup_worker.py", "default_worker.py")):
        os.execv(python, [python, *arguments])
    order = {
        "argv": argv,
        "cwd": os.getcwd(),
        "environment": dict(os.environ),
        "nice": os.nice(0),
        "nofile": resource.getrlimit(resource.RLIMIT_NOFILE),
        "oom_score_adj": Path("/proc/self/oom_score_adj").read_text(),
    }
    files = [0, 1, 2, *(os.open(f"/proc/self/ns/{kind}", os.O_RDONLY) for kind in ("net", "uts", "mnt"))]
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.connect(address)
        data = json.dumps(order).encode() + b"\n"
        sent = connection.sendmsg([data], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", files))])
        connection.sendall(data[sent:])
        connection.recv(64)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3:])
