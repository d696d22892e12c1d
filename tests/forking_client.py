"""What Ray starts in place of Python for a worker: has the server of `tests.forking` fork one, and ends.

Usage: forking_client.py ADDRESS PYTHON PROGRAM ARGUMENT...; runs without site-packages, so as to start in
milliseconds. PROGRAM is what ran this. A command line other than a worker's is run by PYTHON itself.
"""

import array
import json
import os
import re
import resource
import socket
import sys
from pathlib import Path

CONTEXT = "--serialized-runtime-env-context="
PLAIN: dict[str, object] = {"command_prefix": [], "override_worker_entrypoint": None}


def main(address: str, python: str, program: str, arguments: list[str]) -> None:
    """Send the server all that a process gets from the one which starts it."""
    argv = set_up([argument for argument in arguments if argument != "-u"], program)
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


def set_up(argv: list[str], program: str) -> list[str]:
    """Do what Ray's `setup_worker.py` does before it has this program run the worker, without a process for it."""
    given = [argument[len(CONTEXT) :] for argument in argv if argument.startswith(CONTEXT)]
    if not given or not argv[0].endswith("setup_worker.py"):
        return argv
    context = json.loads(given[0])
    if context["py_executable"] != program or any(context[name] != value for name, value in PLAIN.items()):
        return argv
    for name, value in context["env_vars"].items():
        os.environ[name] = re.sub(r"\$\{[A-Z0-9_]+\}", "", os.path.expandvars(value))
    return [argument for argument in argv[1:] if not argument.startswith((CONTEXT, "--language="))]


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], sys.argv[4:])
