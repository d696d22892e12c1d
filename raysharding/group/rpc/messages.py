"""What the driver and a rank say to each other: `Command` and `Response`, and the parts of a response as typed data.

A rank tells what its part of a call raised as a `RemoteError`, instead of raising it through Ray.

Values travel packed: one pickle stream, tensor bytes beside it.
`pack` counts the bytes of a value, and raises if it cannot be pickled, before Ray stores any of it. Tensors are
packed as compact CPU bytes: torch's own pickling would send the whole storage behind a row slice.

From a call's arguments to packed parts: what ranks share is packed once, what is a rank's own goes to it alone.
"""

from __future__ import annotations

import io
import pickle
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
import ray
import torch
import torch.distributed as dist
from ray import cloudpickle

from raysharding.batch import RankBatch
from raysharding.errors import GroupTakenOverError, RayshardingError, said
from raysharding.group.rpc.tracebacks import format_folded
from raysharding.tree import leaves


@dataclass(frozen=True, slots=True)
class Shared:
    """Stands in a batch for a value that all ranks share and that was packed once."""

    index: int
    """Its place among the shared values."""


_Reduced = tuple[Callable[..., Any], tuple[Any, ...]]
_unpacking: ContextVar[Sequence[ray.ObjectRef]] = ContextVar("unpacking", default=())


@dataclass(frozen=True, slots=True)
class Packed:
    """A pickled value: the stream, and the bytes of its tensors and arrays outside the stream."""

    stream: bytes
    """Pickle protocol 5, without the large buffers."""
    buffers: tuple[np.ndarray[Any, Any], ...]
    """The buffers in stream order, one-dimensional uint8. Until `snapshot`, views of the packed tensors."""
    refs: tuple[ray.ObjectRef, ...] = ()
    """The `ObjectRef`s in the value. Ray must carry them, since only Ray can tell their owners who borrows them."""

    @property
    def num_bytes(self) -> int:
        """Size in bytes, stream and buffers together."""
        return len(self.stream) + sum(buffer.nbytes for buffer in self.buffers)

    def snapshot(self) -> Packed:
        """Copy the buffers, so that later changes of the packed tensors do not reach the receiver."""
        return replace(self, buffers=tuple(np.array(buffer) for buffer in self.buffers))

    def unpack(self) -> Any:
        """Rebuild the value. Its tensors own fresh, writable memory: Ray's shared memory is read-only."""
        return _unpack(self.stream, self.buffers, self.refs)


class AsValue:
    """A packed value that unpickles as the value itself, for ObjectRefs that the user gets with `ray.get`."""

    def __init__(self, packed: Packed) -> None:
        self._packed = packed

    def __reduce__(self) -> _Reduced:
        return _unpack, (self._packed.stream, self._packed.buffers, self._packed.refs)


def pack(value: Any, what: str) -> Packed:
    """Pickle a value with its tensors beside the stream, not copied yet.

    Args:
        value: Anything cloudpickle takes; tensors on any device arrive on the CPU.
        what: Name of the value in the error, such as `"result of forward"`.

    Raises:
        TypeError: The value, or a part of it, cannot be pickled: names the part.
    """
    try:
        return _pack(value)
    except Exception as error:  # a value's own __reduce__ may raise anything: this is the boundary
        raise TypeError(_explain(value, what, error)) from error


def _pack(value: Any) -> Packed:
    stream = io.BytesIO()
    buffers: list[np.ndarray[Any, Any]] = []

    def keep_outside(buffer: pickle.PickleBuffer) -> None:
        buffers.append(np.frombuffer(buffer.raw(), dtype=np.uint8))

    pickler = _TensorPickler(stream, protocol=5, buffer_callback=keep_outside)
    pickler.refs = []
    pickler.dump(value)
    return Packed(stream.getvalue(), tuple(buffers), tuple(pickler.refs))


def _unpack(stream: bytes, buffers: tuple[np.ndarray[Any, Any], ...], refs: Sequence[ray.ObjectRef] = ()) -> Any:
    before = _unpacking.set(refs)
    try:
        return pickle.loads(stream, buffers=[np.array(buffer) for buffer in buffers])
    finally:
        _unpacking.reset(before)


def _unpacked_ref(index: int) -> ray.ObjectRef:
    return _unpacking.get()[index]


class _TensorPickler(cloudpickle.CloudPickler):  # type: ignore[misc]  # Ray's module is untyped for mypy
    """cloudpickle, with dense tensors as out-of-band bytes, and `ObjectRef`s beside the stream."""

    refs: list[ray.ObjectRef]

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, ray.ObjectRef):
            self.refs.append(obj)
            return _unpacked_ref, (len(self.refs) - 1,)
        if type(obj) is torch.Tensor and obj.layout is torch.strided and not obj.is_quantized and not obj.is_meta:
            return _reduce_tensor(obj)
        return super().reducer_override(obj)


def _reduce_tensor(tensor: torch.Tensor) -> _Reduced:
    dense = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    data: Any = dense.reshape(-1).view(torch.uint8).numpy()
    return _rebuild_tensor, (pickle.PickleBuffer(data), tensor.dtype, tuple(tensor.shape), tensor.requires_grad)


def _rebuild_tensor(data: Any, dtype: torch.dtype, shape: tuple[int, ...], requires_grad: bool) -> torch.Tensor:
    """Turn bytes back into a tensor over the same memory, which `_unpack` copied for it."""
    flat = torch.from_numpy(np.frombuffer(data, dtype=np.uint8))
    return flat.view(dtype).reshape(shape).requires_grad_(requires_grad)


def _explain(value: Any, what: str, error: Exception) -> str:
    """Say which leaf of the value cannot be pickled."""
    where = ""
    for path, leaf in leaves(value):
        try:
            _pack(leaf)
        except Exception:  # noqa: BLE001  only looking for the leaf at fault; the first error is the one reported
            # In a dealt batch: from the user's own arguments on.
            named = path.rpartition("wrapped_")[2] or "the value itself"
            where = f" at {named} (type {type(leaf).__qualname__})"
            break
    return (
        f"{what} cannot be pickled{where}: {type(error).__name__}: {error}; "
        "pass and return tensors, arrays, numbers, strings or containers of them"
    )


def pack_same(what: str, *args: Any) -> Packed:
    """Pack positional arguments that are the same on every rank.

    Raises:
        TypeError: One of them cannot be pickled.
    """
    return pack((args, {}), f"an argument of {what}").snapshot()


def pack_batches(what: str, batches: Sequence[RankBatch], *extra: Any) -> tuple[Packed | list[Packed], Packed | None]:
    """Pack a call whose arguments were dealt out.

    Args:
        what: The call, for errors.
        batches: By rank.
        extra: Arguments that follow the batch, the same on every rank.

    Returns:
        The ranks' own arguments (one pack where all ranks get the same), and what they share besides.

    Raises:
        TypeError: An argument cannot be pickled.
    """
    shared: list[Any] = []
    stripped = _strip(batches, shared)
    if all(_is_bare(batch) for batch in stripped):
        return pack_same(what, batches[0], *extra), None
    own = [pack(((batch, *extra), {}), f"an argument of {what}").snapshot() for batch in stripped]
    return own, pack(tuple(shared), f"an argument of {what}").snapshot() if shared else None


def _strip(batches: Sequence[RankBatch], shared: list[Any]) -> list[RankBatch]:
    """Replace top-level values that are one object on every rank by marks, and collect them."""
    first, *others = [{**dict(enumerate(batch.wrapped_args)), **batch.wrapped_kwargs} for batch in batches]
    shared += [value for name, value in first.items() if all(other[name] is value for other in others)]
    marks = {id(value): Shared(index) for index, value in enumerate(shared)}
    return [batch.replaced(lambda value: marks.get(id(value), value)) for batch in batches]


def _is_bare(batch: RankBatch) -> bool:
    """Whether nothing in a stripped batch is this rank's own."""
    values = (*batch.wrapped_args, *batch.wrapped_kwargs.values())
    return batch.num_rows is None and all(isinstance(value, Shared) for value in values)


Mode = Literal["train", "eval"] | None
"""Mode of the modules in a call; `None`: the call's own default."""


def taken_over(name: str) -> GroupTakenOverError:
    """Build the error of an earlier driver's calls."""
    return GroupTakenOverError(
        f"{name} was taken over by another driver, which attached to it: its ranks live on and obey that one; attach "
        "again to take it back"
    )


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
class StateChange:
    """What a command did to a rank's weights and optimizer state.

    Ranks that held one model before it hold one after it where their changes are equal and whole.
    """

    whole: bool
    """Whether no change was left half-way, by this command or an earlier one."""
    num_changes: int
    """How often the command changed them."""
    num_collectives: int = field(default=0, compare=False)
    """How many collectives the rank began meanwhile: where ranks differ, the next ones would not match."""


def in_step(changes: Iterable[StateChange]) -> bool:
    """Return True if ranks with these changes began as many collectives, so that their next ones match."""
    return len({change.num_collectives for change in changes}) == 1


def one_model(changes: Iterable[StateChange]) -> bool:
    """Return True if ranks with these changes hold one model, provided that they held one before."""
    kinds = set(changes)
    return len(kinds) == 1 and all(change.whole for change in kinds)


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


def record_exception(
    error: BaseException, *, stage: Stage, phase: str, tensor: str | None, recovered: bool
) -> RemoteError:
    """Describe an exception on the rank where it was raised.

    Args:
        error: The exception.
        stage: See `RemoteError`.
        phase: See `RemoteError`.
        tensor: See `RemoteError`.
        recovered: See `RemoteError`.
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


@dataclass(frozen=True)
class SaveStatus:
    """What rank 0 says of a save."""

    is_done: bool
    """Whether it has ended, well or not."""
    bytes_done: int
    """Bytes written so far."""
    error: Exception | None
    """What it failed of."""


COMMAND_BYTES = 256 << 10
"""Longest argument in a message: the driver sends it to every rank, while Ray sends a stored one once to every node."""
RESULT_BYTES = 48 << 10
"""Longest result in a message: the driver holds it until somebody asks, while Ray holds a stored one on its node."""

NEXT_STEP = "_next"
"""A call in steps begins with its method, and goes on with the method of this ending as long as rank 0 has more."""

OutputMode = Literal["value", "ref"]

_NUMBER = struct.Struct("!Q")


@dataclass(frozen=True, slots=True)
class Command:
    """What one rank is to run.

    Its message is its number and a pickle. The arguments that are too large for a message are `ray.ObjectRef`s on the
    driver; Ray brings them to the rank together with the message.
    """

    method: str
    """Name of a method of `RankCommands`."""
    args: Packed | ray.ObjectRef | None = None
    """Packed `(args, kwargs)` of the rank."""
    shared: Packed | ray.ObjectRef | None = None
    """Packed tuple of the values that all ranks share, for which `Shared` marks stand in `args`."""
    output: OutputMode = "value"
    """`value`: the result as `Packed`; `ref`: as an object that `ray.get` turns into the result itself."""
    max_output_bytes: int | None = None
    """Cap on the packed result, `None` for results that are bounded otherwise."""
    resets: bool = False
    """Whether every rank resets its module first, as those did that raised alone in the call before."""
    epoch: int = 0
    """The driver's; a rank refuses the commands of a driver that another has followed."""
    number: int = 0
    """Tells the response to this command from the response to an earlier one."""

    def stored(self) -> Command:
        """Return the command with the arguments that are too large for a message put into the object store.

        Raises:
            ray.exceptions.RayError: The store is full.
        """
        return replace(self, args=_store(self.args), shared=_store(self.shared))

    def encode(self) -> tuple[bytes, list[ray.ObjectRef]]:
        """Return the message, and the stored arguments that Ray is to bring with it."""
        parts = self.args, self.shared
        inside = [None if isinstance(part, ray.ObjectRef) else part for part in parts]
        message = pickle.dumps(replace(self, args=inside[0], shared=inside[1]), pickle.HIGHEST_PROTOCOL)
        return _NUMBER.pack(self.number) + message, [part for part in parts if isinstance(part, ray.ObjectRef)]

    @staticmethod
    def decode(message: bytes, stored: Sequence[Packed] = ()) -> Command:
        """Rebuild on the rank what `encode` took apart.

        Args:
            message: The message.
            stored: The arguments that Ray brought with it.
        """
        command = pickle.loads(memoryview(message)[_NUMBER.size :])
        assert isinstance(command, Command), "made by encode"
        rest = list(stored)
        args = rest.pop(0) if command.args is None else command.args
        return replace(command, args=args, shared=rest.pop(0) if rest else command.shared)


def _store(part: Packed | ray.ObjectRef | None) -> Packed | ray.ObjectRef | None:
    return ray.put(part) if isinstance(part, Packed) and (part.refs or part.num_bytes > COMMAND_BYTES) else part


@dataclass(frozen=True, slots=True)
class Response:
    """How a command ended on one rank."""

    change: StateChange
    """What it did to what the rank holds."""
    number: int = 0
    """The command's."""
    error: RemoteError | None = None
    """The exception, `None` after success."""
    more: bool = False
    """Whether the same call has more to give (`state_dict`, a bucket at a time)."""
    value: Packed | None = None
    """Its packed result, where that is small; `None` where it is `None`."""
    is_stored: bool = False
    """Whether the result is an object of its own, as large ones and those that the user wants as references are."""

    def encode(self) -> bytes:
        """Return the message."""
        return _NUMBER.pack(self.number) + pickle.dumps(self, pickle.HIGHEST_PROTOCOL)

    @staticmethod
    def decode(message: bytes) -> Response:
        """Rebuild what `encode` gave."""
        response = pickle.loads(memoryview(message)[_NUMBER.size :])
        assert isinstance(response, Response), "made by encode"
        return response


def number_of(message: bytes) -> int:
    """Return the number of the command that a message is, or that it responds to."""
    return int(_NUMBER.unpack_from(message)[0])
