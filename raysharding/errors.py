"""The error tree. Every class survives pickling, so an error raised on a rank is the same error on the driver.

    RayshardingError
    ├── CheckpointError    (ValueError)    a file, header or index that cannot be trusted: names path and tensor
    ├── DataError          (ValueError)    data to train on that is missing, damaged, or other than before
    ├── EmptyBatchError    (ValueError)    a batch in which no label counts
    ├── PlanError          (ValueError)    checkpoint and model do not fit together: lists every mismatch
    ├── PlacementError     (TimeoutError)  the cluster cannot hold the group: need against have, per node
    ├── PreflightError     (RuntimeError)  nodes or links with which a group cannot work: lists every finding
    ├── RendezvousError    (TimeoutError)  ranks that did not arrive
    ├── OutputTooLargeError (ValueError)   a result over the cap: size, cap and the cure
    └── GroupError         (RuntimeError)  ranks failed: `primary` first, all in `failures`
        ├── CallTimeoutError (TimeoutError)  a call outlived its deadline
        ├── CallCancelledError               a call was taken out of the queue before any rank began it
        └── GroupBrokenError                 the group failed earlier; `primary` says how
            └── GroupTakenOverError          another driver has attached to the group

Errors that a user would catch by a builtin type inherit from that type too.
"""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

FailureKind = Literal["raised", "died", "hung", "collateral"]

_SHORT = reprlib.Repr()
_SHORT.maxstring, _SHORT.maxlong, _SHORT.maxother = 200, 80, 80


def said(error: BaseException) -> str:
    """What an exception says. A user's own `__str__` may raise anything, which must not hide the exception."""
    try:
        return str(error)
    except Exception as raised:  # noqa: BLE001
        return f"(its __str__ raised {type(raised).__name__})"


def shown(value: object) -> str:
    """The `repr` of a value from outside, for a message: long ones are cut in the middle, deep ones at the depth of 6.

    A header may name a tensor by a million digits; `repr` of a deep list could overflow the stack.
    """
    return _SHORT.repr(value)


class RayshardingError(Exception):
    """Root of every error that raysharding raises on purpose.

    Subclasses keep their constructor's arguments in attributes of the same name; `__reduce__` rebuilds from those,
    because `Exception`'s own pickling would call the constructor with the message alone.
    """

    _fields: tuple[str, ...] = ("message",)

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return _rebuild, (type(self), {name: getattr(self, name) for name in self._fields})


def _rebuild(cls: type[RayshardingError], fields: dict[str, Any]) -> RayshardingError:
    """Unpickle an error from the fields that `RayshardingError.__reduce__` kept."""
    return cls(**fields)


class CheckpointError(RayshardingError, ValueError):
    """A checkpoint that is missing, malformed, truncated, unsafe or unwritable.

    Args:
        message: What is wrong, with the value found and what was expected.
        path: File or directory at fault.
        tensor: Name of the tensor at fault, where there is one.
    """

    _fields = ("message", "path", "tensor")

    def __init__(self, message: str, *, path: str | None = None, tensor: str | None = None) -> None:
        super().__init__(message)
        self.path = path
        self.tensor = tensor

    def __str__(self) -> str:
        where = [part for part in (self.path, self.tensor and f"tensor {shown(self.tensor)}") if part]
        return f"{': '.join(where)}: {self.message}" if where else self.message


class DataError(RayshardingError, ValueError):
    """Data to train on that is missing, damaged, or not what a resumed run was fed before.

    Args:
        message: What is wrong, with the value found and what was expected.
        path: File or directory at fault, where there is one.
    """

    _fields = ("message", "path")

    def __init__(self, message: str, *, path: str | None = None) -> None:
        super().__init__(message)
        self.path = path

    def __str__(self) -> str:
        return f"{self.path}: {self.message}" if self.path else self.message


class EmptyBatchError(RayshardingError, ValueError):
    """A batch in which nothing counts: all its labels are masked, so that there is no loss to learn from.

    Every rank raises it before the optimizer has taken a step; the module is right, its gradients are dropped.
    """


class PlanError(RayshardingError, ValueError):
    """Model and checkpoint do not fit together. All mismatches of all ranks are listed at once.

    Args:
        message: One line of context.
        problems: One line for each mismatch, each naming the tensor.
    """

    _fields = ("message", "problems")

    def __init__(self, message: str, *, problems: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.problems = tuple(problems)

    def __str__(self) -> str:
        return "\n  ".join((self.message, *self.problems))


class PlacementError(RayshardingError, TimeoutError):
    """The cluster could not place the group before the deadline.

    Args:
        message: What was asked for, and need against have for each node.
        need: Resources of one rank, by Ray's names.
        have: node ip → resources, available now.
    """

    _fields = ("message", "need", "have")

    def __init__(
        self,
        message: str,
        *,
        need: Mapping[str, float] | None = None,
        have: Mapping[str, Mapping[str, float]] | None = None,
    ) -> None:
        super().__init__(message)
        self.need = dict(need or {})
        self.have = {node: dict(resources) for node, resources in (have or {}).items()}


class PreflightError(RayshardingError, RuntimeError):
    """Nodes or the links between them are such that the group cannot work. All findings are listed at once.

    Args:
        message: One line of context.
        problems: One line for each finding, each naming the nodes and the cure; warnings come last.
    """

    _fields = ("message", "problems")

    def __init__(self, message: str, *, problems: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.problems = tuple(problems)

    def __str__(self) -> str:
        return "\n  ".join((self.message, *self.problems))


class RendezvousError(RayshardingError, TimeoutError):
    """Ranks did not meet before the deadline.

    Args:
        message: Which rank waited, where and for how long.
        missing_ranks: The ranks that did not arrive, ascending.
    """

    _fields = ("message", "missing_ranks")

    def __init__(self, message: str, *, missing_ranks: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.missing_ranks = tuple(missing_ranks)


class OutputTooLargeError(RayshardingError, ValueError):
    """A call's output is over the cap, so it was not put into the object store.

    Args:
        message: Size, cap and the cure.
        num_bytes: Size of this rank's output.
        max_output_bytes: The cap it broke.
    """

    _fields = ("message", "num_bytes", "max_output_bytes")

    def __init__(self, message: str, *, num_bytes: int = 0, max_output_bytes: int = 0) -> None:
        super().__init__(message)
        self.num_bytes = num_bytes
        self.max_output_bytes = max_output_bytes


@dataclass(frozen=True)
class RankFailure:
    """What happened to one rank."""

    rank: int
    """Global rank."""
    node_ip: str
    """Address of the rank's node, as Ray knows it."""
    pid: int
    """Process id of the rank's actor."""
    kind: FailureKind
    """`raised`: user or library code raised; `died`: the process is gone; `hung`: alive but past the deadline;
    `collateral`: failed only because another rank did (a lost connection, a stop by the driver)."""
    phase: str
    """What the rank was doing: `place`, `rendezvous`, `plan`, `stream`, `finalize`, or the name of the call."""
    error_type: str = ""
    """Qualified name of the exception, empty where there was none."""
    message: str = ""
    """The exception's message, or how the process ended."""
    traceback: str = ""
    """The remote traceback, empty where there was none."""
    tensor: str | None = None
    """The tensor that the rank last touched, where a load or save failed."""

    def __str__(self) -> str:
        doing = f"in {self.phase}" + (f" at tensor {self.tensor!r}" if self.tensor else "")
        what = f"{self.error_type}: {self.message}" if self.error_type else self.message
        head = f"rank {self.rank} (node {self.node_ip}, pid {self.pid}) {self.kind} {doing}"
        return head + (f": {what}" if what else "")


class GroupError(RayshardingError, RuntimeError):
    """One or more ranks failed.

    Args:
        message: One line of context: the call and the group.
        primary: The failure that came first; the others followed from it or repeat it.
        failures: rank → failure, `primary` included.
    """

    _fields = ("message", "primary", "failures")

    def __init__(
        self,
        message: str,
        *,
        primary: RankFailure | None = None,
        failures: Mapping[int, RankFailure] | None = None,
    ) -> None:
        super().__init__(message)
        self.primary = primary
        self.failures = dict(failures or {})

    def __str__(self) -> str:
        lines = [self.message]
        if self.primary is not None:
            lines.append(f"primary: {self.primary}")
            lines.extend(f"  {line}" for line in self.primary.traceback.rstrip().splitlines())
        others = (failure for rank, failure in sorted(self.failures.items()) if failure is not self.primary)
        lines.extend(f"also: {failure}" for failure in others)
        return "\n".join(lines)


class CallTimeoutError(GroupError, TimeoutError):
    """A call outlived its deadline: some rank is hung, or slower than `Timeouts` allows."""


class CallCancelledError(GroupError):
    """Ctrl-C or `group.interrupt()` took the call out of the queue before any rank began it; the group is unharmed.

    A `fit` that `interrupt` ends raises it, too, between two steps.
    """


class GroupBrokenError(GroupError):
    """The group failed earlier and refuses calls; `primary` holds the cause."""


class GroupTakenOverError(GroupBrokenError):
    """Another driver has attached to the group, so this one's calls are refused; the ranks live on."""
