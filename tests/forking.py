"""Ray workers forked from one process that has imported torch, transformers and the rest already.

A rank actor spends some 5 s of a core on imports, and the suites start over a thousand. With `worker_python()` Ray
starts its workers as ever, but with a Python that hands its command line, environment, files, priority and namespaces
to a server; the server forks, and the child runs Ray's own script as if it had been started with all that: a real
process of its own, which only finds its modules imported. Measured: a group of three ranks costs 2 s of CPU, not 22.

Ray knows a worker by the pid that it registers with, so that the process Ray has started need not be that one.
"""

from __future__ import annotations

import array
import contextlib
import ctypes
import importlib
import json
import os
import resource
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import psutil

from tests.spawn import PRELOADED

ROOT = Path(__file__).resolve().parents[1]
VARIABLE = "RAYSHARDING_TESTS_WORKER_PYTHON"
"""Tells drivers in processes of their own which Python their workers are to have."""

DEVICE = "RAYSHARDING_TESTS_DEVICE"
"""Variable of a worker's environment: `sim` for workers that have the simulated device."""

LATER = ("pydantic.v1", "pyarrow.parquet", "numpy.random", "zoneinfo", "colorama", "pytest", "psutil")
"""What a worker imports on its way, after its start, beside what ranks do; by the functions of tests, for the last."""

NAMESPACES = {"net": 0x40000000, "uts": 0x04000000, "mnt": 0x00020000}
"""What a worker takes over from the host that it is on, with the flags for setns(2)."""

PR_SET_PDEATHSIG = 1


@contextlib.contextmanager
def worker_python() -> Iterator[Path]:
    """Run the server, and give the Python that Ray's workers are to be started with."""
    with tempfile.TemporaryDirectory(prefix="rsf-", dir="/tmp") as folder:
        address, program = f"{folder}/socket", Path(folder, "python")
        client = Path(__file__).with_name("forking_client.py")
        known = f'{address} "{sys.executable}" "{program}"'
        program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -I -S "{client}" {known} "$@"\n')
        program.chmod(0o755)
        # A worker shows its title where the server's arguments stand, and the last of them makes room for long ones.
        command = [sys.executable, "-m", "tests.forking", address, "_" * 1024]
        environment = {VARIABLE: str(program)} | os.environ
        server = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, cwd=ROOT, env=environment)
        try:
            assert server.stdout is not None
            assert server.stdout.readline() == b"ready\n", "the server of the forks did not start"
            os.environ[VARIABLE] = str(program)
            yield program
        finally:
            os.environ.pop(VARIABLE, None)
            left = psutil.Process(server.pid).children(recursive=True)
            server.kill()
            server.wait()
            for worker in left:
                with contextlib.suppress(psutil.NoSuchProcess):
                    worker.kill()


def runtime_env() -> dict[str, str]:
    """What `ray.init` takes for workers to be forked, in this process or in one that a test started."""
    return {"py_executable": os.environ[VARIABLE]}


@contextlib.contextmanager
def ray_starts_with(program: Path) -> Iterator[None]:
    """Have `ray.init` in this context start a node whose workers have `program` as their Python."""
    real, sys.executable = sys.executable, str(program)
    try:
        yield
    finally:
        sys.executable = real


def main(address: str) -> NoReturn:
    """Import, listen, and fork one worker for each connection until the parent ends."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # a killed pytest leaves no server behind
    os.setsid()  # Ctrl-C in pytest's terminal is not for workers
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(address)
        listener.listen(64)
        _preload()
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps the workers
        os.write(1, b"ready\n")
        while True:
            connection, _ = listener.accept()
            with connection:
                received = _receive(connection)
                if received is None:
                    continue
                order, files = received
                pid = os.fork()
                if pid == 0:
                    listener.close()
                    connection.close()
                    _become(order, files)
                for file in files:
                    os.close(file)
                with contextlib.suppress(ConnectionError):  # Ray kills what it starts when a node ends
                    connection.sendall(str(pid).encode())


def _preload() -> None:
    """Import what a worker imports, but for Ray, whose C++ part reads the worker's environment when it is loaded."""
    listing = "import sys, raysharding.group.rank.commands, ray._private.workers.default_worker; print(*sys.modules)"
    names = subprocess.run([sys.executable, "-c", listing], check=True, capture_output=True, text=True).stdout.split()
    without_ray = [name for name in names if name.partition(".")[0] not in ("ray", "raysharding", "__main__")]
    for name in (*without_ray, *LATER, "raysharding.worker", *PRELOADED):
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    assert "ray" not in sys.modules
    # A thread does not survive a fork, but the locks it holds do. jemalloc (pyarrow's) starts its own again.
    threads = {task.read_text().strip() for task in Path("/proc/self/task").glob("*/comm")} - {"jemalloc_bg_thd"}
    assert len(threads) == 1, threads


def _receive(connection: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """Return what a client sends; `None` if the client was killed before it had sent all."""
    data, files = b"", array.array("i")
    while not data.endswith(b"\n"):
        part, ancillary, _, _ = connection.recvmsg(1 << 20, socket.CMSG_SPACE(8 * files.itemsize))
        data += part
        for level, kind, payload in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                files.frombytes(payload)
        if not part:
            for file in files:
                os.close(file)
            return None
    return json.loads(data), list(files)


def _become(order: dict[str, Any], files: list[int]) -> NoReturn:
    """Take over what the client's process had, run its script, and end as a Python of its own would."""
    status = 1
    try:
        _take_over(order, files)
        sys.argv = order["argv"]
        sys.path[0] = str(Path(sys.argv[0]).parent)
        runpy.run_path(sys.argv[0], run_name="__main__")
        status = 0
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        os._exit(status)


def _take_over(order: dict[str, Any], files: list[int]) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for (kind, flag), file in zip(NAMESPACES.items(), files[3:], strict=True):
        if os.fstat(file).st_ino != os.stat(f"/proc/self/ns/{kind}").st_ino and libc.setns(file, flag):
            raise OSError(ctypes.get_errno(), f"setns({kind})")
    for target, file in enumerate(files[:3]):
        os.dup2(file, target)
    for file in files:
        os.close(file)
    os.setsid()
    os.chdir(order["cwd"])
    os.nice(order["nice"] - os.nice(0))
    Path("/proc/self/oom_score_adj").write_text(order["oom_score_adj"])
    resource.setrlimit(resource.RLIMIT_NOFILE, tuple(order["nofile"]))
    # Ray 2.54 finds the arguments, where it shows a worker's title, in front of the first variable: that one stays.
    for name in os.environ.keys() - {VARIABLE}:
        del os.environ[name]
    os.environ.update(item for item in order["environment"].items() if item[0] != VARIABLE)
    # Read from the environment of the server, at its import.
    importlib.reload(importlib.import_module("huggingface_hub.constants"))
    if os.environ.get(DEVICE) == "sim":
        from tests.accelerator.device import register

        register()
    own = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.path[1:] = list(dict.fromkeys([*own, *sys.path[1:]]))


if __name__ == "__main__":
    main(sys.argv[1])
