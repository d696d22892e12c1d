"""Values as they travel between driver and ranks: one pickle stream, tensor bytes beside it.

`pack` counts the bytes of a value, and raises if it cannot be pickled, before Ray stores any of it. Tensors are
packed as compact CPU bytes: torch's own pickling would send the whole storage behind a row slice.

From a call's arguments to packed parts: what ranks share is packed once, what is a rank's own goes to it alone.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from ray import cloudpickle

from raysharding.batch import RankBatch
from raysharding.tree import leaves


@dataclass(frozen=True, slots=True)
class Shared:
    """Stands in a batch for a value that all ranks share and that was packed once."""

    index: int
    """Its place among the shared values."""


_Reduced = tuple[Callable[..., Any], tuple[Any, ...]]


@dataclass(frozen=True, slots=True)
class Packed:
    """A pickled value: the stream, and the bytes of its tensors and arrays outside the stream."""

    stream: bytes
    """Pickle protocol 5, without the large buffers."""
    buffers: tuple[np.ndarray[Any, Any], ...]
    """The buffers in stream order, one-dimensional uint8. Until `snapshot`, views of the packed tensors."""

    @property
    def num_bytes(self) -> int:
        """Size in bytes, stream and buffers together."""
        return len(self.stream) + sum(buffer.nbytes for buffer in self.buffers)

    def snapshot(self) -> Packed:
        """Copy the buffers, so that later changes of the packed tensors do not reach the receiver."""
        return Packed(self.stream, tuple(np.array(buffer) for buffer in self.buffers))

    def unpack(self) -> Any:
        """Rebuild the value. Its tensors own fresh, writable memory: Ray's shared memory is read-only."""
        return _unpack(self.stream, self.buffers)


class AsValue:
    """A packed value that unpickles as the value itself, for ObjectRefs that the user gets with `ray.get`."""

    def __init__(self, packed: Packed) -> None:
        self._packed = packed

    def __reduce__(self) -> _Reduced:
        return _unpack, (self._packed.stream, self._packed.buffers)


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

    _TensorPickler(stream, protocol=5, buffer_callback=keep_outside).dump(value)
    return Packed(stream.getvalue(), tuple(buffers))


def _unpack(stream: bytes, buffers: tuple[np.ndarray[Any, Any], ...]) -> Any:
    return pickle.loads(stream, buffers=[np.array(buffer) for buffer in buffers])


class _TensorPickler(cloudpickle.CloudPickler):  # type: ignore[misc]  # Ray's module is untyped for mypy
    """cloudpickle, with dense tensors as out-of-band bytes."""

    def reducer_override(self, obj: Any) -> Any:
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
    args = [list(batch.wrapped_args) for batch in batches]
    kwargs = [dict(batch.wrapped_kwargs) for batch in batches]
    for index, value in enumerate(batches[0].wrapped_args):
        if all(batch.wrapped_args[index] is value for batch in batches):
            _mark(args, index, value, shared)
    for key, value in batches[0].wrapped_kwargs.items():
        if all(batch.wrapped_kwargs[key] is value for batch in batches):
            _mark(kwargs, key, value, shared)
    return [
        replace(batch, wrapped_args=tuple(own_args), wrapped_kwargs=own_kwargs)
        for batch, own_args, own_kwargs in zip(batches, args, kwargs, strict=True)
    ]


def _mark(containers: Sequence[Any], key: Any, value: Any, shared: list[Any]) -> None:
    for container in containers:
        container[key] = Shared(len(shared))
    shared.append(value)


def _is_bare(batch: RankBatch) -> bool:
    """Whether nothing in a stripped batch is this rank's own."""
    values = (*batch.wrapped_args, *batch.wrapped_kwargs.values())
    return batch.num_rows is None and all(isinstance(value, Shared) for value in values)
