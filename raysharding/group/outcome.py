"""How a rank's part of a call ended, as typed data: what a rank tells the driver instead of raising through Ray."""

from __future__ import annotations

import pickle
import traceback
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import torch.distributed as dist
from ray import cloudpickle

from raysharding.errors import RayshardingError, said
from raysharding.group.packing import Packed

Stage = Literal["run", "output"]

# What gloo and the TCP store say, inside plain RuntimeErrors, when a peer has gone.
_CONNECTION_MARKS = (
    "gloo/transport",
    "Connection closed by peer",
    "Connection reset by peer",
    "Connection refused",
    "Broken pipe",
    "Timed out waiting",
    "NCCL communicator was aborted",
    "ncclRemoteError",
)

# What NCCL says of the rank itself: what it was asked for, or the GPU that it ran on.
_OWN_MARKS = ("ncclInvalidUsage", "ncclInvalidArgument", "ncclUnhandledCudaError")

# What a rank raised is read on the thread that watches all others, and is shown to people.
_MAX_MESSAGE_CHARS = 64 << 10
_MAX_TRACEBACK_CHARS = 256 << 10
_MAX_PICKLE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Raised:
    """An exception on a rank."""

    error_type: str
    """Qualified name of its class."""
    message: str
    """Its `str()`."""
    traceback: str
    """The formatted remote traceback, causes included."""
    stage: Stage
    """`run`: while the ranks worked together; `output`: while this rank packed its result, all collectives done."""
    is_connection: bool
    """Whether it says that a peer has gone, so that another rank's failure came first."""
    lost_peers: bool
    """Whether torch.distributed said so: the process group is gone. A `ConnectionError` may be from anywhere."""
    recovered: bool
    """Whether the module is right for later calls, provided that every rank raised alike."""
    phase: str
    """What the rank was doing."""
    tensor: str | None
    """The tensor it last touched, in a load or save."""
    pickled: bytes | None
    """The exception itself, `None` where it does not survive pickling, or is over 1 MiB."""

    def exception(self) -> BaseException | None:
        """Rebuild the exception, `None` where this process cannot (a class it does not have, say)."""
        if self.pickled is None:
            return None
        try:
            rebuilt = pickle.loads(self.pickled)
        except Exception:  # noqa: BLE001  a foreign __init__ may raise anything; message and traceback stand without it
            return None
        return rebuilt if isinstance(rebuilt, BaseException) else None


@dataclass(frozen=True, slots=True)
class Stamp:
    """What a command did to a rank's weights and optimizer state.

    Ranks that held one model before it hold one after it where their stamps are equal and whole.
    """

    whole: bool
    """Whether no change was left half-way, by this command or an earlier one."""
    num_changes: int
    """How often the command changed them."""
    num_collectives: int = field(default=0, compare=False)
    """How many collectives the rank began meanwhile: where ranks differ, the next ones would not match."""


def in_step(stamps: Iterable[Stamp]) -> bool:
    """Return True if ranks with these stamps began as many collectives, so that their next ones match."""
    return len({stamp.num_collectives for stamp in stamps}) == 1


def one_model(stamps: Iterable[Stamp]) -> bool:
    """Whether ranks with these stamps hold one model, if they held one before."""
    kinds = set(stamps)
    return len(kinds) == 1 and all(stamp.whole for stamp in kinds)


@dataclass(frozen=True, slots=True)
class Outcome:
    """The end of one call on one rank."""

    stamp: Stamp
    """What it did to what the rank holds."""
    raised: Raised | None = None
    """The exception, `None` after success."""
    more: bool = False
    """Whether the same call has more to give (`state_dict`, a bucket at a time)."""
    value: Packed | None = None
    """Its packed result, where that is small; `None` where it is `None`."""
    is_beside: bool = False
    """Whether the result is an object of its own, as large ones and those that the user wants as references are."""

    def to_bytes(self) -> bytes:
        """Pickle it."""
        stamp = self.stamp.whole, self.stamp.num_changes, self.stamp.num_collectives
        value = None if self.value is None else (self.value.stream, self.value.buffers)
        return pickle.dumps((stamp, self.raised, self.more, value, self.is_beside), pickle.HIGHEST_PROTOCOL)

    @staticmethod
    def from_bytes(data: bytes) -> Outcome:
        """Rebuild what `to_bytes` gave."""
        stamp, raised, more, value, is_beside = pickle.loads(data)
        return Outcome(Stamp(*stamp), raised, more, None if value is None else Packed(*value), is_beside)


@dataclass(frozen=True, slots=True)
class Progress:
    """What a rank is doing now."""

    phase: str
    """`plan`, `stream`, `finalize`, `ready` or the name of the call."""
    bytes_done: int
    """Bytes that the load or save has moved."""
    bytes_total: int
    """Bytes that it will move, 0 while unknown."""


@dataclass(frozen=True, slots=True)
class Stacks:
    """Python stacks of a rank's threads."""

    text: str
    """The work thread's first, formatted."""
    in_collective: bool
    """Whether the work thread waits inside torch.distributed, so for another rank."""


def record_exception(error: BaseException, *, stage: Stage, phase: str, tensor: str | None, recovered: bool) -> Raised:
    """Describe an exception on the rank where it was raised.

    Args:
        error: The exception.
        stage: See `Raised`.
        phase: See `Raised`.
        tensor: See `Raised`.
        recovered: See `Raised`.
    """
    cls = type(error)
    is_builtin = cls.__module__ == "builtins"
    return Raised(
        error_type=cls.__qualname__ if is_builtin else f"{cls.__module__}.{cls.__qualname__}",
        message=said(error)[:_MAX_MESSAGE_CHARS],
        traceback="".join(traceback.format_exception(error))[-_MAX_TRACEBACK_CHARS:],
        stage=stage,
        is_connection=is_connection_error(error),
        lost_peers=has_lost_peers(error),
        recovered=recovered,
        phase=phase,
        tensor=tensor,
        pickled=_pickle_exception(error),
    )


def is_connection_error(error: BaseException) -> bool:
    """Whether an exception says that a peer or the store has gone, rather than that this rank did something wrong."""
    if any(isinstance(one, dist.DistBackendError) and _has(one, _OWN_MARKS) for one in _causes(error)):
        return False
    return any(isinstance(one, ConnectionError) for one in _causes(error)) or has_lost_peers(error)


def has_lost_peers(error: BaseException) -> bool:
    """Whether torch.distributed says that a peer or the store has gone, so that no later collective can work."""
    return any(
        # Of a backend: NCCL's errors and time-outs, after which its communicator is aborted.
        isinstance(one, (dist.DistBackendError, dist.DistNetworkError, dist.DistStoreError))
        or (isinstance(one, RuntimeError) and _has(one, _CONNECTION_MARKS))
        for one in _causes(error)
    )


def _has(error: BaseException, marks: tuple[str, ...]) -> bool:
    return any(mark in said(error) for mark in marks)


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """The error and its causes, up to one of ours, which says itself what happened."""
    while error is not None and not isinstance(error, RayshardingError):
        yield error
        error = error.__cause__


def _pickle_exception(error: BaseException) -> bytes | None:
    try:
        data: bytes = cloudpickle.dumps(error)
        if len(data) > _MAX_PICKLE_BYTES:
            return None
        rebuilt: Any = pickle.loads(data)
    except Exception:  # noqa: BLE001  an exception may hold anything; its type, message and traceback are kept as text
        return None
    return data if isinstance(rebuilt, BaseException) else None
