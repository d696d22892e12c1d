"""`RankSet`: starts the rank processes of a benchmark, requests loads, waits for answers with a deadline, ends them."""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Self

from raysharding.errors import RayshardingError

ROOT = Path(__file__).resolve().parents[2]
"""This checkout."""
START_S = 180.0
"""Seconds for every rank to import torch and join the process group."""
DRAIN_S = 10.0
"""Seconds for the other ranks to answer after one rank has failed."""
CLOSE_S = 10.0
"""Seconds for ranks to end by themselves."""
LOG_LINES = 25
"""Number of lines of a failed rank's log that an error shows."""
_KEEP_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(1 << 40), "MALLOC_TRIM_THRESHOLD_": str(1 << 40)}


class BenchError(RayshardingError):
    """A benchmark that cannot be run, or whose ranks failed."""


@dataclass(frozen=True)
class Setup:
    """Configuration of the rank processes."""

    function: str
    """`module:function` that creates case and arms on each rank; see `arms.make_case`."""
    options: Mapping[str, Any]
    """Argument of `function`; JSON."""
    timeout_s: float = 300.0
    """Longest time of one load, in seconds."""
    network_descriptor: int | None = None
    """Descriptor from `private_network`."""


class RankSet:
    """`world_size` processes in one gloo or NCCL group. A context manager; no process outlives the context.

    Args:
        setup: How the ranks are started, and their case.
        world_size: Number of ranks.
        keep_memory: Make malloc keep freed memory, so later loads use memory that is already touched.
    """

    def __init__(self, setup: Setup, world_size: int, *, keep_memory: bool) -> None:
        self.setup = setup
        self.world_size = world_size
        self.arms: tuple[str, ...] = ()
        """Names of the ranks' arms."""
        self._keep_memory = keep_memory
        self._processes: list[subprocess.Popen[bytes]] = []
        self._pipes: list[int] = []
        self._stack = ExitStack()
        self._failed = False

    def __enter__(self) -> Self:
        self._scratch = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="raysharding-bench-")))
        try:
            for rank in range(self.world_size):
                self._start(rank)
            answers = self._answers(START_S)
        except BaseException:
            self._failed = True
            self.close()
            raise
        self.arms = tuple(answers[0]["arms"])
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._failed = self._failed or kind is not None
        self.close()

    def load(self, arm: str, **options: bool) -> list[dict[str, Any]]:
        """Run one load on every rank, and return the answers by rank.

        Args:
            arm: Name of the arm.
            options: The other fields of `rank.Command`.

        Raises:
            ArmError: The arm cannot load the case, on every rank alike; the ranks can run further loads.
            BenchError: There is no such arm, or a rank died, failed alone, or did not answer in time.
        """
        if arm not in self.arms:
            raise BenchError(f"there is no arm {arm!r} here: choose from {', '.join(self.arms)}")
        line = json.dumps({"arm": arm, **options}).encode() + b"\n"
        try:
            for process in self._processes:
                assert process.stdin is not None
                process.stdin.write(line)
                process.stdin.flush()
            return self._answers(self.setup.timeout_s, arm)
        except BrokenPipeError as error:
            self._failed = True
            raise BenchError(f"{arm}: {self._state(range(self.world_size), 0.0)}, before this load") from error
        except BaseException as error:
            self._failed = self._failed or not isinstance(error, ArmError)
            raise

    def close(self) -> None:
        """End the processes: by the end of their stdin if no load failed, else by SIGKILL. Idempotent."""
        for process in self._processes:
            if self._failed:
                process.kill()
            if process.stdin is not None and not process.stdin.closed:
                process.stdin.close()
        deadline = time.monotonic() + CLOSE_S
        for process in self._processes:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        while self._pipes:
            os.close(self._pipes.pop())
        self._processes.clear()
        self._stack.close()

    def _start(self, rank: int) -> None:
        reading, writing = os.pipe()
        self._pipes.append(reading)
        network = self.setup.network_descriptor
        spec = {
            "setup": self.setup.function,
            "options": dict(self.setup.options),
            "rank": rank,
            "world_size": self.world_size,
            "store": str(self._scratch / "store"),
            "reply_descriptor": writing,
            "network_descriptor": network,
            "timeout_s": self.setup.timeout_s,
        }
        log = self._stack.enter_context(self._log(rank).open("wb"))
        try:
            process = subprocess.Popen(
                [sys.executable, "-W", "ignore", "-m", "tests.bench.rank", json.dumps(spec)],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self._environment(),
                pass_fds=(writing,) if network is None else (writing, network),
            )
        finally:
            os.close(writing)  # the pipe then ends with the process
        self._processes.append(process)

    def _environment(self) -> dict[str, str]:
        """A rank's environment: one thread, no hub access, gloo on the loopback, this checkout importable."""
        path = os.pathsep.join(part for part in (str(ROOT), os.environ.get("PYTHONPATH", "")) if part)
        fixed = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": path}
        return {**os.environ, **fixed, **(_KEEP_MEMORY if self._keep_memory else {})}

    def _log(self, rank: int) -> Path:
        return self._scratch / f"rank-{rank}.log"

    def _answers(self, timeout_s: float, arm: str = "start") -> list[dict[str, Any]]:
        """Return one JSON answer from each rank, in rank order."""
        lines = self._lines(timeout_s)
        answers = [json.loads(line) if line.endswith(b"\n") else {} for line in lines]
        failed = [rank for rank, answer in enumerate(answers) if "failed" in answer]
        if failed:
            first = min(failed, key=lambda rank: answers[rank]["failed_s"])
            raise BenchError(f"{arm}: rank {first} failed: {answers[first]['failed']}{self._log_end(first)}")
        refused = {rank: answer["cannot"] for rank, answer in enumerate(answers) if "cannot" in answer}
        if len(refused) == self.world_size:
            raise ArmError(refused[0], arm=arm)
        if refused:
            said = "; ".join(f"rank {rank}: {text}" for rank, text in refused.items())
            raise BenchError(f"{arm}: failed on some ranks only: {said}")
        if silent := [rank for rank, answer in enumerate(answers) if not answer]:
            raise BenchError(f"{arm}: {self._state(silent, timeout_s)}{self._log_end(silent[0])}")
        return answers

    def _lines(self, timeout_s: float) -> list[bytes]:
        """Read each rank's line until all lines are complete or the time is over; wait less after a rank failed."""
        lines = [b""] * self.world_size
        deadline = time.monotonic() + timeout_s
        with selectors.DefaultSelector() as selector:
            for rank, pipe in enumerate(self._pipes):
                selector.register(pipe, selectors.EVENT_READ, rank)
            while selector.get_map() and (left := deadline - time.monotonic()) > 0:
                for key, _ in selector.select(left):
                    data = os.read(key.fd, 1 << 16)
                    lines[key.data] += data
                    if not data or data.endswith(b"\n"):
                        selector.unregister(key.fd)
                    if not data or data.startswith((b'{"cannot"', b'{"failed"')):
                        deadline = min(deadline, time.monotonic() + DRAIN_S)
        return lines

    def _state(self, ranks: Sequence[int], timeout_s: float) -> str:
        """Describe the state of ranks that gave no answer."""
        states = []
        for rank in ranks:
            code = self._processes[rank].poll()
            late = f"did not answer in {timeout_s:g} s" if code is None else f"ended with status {code}"
            states.append(f"rank {rank} {late}")
        return ", ".join(states)

    def _log_end(self, rank: int) -> str:
        """Return the last lines of a rank's log, to append to an error."""
        lines = self._log(rank).read_text(errors="replace").strip().splitlines()
        return "".join(f"\n  {line}" for line in lines[-LOG_LINES:])


class ArmError(BenchError):
    """An arm that cannot load this checkpoint on this machine.

    Args:
        message: The reason, from the arm's error.
        arm: Name of the arm.
    """

    def __init__(self, message: str, *, arm: str = "") -> None:
        super().__init__(message)
        self.arm = arm


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """Turn SIGTERM and SIGINT into `SystemExit` in the main thread, so that `with` blocks end the ranks."""

    def leave(number: int, frame: FrameType | None) -> None:
        sys.exit(128 + number)

    previous = {number: signal.signal(number, leave) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
