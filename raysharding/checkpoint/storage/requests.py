"""Requests to an object store: several at once, each with a deadline, tried again where the error may pass.

How remote checkpoints are read: sizes, tries and deadlines.
"""

from __future__ import annotations

import heapq
import math
import random
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final, TypeVar

from raysharding.checkpoint.storage.uri import scheme_of
from raysharding.errors import CheckpointError


@dataclass(frozen=True)
class RemoteOptions:
    """How to read from an object store. The defaults end a read that cannot succeed within about 105 s.

    That is less than `Timeouts.load_stall_s`, so an error names the store rather than a stalled load.
    """

    part_bytes: int = 8 << 20
    """Most bytes of one ranged request. A connection that takes longer than `request_s` for this much is too slow."""
    max_in_flight: int = 8
    """Requests under way at once in this process, all readers together. Their answers take at most
    `max_in_flight * part_bytes` of memory, 64 MiB by default; abandoned requests keep theirs until they end."""
    num_tries: int = 5
    """How often a request is sent before its error counts. Only errors that may pass are tried again."""
    request_s: float = 20.0
    """Deadline of one request, from its sending to its last byte."""
    backoff_s: float = 0.2
    """Wait before the second try, doubled before each further one, with ±50 % of jitter."""
    max_backoff_s: float = 5.0
    """Longest wait between two tries, before jitter."""

    def __post_init__(self) -> None:
        for name in ("part_bytes", "max_in_flight", "num_tries"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise ValueError(f"{name}={value!r}: give a positive integer")
        for name in ("request_s", "backoff_s", "max_backoff_s"):
            value = getattr(self, name)
            if not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
                raise ValueError(f"{name}={value!r}: give a positive number of seconds; a deadline is finite")


DEFAULT_REMOTE = RemoteOptions()


_Result = TypeVar("_Result")

_REFUSED: Final = re.compile(
    r"ACCESS_DENIED|INVALID_ACCESS_KEY|SIGNATURE_DOES_NOT_MATCH|INVALID_CLIENT_TOKEN|UNRECOGNIZED_CLIENT|EXPIRED_TOKEN"
    r"|INVALID_SIGNATURE|MISSING_AUTHENTICATION|PERMISSION_DENIED|UNAUTHENTICATED|HTTP status 40[13]\b",
    re.IGNORECASE,
)
_MISSING: Final = re.compile(
    r"RESOURCE_NOT_FOUND|NO_SUCH_BUCKET|NO_SUCH_KEY|NOT_FOUND|HTTP status 404\b", re.IGNORECASE
)
_PERMANENT: Final = re.compile(r"HTTP status (3\d\d|4(?!08|29)\d\d)\b|INVALID_RANGE|INVALID_REQUEST", re.IGNORECASE)
_CREDENTIALS: Final = {
    "s3": "AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and AWS_SESSION_TOKEN, or AWS_PROFILE",
    "gs": "GOOGLE_APPLICATION_CREDENTIALS",
    "gcs": "GOOGLE_APPLICATION_CREDENTIALS",
    "abfs": "AZURE_TENANT_ID, AZURE_CLIENT_ID and AZURE_CLIENT_SECRET",
    "abfss": "AZURE_TENANT_ID, AZURE_CLIENT_ID and AZURE_CLIENT_SECRET",
}


@dataclass
class Job:
    """One request, to be sent until it succeeds."""

    what: str
    """What it does, for errors: `reading 8 bytes at 0`."""
    send: Callable[[], Any]
    """Sends it and waits for the answer, in a thread of its own. An `OSError` may pass; other errors do not."""
    take: Callable[[Any], None]
    """Takes the answer, in the caller's thread and never after the request was given up. Its `OSError` may pass too."""
    num_tries: int = 0
    """How often it was sent."""
    error: BaseException | None = None
    """What the last try ended with."""


class Requests:
    """Sends requests, `max_in_flight` at most at once over all threads of this process. Thread-safe.

    A request that outlives its deadline is abandoned: its thread ends when pyarrow gives up by itself.
    """

    def __init__(self, options: RemoteOptions) -> None:
        self.options = options
        self._permits = threading.BoundedSemaphore(options.max_in_flight)

    def call(self, path: str, what: str, send: Callable[[], _Result]) -> _Result:
        """Carry out one request and return its answer.

        Raises:
            CheckpointError: as `run`.
        """
        answers: list[_Result] = []
        self.run(path, [Job(what, send, answers.append)])
        return answers[0]

    def run(self, path: str, jobs: Sequence[Job]) -> None:
        """Carry out all jobs, several at once, in the order given.

        Args:
            path: URI, for errors.
            jobs: What to do. Each holds memory for its answer only while it is in flight.

        Raises:
            CheckpointError: a job failed for good, or failed `num_tries` times; names the URI, the job and the cure.
        """
        running = _Running(self, path, jobs)
        try:
            while running.step():
                pass
        finally:
            running.abandon()

    def acquire(self, timeout_s: float) -> bool:
        """Get leave to send a request, waiting for at most `timeout_s`."""
        return self._permits.acquire(timeout=timeout_s) if timeout_s > 0 else self._permits.acquire(blocking=False)

    def release(self) -> None:
        """Give back the leave for one request."""
        self._permits.release()


@lru_cache(maxsize=8)
def requests_of(options: RemoteOptions) -> Requests:
    """Return this process's `Requests` of these options, so that all readers share one limit."""
    return Requests(options)


class _Running:
    """The jobs of one `Requests.run`: waiting, in flight, or between two tries."""

    def __init__(self, requests: Requests, path: str, jobs: Sequence[Job]) -> None:
        self._requests = requests
        self._options = requests.options
        self._path = path
        self._waiting = deque(jobs)
        self._in_flight: dict[Future[Any], tuple[Job, float]] = {}
        self._pausing: list[tuple[float, int, Job]] = []
        self._num_pauses = 0

    def step(self) -> bool:
        """Send what may be sent, wait until something happens, and deal with it. False when all is done."""
        now = time.monotonic()
        while self._pausing and self._pausing[0][0] <= now:
            self._waiting.appendleft(heapq.heappop(self._pausing)[2])
        self._send_waiting()
        if not self._in_flight:
            if self._pausing:
                time.sleep(max(0.0, self._pausing[0][0] - time.monotonic()))
            return bool(self._waiting or self._pausing)
        until = min(deadline for _, deadline in self._in_flight.values())
        if self._pausing:
            until = min(until, self._pausing[0][0])
        done, _ = wait(self._in_flight, max(0.0, until - time.monotonic()), FIRST_COMPLETED)
        for future in done:
            self._finish(future)
        self._give_up_late()
        return True

    def abandon(self) -> None:
        """Forget what is in flight; answers to it are dropped."""
        while self._in_flight:
            self._in_flight.popitem()
            self._requests.release()

    def _send_waiting(self) -> None:
        while self._waiting:
            # Only who holds no leave may wait for one: two callers that each hold some would wait for each other.
            if not self._requests.acquire(0.0 if self._in_flight or self._pausing else self._options.request_s):
                return
            job = self._waiting.popleft()
            job.num_tries += 1
            future: Future[Any] = Future()
            self._in_flight[future] = (job, time.monotonic() + self._options.request_s)
            threading.Thread(target=_carry_out, args=(job.send, future), name="raysharding-fetch", daemon=True).start()

    def _finish(self, future: Future[Any]) -> None:
        job, _ = self._in_flight[future]
        job.error = future.exception()
        try:
            if job.error is None:
                job.take(future.result())
        except OSError as error:
            job.error = error
        finally:
            del self._in_flight[future]
            self._requests.release()
        if job.error is not None:
            self._failed(job, job.error)

    def _give_up_late(self) -> None:
        now = time.monotonic()
        for future in [future for future, (_, deadline) in self._in_flight.items() if deadline <= now]:
            job, _ = self._in_flight.pop(future)
            self._requests.release()
            job.error = TimeoutError(f"no full answer within {self._options.request_s:g} s")
            self._failed(job, job.error)

    def _failed(self, job: Job, error: BaseException) -> None:
        """Plan another try, or raise."""
        if not isinstance(error, OSError | ValueError | NotImplementedError):
            raise error
        if _is_permanent(error) or job.num_tries >= self._options.num_tries:
            raise _as_checkpoint_error(self._path, job, error) from error
        pause_s = min(self._options.max_backoff_s, self._options.backoff_s * 2 ** (job.num_tries - 1))
        # Jitter, so that ranks that failed together do not come back together.
        due = time.monotonic() + pause_s * random.uniform(0.5, 1.5)
        self._num_pauses += 1
        heapq.heappush(self._pausing, (due, self._num_pauses, job))


def _carry_out(send: Callable[[], Any], future: Future[Any]) -> None:
    try:
        answer = send()
    except BaseException as error:  # noqa: BLE001 - raised where the future is waited for
        future.set_exception(error)
    else:
        future.set_result(answer)


def _is_permanent(error: BaseException) -> bool:
    """Whether trying again cannot help."""
    if not isinstance(error, OSError) or isinstance(error, FileNotFoundError | PermissionError):
        return True
    text = str(error)
    return any(pattern.search(text) for pattern in (_REFUSED, _MISSING, _PERMANENT))


def _as_checkpoint_error(path: str, job: Job, error: BaseException) -> CheckpointError:
    said = (str(error).strip() or type(error).__name__).splitlines()[0]
    if isinstance(error, PermissionError) or _REFUSED.search(said):
        variables = _CREDENTIALS.get(scheme_of(path) or "", "the store's credentials")
        cure = f"access was refused: set {variables} in the environment of the driver and of the ranks that read"
    elif isinstance(error, FileNotFoundError) or _MISSING.search(said):
        cure = "there is no such bucket or object: check the URI"
    elif _is_permanent(error):
        cure = "the store refused the request: check the URI and its query (region=..., endpoint_override=...)"
    else:
        cure = "check the network and the store, and load again"
    times = "once" if job.num_tries == 1 else f"{job.num_tries} times"
    return CheckpointError(f"{job.what} failed, tried {times}: {said}; {cure}", path=path)
