"""The error tree. Every class survives pickling, so an error raised on a rank has the same type on the driver.

    RayshardingError
    ├── CheckpointError    (ValueError)    an invalid file, header or index: names path and tensor
    ├── DataError          (ValueError)    training data that is missing, damaged, or not what the run used before
    ├── EmptyBatchError    (ValueError)    a batch whose labels are all masked
    ├── PlanError          (ValueError)    checkpoint and model do not match: lists every mismatch
    ├── PlacementError     (TimeoutError)  the cluster cannot hold the group: resources needed and available, per node
    ├── PreflightError     (RuntimeError)  nodes or links that prevent a group from working: lists every finding
    ├── RendezvousError    (TimeoutError)  ranks that did not arrive
    ├── OutputTooLargeError (ValueError)   a result over the cap: size, cap and the cure
    ├── UnreadableLossError (ValueError)   a loss from whose parts that of the whole batch does not follow
    └── GroupError         (RuntimeError)  ranks failed: `primary` first, all in `failures`
        ├── CallTimeoutError (TimeoutError)  a call exceeded its deadline
        ├── CallCancelledError               a call was removed from the queue before any rank began it
        └── GroupBrokenError                 the group failed earlier, or was shut down; `primary` holds the cause

An error that users would catch by a builtin type also inherits from that type. If every rank raised the same builtin
type, such as `ValueError`, the `GroupError` also inherits from that type (`caught_as`).
"""

from __future__ import annotations

import reprlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import islice
from typing import Any, Literal

FailureKind = Literal["raised", "died", "hung", "collateral"]

_SHORT = reprlib.Repr()
_SHORT.maxstring, _SHORT.maxlong, _SHORT.maxother = 200, 80, 80


def said(error: BaseException) -> str:
    """Return an exception's message. A user's own `__str__` may raise anything, which must not hide the exception."""
    try:
        return str(error)
    except Exception as raised:  # noqa: BLE001
        return f"(its __str__ raised {type(raised).__name__})"


def shown(value: object) -> str:
    """Return the `repr` of an untrusted value for a message: cut in the middle if long, at depth 6 if nested.

    A tensor's name in a header may have a million digits; `repr` of a deep list could overflow the stack.
    """
    return _SHORT.repr(value)


def listed(names: Collection[str]) -> str:
    """Return at most 8 names for a message, and how many more there are."""
    more = f" and {len(names) - 8} more" if len(names) > 8 else ""
    return ", ".join(islice(names, 8)) + more


class RayshardingError(Exception):
    """Base class of every error that raysharding raises on purpose.

    The constructor of each subclass takes the message by position, and all else by keyword, with defaults:
    `Exception`'s own pickling calls the constructor with the message alone, and then sets the attributes.
    """

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class CheckpointError(RayshardingError, ValueError):
    """A checkpoint that is missing, malformed, truncated, unsafe or unwritable.

    Args:
        message: What is wrong, with the value found and the value expected.
        path: File or directory at fault, if any.
        tensor: Name of the tensor at fault, if any.
    """

    def __init__(self, message: str, *, path: str | None = None, tensor: str | None = None) -> None:
        super().__init__(message)
        self.path = path
        self.tensor = tensor

    def __str__(self) -> str:
        where = [part for part in (self.path, self.tensor and f"tensor {shown(self.tensor)}") if part]
        return f"{': '.join(where)}: {self.message}" if where else self.message


class DataError(RayshardingError, ValueError):
    """Training data that is missing, damaged, or not what a resumed run used before.

    Args:
        message: What is wrong, with the value found and the value expected.
        path: File or directory at fault, if any.
    """

    def __init__(self, message: str, *, path: str | None = None) -> None:
        super().__init__(message)
        self.path = path

    def __str__(self) -> str:
        return f"{self.path}: {self.message}" if self.path else self.message


class EmptyBatchError(RayshardingError, ValueError):
    """A batch whose labels are all masked, so its loss is undefined.

    Every rank raises this error before the optimizer step; the module is unharmed and its gradients are dropped.
    """


class UnreadableLossError(RayshardingError, ValueError):
    """A loss from whose values on the ranks that of the whole batch does not follow; names the operation and the cure.

    Every rank raises this error before the backward; the module is unharmed.
    """


class _ListOfProblems(Exception):
    def __init__(self, message: str, *, problems: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.problems = tuple(problems)

    def __str__(self) -> str:
        return "\n  ".join((str(self.args[0]), *self.problems))


class PlanError(_ListOfProblems, RayshardingError, ValueError):
    """Model and checkpoint do not match. The error lists all mismatches of all ranks at once.

    Args:
        message: One line of context.
        problems: One line for each mismatch, naming the tensor.
    """


class PreflightError(_ListOfProblems, RayshardingError, RuntimeError):
    """Nodes, or the links between them, prevent the group from working. The error lists all findings at once.

    Args:
        message: One line of context.
        problems: One line for each finding, naming the nodes and the cure; warnings come last.
    """


class PlacementError(RayshardingError, TimeoutError):
    """The cluster could not place the group before the deadline, or has too few accelerators for it.

    Args:
        message: What was requested, and the resources needed and available on each node.
        need: Resources of one rank, under Ray's names.
        have: Node IP → resources available now.
    """

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


class RendezvousError(RayshardingError, TimeoutError):
    """Ranks did not arrive at the rendezvous before the deadline.

    Args:
        message: Which rank waited, where and for how long.
        missing_ranks: Ranks that did not arrive, ascending.
    """

    def __init__(self, message: str, *, missing_ranks: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.missing_ranks = tuple(missing_ranks)


class OutputTooLargeError(RayshardingError, ValueError):
    """A call's output exceeds the cap, so it was not put into the object store.

    Args:
        message: Size, cap and the cure.
        num_bytes: Size of this rank's output, in bytes.
        max_output_bytes: The cap that the output exceeds, in bytes.
    """

    def __init__(self, message: str, *, num_bytes: int = 0, max_output_bytes: int = 0) -> None:
        super().__init__(message)
        self.num_bytes = num_bytes
        self.max_output_bytes = max_output_bytes


@dataclass(frozen=True)
class RankFailure:
    """Failure of one rank."""

    rank: int
    """Global rank."""
    node_ip: str
    """Address of the rank's node, as Ray reports it."""
    pid: int
    """Process id of the rank's actor."""
    kind: FailureKind
    """`raised`: user or library code raised; `died`: the process has ended; `hung`: alive but past the deadline;
    `collateral`: failed only because another rank failed (a lost connection, a stop by the driver)."""
    phase: str
    """Phase of the rank at the failure: `place`, `rendezvous`, `plan`, `stream`, `finalize`, or the call's name."""
    error_type: str = ""
    """Qualified name of the exception; empty if none was raised."""
    message: str = ""
    """The exception's message, or how the process ended."""
    traceback: str = ""
    """The remote traceback; empty if there is none."""
    tensor: str | None = None
    """The tensor that the rank processed last, if a load or save failed."""

    def __str__(self) -> str:
        doing = f"in {self.phase}" + (f" at tensor {self.tensor!r}" if self.tensor else "")
        what = f"{self.error_type}: {self.message}" if self.error_type else self.message
        head = f"rank {self.rank} (node {self.node_ip}, pid {self.pid}) {self.kind} {doing}"
        return head + (f": {what}" if what else "")


class GroupError(RayshardingError, RuntimeError):
    """One or more ranks failed.

    Args:
        message: One line of context: the call and the group.
        primary: The first failure; the others followed from this failure or repeat it.
        failures: Rank → failure, `primary` included.
    """

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


def caught_as(error: GroupError, builtin: type[BaseException]) -> GroupError:
    """Return a copy of an error that `except` of a builtin type also catches.

    Args:
        error: A plain `GroupError`. An error of a subclass is returned unchanged.
        builtin: The type. The error is returned unchanged if the type is no builtin; if it is not an `Exception`, such
            as `SystemExit`; and if Python gives it a meaning of its own: `StopIteration`, `ExceptionGroup`.
    """
    special = (StopIteration, StopAsyncIteration, ExceptionGroup)
    is_fit = builtin.__module__ == "builtins" and issubclass(builtin, Exception) and not issubclass(builtin, special)
    if type(error) is not GroupError or not is_fit or isinstance(error, builtin):
        return error
    kind: Any = builtin  # mypy takes no class of exceptions for hashable
    copied: GroupError = _also(kind)(error.message, primary=error.primary, failures=error.failures)
    copied.__cause__ = error.__cause__
    return copied


@cache
def _also(builtin: Any) -> type[GroupError]:
    def reduce(self: GroupError) -> tuple[Any, ...]:
        return _rebuilt, (builtin, self.message), self.__dict__

    members = {"__reduce__": reduce, "__module__": __name__, "__doc__": GroupError.__doc__}
    return type(f"GroupError({builtin.__name__})", (GroupError, builtin), members)


def _rebuilt(builtin: Any, message: str) -> GroupError:
    made: GroupError = _also(builtin)(message)
    return made


class CallTimeoutError(GroupError, TimeoutError):
    """A call exceeded its deadline: a rank hangs, or is slower than `Timeouts` allows."""


class CallCancelledError(GroupError):
    """Ctrl-C, `group.interrupt()` or `Call.cancel()` removed the call from the queue; the group is unharmed.

    A `fit` that `interrupt` ends between two steps also raises it, and so does a stream of tokens that was cancelled.
    """


class GroupBrokenError(GroupError):
    """The group failed earlier (`primary` holds the cause), or was shut down, and rejects calls."""
