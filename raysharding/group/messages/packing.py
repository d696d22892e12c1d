"""Packed values: one pickle stream, with the bytes of tensors beside it.

`pack` counts the bytes of a value, and raises if it cannot be pickled, before Ray stores any of it. Tensors are
packed as compact CPU bytes: torch's own pickling would send the whole storage behind a row slice.

From a call's arguments to packed parts: what ranks share is packed once, what is a rank's own goes to it alone.

The controller imports this module, but not torch: a process without torch has no tensors.
"""

from __future__ import annotations

import io
import pickle
import sys
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import ray
from ray import cloudpickle

if TYPE_CHECKING:
    import torch

    from raysharding.batch import RankBatch


@dataclass(frozen=True, slots=True)
class Shared:
    """Mark in a batch for a value that all ranks share and that was packed once."""

    index: int
    """Index of the value among the shared values."""


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


def encoded(message: Any, *, has_refs: bool) -> Any:
    """Return a message of this package as bytes, which Ray sends as they are: its own pickling costs 0.1 ms each time.

    Args:
        message: An object of a class that `pickle` knows.
        has_refs: True if `ObjectRef`s or actor handles are in it, which only Ray can send: it is returned unchanged.
    """
    return message if has_refs else pickle.dumps(message, pickle.HIGHEST_PROTOCOL)


def decoded(sent: Any) -> Any:
    """Return the message that `encoded` was given."""
    return pickle.loads(sent) if isinstance(sent, bytes) else sent


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
        if type(obj) is getattr(sys.modules.get("torch"), "Tensor", None) and _is_dense(obj):
            return _reduce_tensor(obj)
        return super().reducer_override(obj)


def _is_dense(tensor: torch.Tensor) -> bool:
    import torch

    return tensor.layout is torch.strided and not tensor.is_quantized and not tensor.is_meta


def _reduce_tensor(tensor: torch.Tensor) -> _Reduced:
    import torch

    dense = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    data: Any = dense.reshape(-1).view(torch.uint8).numpy()
    return _rebuild_tensor, (pickle.PickleBuffer(data), tensor.dtype, tuple(tensor.shape), tensor.requires_grad)


def _rebuild_tensor(data: Any, dtype: torch.dtype, shape: tuple[int, ...], requires_grad: bool) -> torch.Tensor:
    """Turn bytes back into a tensor over the same memory, which `_unpack` copied for it."""
    import torch

    flat = torch.from_numpy(np.frombuffer(data, dtype=np.uint8))
    return flat.view(dtype).reshape(shape).requires_grad_(requires_grad)


def _explain(value: Any, what: str, error: Exception) -> str:
    """Say which leaf of the value cannot be pickled."""
    from raysharding.tree import leaves  # imports torch

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
    """Return True if nothing in a stripped batch is this rank's own."""
    values = (*batch.wrapped_args, *batch.wrapped_kwargs.values())
    return batch.num_rows is None and all(isinstance(value, Shared) for value in values)
