"""`RemoteError`: an exception on a rank, as data, so that Ray does not raise it."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from ray import cloudpickle

from raysharding.errors import RayshardingError, said
from raysharding.group.messages.tracebacks import format_folded

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

# What a rank raised is read by the one process that watches all ranks, and is shown to people.
_MAX_MESSAGE_CHARS = 64 << 10
_MAX_TRACEBACK_CHARS = 256 << 10
_MAX_PICKLE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class RemoteError:
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
    """True if it says that a peer has gone, so that another rank's failure came first."""
    lost_peers: bool
    """True if torch.distributed said so: the process group is gone. A `ConnectionError` may be from anywhere."""
    recovered: bool
    """True if the module is right for later calls, provided that every rank raised alike."""
    agreed_from: int | None
    """The rank whose error this is, if all ranks have agreed to raise; `None` if they have not."""
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


def record_exception(
    error: BaseException, *, stage: Stage, phase: str, tensor: str | None, recovered: bool
) -> RemoteError:
    """Describe an exception on the rank where it was raised.

    Args:
        error: The exception.
        stage: `run`: while the ranks worked together; `output`: while this rank packed its result.
        phase: What the rank was doing.
        tensor: The tensor it last touched, in a load or save.
        recovered: True if the module is right for later calls, provided that every rank raised alike.
    """
    cls = type(error)
    is_builtin = cls.__module__ == "builtins"
    return RemoteError(
        error_type=cls.__qualname__ if is_builtin else f"{cls.__module__}.{cls.__qualname__}",
        message=said(error)[:_MAX_MESSAGE_CHARS],
        traceback=format_folded(error)[-_MAX_TRACEBACK_CHARS:],
        stage=stage,
        is_connection=is_connection_error(error),
        lost_peers=has_lost_peers(error),
        recovered=recovered,
        agreed_from=getattr(error, "raysharding_agreed_from", None),
        phase=phase,
        tensor=tensor,
        pickled=_pickle_exception(error),
    )


def is_connection_error(error: BaseException) -> bool:
    """Return True if an exception says that a peer or the store has gone, not that this rank did something wrong."""
    if any(isinstance(one, _torch_errors("DistBackendError")) and _has(one, _OWN_MARKS) for one in _causes(error)):
        return False
    return any(isinstance(one, ConnectionError) for one in _causes(error)) or has_lost_peers(error)


def has_lost_peers(error: BaseException) -> bool:
    """Return True if torch.distributed says that a peer or the store has gone, so that no later collective can work."""
    return any(
        # Of a backend: NCCL's errors and time-outs, after which its communicator is aborted.
        isinstance(one, _torch_errors("DistBackendError", "DistNetworkError", "DistStoreError"))
        or (isinstance(one, RuntimeError) and _has(one, _CONNECTION_MARKS))
        for one in _causes(error)
    )


def _torch_errors(*names: str) -> tuple[type[BaseException], ...]:
    """Return error classes of torch.distributed; none in a process that has not imported it, where none is raised."""
    dist = sys.modules.get("torch.distributed")
    return () if dist is None else tuple(getattr(dist, name) for name in names)


def _has(error: BaseException, marks: tuple[str, ...]) -> bool:
    return any(mark in said(error) for mark in marks)


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield the error and its causes, up to one of ours, which says itself what happened."""
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
