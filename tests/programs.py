"""Programs in Python processes of their own, forked from one that has imported torch and transformers already.

A new Python imports torch, transformers and Ray for 3 s of a core. A program here is forked from where `tests.spawn`
forks ranks: it has environment, standard streams, session, arguments and an end of its own, and imports Ray itself.
"""

from __future__ import annotations

import atexit
import importlib
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import threading
import types
from collections.abc import Mapping, Sequence
from multiprocessing import reduction
from pathlib import Path
from typing import Any, NoReturn

from tests.spawn import PRELOADED

ROOT = Path(__file__).resolve().parents[1]


class Program:
    """What `python -c` would run, as `subprocess.Popen` shows it, with text pipes for all three standard streams."""

    def __init__(self, text: str, *arguments: str, environment: Mapping[str, str] | None = None) -> None:
        (stdin, own_in), (own_out, stdout), (own_err, stderr) = pipes = [os.pipe() for _ in range(3)]
        self._process = _started(text, arguments, environment, (stdin, stdout, stderr))
        for file in {file for pipe in pipes for file in pipe} - {own_in, own_out, own_err}:
            os.close(file)
        self.stdin, self.stdout, self.stderr = open(own_in, "w"), open(own_out), open(own_err)
        self.pid = int(self._process.pid)

    @property
    def returncode(self) -> int | None:
        """The exit status, negative for a signal; `None` while it runs."""
        status: int | None = self._process.exitcode
        return status

    def poll(self) -> int | None:
        """Return the exit status, or `None` while it runs."""
        return self.returncode

    def wait(self, timeout: float) -> int:
        """Wait for its end, and return the exit status."""
        self._process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired("-c", timeout)
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send it a signal, if it runs still."""
        if self.poll() is None:
            os.kill(self.pid, number)


def run(
    text: str, *arguments: str, environment: Mapping[str, str] | None = None, timeout: float = 100.0
) -> subprocess.CompletedProcess[str]:
    """Run a program to its end, as `subprocess.run` does, and return what it has said."""
    with tempfile.TemporaryFile("w+") as stdout, tempfile.TemporaryFile("w+") as stderr, open(os.devnull) as stdin:
        process = _started(text, arguments, environment, (stdin.fileno(), stdout.fileno(), stderr.fileno()))
        process.join(timeout)
        if process.exitcode is None:
            process.kill()
            process.join()
            raise subprocess.TimeoutExpired("-c", timeout)
        for file in (stdout, stderr):
            file.seek(0)
        return subprocess.CompletedProcess(["-c", *arguments], process.exitcode, stdout.read(), stderr.read())


class _Passed:
    """A file that the process which is started gets, too."""

    def __init__(self, file: int) -> None:
        self.file = file

    def __reduce__(self) -> Any:
        return _take, (reduction.DupFd(self.file),)


def _take(passed: Any) -> int:
    file: int = passed.detach()
    return file


def _started(text: str, arguments: Sequence[str], environment: Mapping[str, str] | None, files: Sequence[int]) -> Any:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    variables = dict(os.environ if environment is None else environment)
    process = context.Process(
        target=_run, args=(text, arguments, variables, [_Passed(file) for file in files]), daemon=True
    )
    process.start()
    return process


def _run(text: str, arguments: Sequence[str], environment: Mapping[str, str], files: Sequence[int]) -> NoReturn:
    """Become a Python of its own, run the program, and end as that would."""
    os.setsid()
    os.chdir(ROOT)
    for target, file in enumerate(files):
        os.dup2(file, target)
        os.close(file)
    sys.stdin, sys.stdout = open(0, closefd=False), open(1, "w", closefd=False)
    sys.stderr = open(2, "w", buffering=1, closefd=False, errors="backslashreplace")
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(environment)
    importlib.reload(importlib.import_module("huggingface_hub.constants"))  # read from the environment at its import
    sys.argv[:], sys.path[:0] = ["-c", *arguments], [""]
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    status = 0
    try:
        exec(compile(text, "<string>", "exec"), vars(main))
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        status = 1
    # multiprocessing would end it without what a program has put off until its end.
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    os._exit(status)
