"""Requests to an object store: several at once, each with a deadline, retried where the error may be temporary.

Note [Retries]: for reads the retries of pyarrow's own strategies are switched off (`remote.connect`). Seen with
pyarrow 26 and `AwsStandardS3RetryStrategy` alone: statuses 500 and 503 and broken connections are retried, but a 429
only where its code is `SlowDown`; a stalled body is noticed after 8 s at the earliest, whatever `request_timeout` says;
a short answer is taken for the whole one; and a request that was abandoned at its deadline is sent again, and again,
in the background, after the caller has got its error. HDFS and Azure take no deadline at all. The parts of a stream
that is written are retried by pyarrow, since only pyarrow can send them again.
"""

from __future__ import annotations

import math
import random
import re
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, InvalidStateError, ThreadPoolExecutor, as_completed, wait
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from raysharding.arguments import check_int
from raysharding.checkpoint.storage.uri import scheme_of
from raysharding.errors import CheckpointError


@dataclass(frozen=True)
class RemoteOptions:
    """Sizes, deadlines and retries of requests to an object store.

    With the defaults, a read that cannot succeed ends within about 105 s. That is less than `Timeouts.load_stall_s`, so
    the error names the store rather than a stalled load.
    """

    part_bytes: int = 8 << 20
    """Most bytes of one ranged request. A connection that takes longer than `request_s` for this much is too slow."""
    max_in_flight: int = 8
    """Most requests in flight in this process, of all readers together. Their answers take at most
    `max_in_flight * part_bytes` of memory, 64 MiB by default; an abandoned request keeps its memory until it ends."""
    num_tries: int = 5
    """Tries of a request before its error is raised. Only errors that may be temporary are retried."""
    request_s: float = 20.0
    """Deadline of one try, from sending the request to the last byte of the answer."""
    backoff_s: float = 0.2
    """Wait before the second try, doubled before each further one, with ±50 % of jitter."""
    max_backoff_s: float = 5.0
    """Longest wait between two tries, before jitter."""

    def __post_init__(self) -> None:
        for name in ("part_bytes", "max_in_flight", "num_tries"):
            check_int(name, getattr(self, name))
        for name in ("request_s", "backoff_s", "max_backoff_s"):
            value = getattr(self, name)
            if not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
                raise ValueError(f"{name}={value!r}: give a positive number of seconds; a deadline is finite")


DEFAULT_REMOTE = RemoteOptions()


_Result = TypeVar("_Result")

_CREDENTIALS: Final = {
    "s3": "AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and AWS_SESSION_TOKEN, or AWS_PROFILE",
    "gs": "GOOGLE_APPLICATION_CREDENTIALS",
    "gcs": "GOOGLE_APPLICATION_CREDENTIALS",
    "abfs": "AZURE_TENANT_ID, AZURE_CLIENT_ID and AZURE_CLIENT_SECRET",
    "abfss": "AZURE_TENANT_ID, AZURE_CLIENT_ID and AZURE_CLIENT_SECRET",
}

_BAD_REQUEST: Final = (
    "the store refused the request: check the URI and its query (region=..., endpoint_override=...), and whether "
    "temporary credentials have expired"
)
_CURES: Final = {
    r"EXPIRED_?TOKEN|TOKEN_?EXPIRED": "the temporary credentials (AWS_SESSION_TOKEN) have expired: renew them in the "
    "driver's environment, and start the ranks again",
    r"INVALID_?RANGE|HTTP status 416\b": "the object is shorter than when it was opened, so it was written anew "
    "meanwhile: open it again, and write new data under another name",
    r"ACCESS_DENIED|INVALID_ACCESS_KEY|SIGNATURE_DOES_NOT_MATCH|INVALID_CLIENT_TOKEN|UNRECOGNIZED_CLIENT"
    r"|INVALID_SIGNATURE|MISSING_AUTHENTICATION|PERMISSION_DENIED|UNAUTHENTICATED|HTTP status 40[13]\b"
    r"|PermissionError": "access was refused: set {} in the environment of the driver and of the ranks that read",
    r"RESOURCE_NOT_FOUND|NO_SUCH_BUCKET|NO_SUCH_KEY|NOT_FOUND|HTTP status 404\b|FileNotFoundError": "there is no such "
    "bucket or object: check the URI",
    r"HTTP status (3\d\d|4(?!08|29)\d\d)\b|INVALID_REQUEST": _BAD_REQUEST,
}
"""Pattern of the type and text of a permanent error → cure; the first match counts."""


@dataclass(frozen=True)
class Job:
    """One request, to be sent until it succeeds."""

    what: str
    """What the request does, for errors: `reading 8 bytes at 0`."""
    send: Callable[[], Any]
    """Sends the request and waits for the answer, in a thread of its own. An `OSError` is retried, others are not; a
    `CheckpointError` is raised as it is."""
    take: Callable[[Any], None]
    """Takes the answer, never after the request was abandoned. Its `OSError` is retried."""


class Requests:
    """Sends requests, `max_in_flight` at most at once over all threads of this process. Thread-safe.

    A request that outlives its deadline is abandoned: its thread ends when pyarrow gives up.
    """

    def __init__(self, options: RemoteOptions) -> None:
        self.options = options
        self._permits = threading.BoundedSemaphore(options.max_in_flight)

    def call(self, path: str, what: str, send: Callable[[], _Result]) -> _Result:
        """Send one request and return its answer.

        Raises:
            CheckpointError: As `run`.
        """
        answers: list[_Result] = []
        self.run(path, [Job(what, send, answers.append)])
        return answers[0]

    def run(self, path: str, jobs: Sequence[Job]) -> None:
        """Send all requests, several at once, in the order given.

        Args:
            path: URI, for errors.
            jobs: The requests. Each holds memory for its answer only while it is in flight.

        Raises:
            CheckpointError: A request was refused, or failed `num_tries` times; names URI, request and cure.
        """
        stop: Future[None] = Future()
        with ThreadPoolExecutor(self.options.max_in_flight, thread_name_prefix="raysharding-requests") as pool:
            try:
                for sent in as_completed([pool.submit(self._send, path, job, stop) for job in jobs]):
                    sent.result()
            finally:
                _end(stop)

    def _send(self, path: str, job: Job, stop: Future[None]) -> None:
        """Send a request until it succeeds or fails for good; return early where another one of the caller's failed."""
        options = self.options
        for num_tries in range(1, options.num_tries + 1):
            with self._permits:
                if stop.done():
                    return
                answer = in_thread(job.send)
                wait((answer, stop), options.request_s, FIRST_COMPLETED)
                if stop.done():
                    return
                try:
                    if not answer.done():
                        raise TimeoutError(f"no full answer within {options.request_s:g} s")
                    return job.take(answer.result())
                except CheckpointError:  # says all that there is to say
                    _end(stop)
                    raise
                except (OSError, ValueError, NotImplementedError) as error:
                    if _cure(error) is not None or num_tries == options.num_tries:
                        _end(stop)  # here, so that no other thread sends meanwhile
                        raise _as_checkpoint_error(path, job.what, num_tries, error) from error
            pause_s = min(options.max_backoff_s, options.backoff_s * 2 ** (num_tries - 1))
            # Jitter, so that ranks that failed together do not send again together.
            wait((stop,), pause_s * random.uniform(0.5, 1.5))


def _end(stop: Future[None]) -> None:
    with suppress(InvalidStateError):  # already ended
        stop.set_result(None)


def in_thread(send: Callable[[], Any]) -> Future[Any]:
    """Send a request in a thread that a process does not wait for when it ends; return its answer."""
    answer: Future[Any] = Future()
    threading.Thread(target=_carry_out, args=(send, answer), name="raysharding-request", daemon=True).start()
    return answer


def _carry_out(send: Callable[[], Any], future: Future[Any]) -> None:
    try:
        answer = send()
    except BaseException as error:  # noqa: BLE001 - raised where the future is waited for
        future.set_exception(error)
    else:
        future.set_result(answer)


def first_line(error: BaseException) -> str:
    """Return the first line of what an error says, or its type where it says nothing."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _cure(error: BaseException) -> str | None:
    """Return what to do about an error if another try cannot succeed; `None` if one may."""
    text = f"{type(error).__name__}: {error}"
    found = (cure for pattern, cure in _CURES.items() if re.search(pattern, text, re.IGNORECASE))
    return next(found, None if isinstance(error, OSError) else _BAD_REQUEST)


def _as_checkpoint_error(path: str, what: str, num_tries: int, error: BaseException) -> CheckpointError:
    cure = _cure(error) or "check the network and the store, and load again"
    cure = cure.replace("{}", _CREDENTIALS.get(scheme_of(path) or "", "the store's credentials"))
    times = "once" if num_tries == 1 else f"{num_tries} times"
    return CheckpointError(f"{what} failed, tried {times}: {first_line(error)}; {cure}", path=path)
