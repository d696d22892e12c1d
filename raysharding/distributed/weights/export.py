"""`WeightStream`: full tensors under the names of the files, one at a time, for engines that load from an iterator.

The interface is that of vLLM's models, `load_weights(weights: Iterable[tuple[str, torch.Tensor]])`, to which SGLang's
`update_weights_from_tensor` and `update_weights_from_distributed` also pass their tensors. Names and shapes are those
of a checkpoint of transformers: engines map them to their own. Some models of vLLM collect the tensors in a list or a
dict before they copy them, so every tensor is memory of its own, which the caller keeps.
"""

from __future__ import annotations

import zlib
from collections.abc import Collection, Iterator, Mapping
from math import prod
from threading import get_ident
from time import monotonic
from typing import Any, Literal, Self

import torch
from torch import nn

from raysharding.arguments import check_int
from raysharding.distributed.comm import all_gather_ints, all_gather_json, get_rank, get_world_size
from raysharding.distributed.fully_shard import local_tensor, message_device, reshard, unwrapped
from raysharding.distributed.saving import model_contents
from raysharding.distributed.transfer import GATHER_BUCKET_BYTES, Gather, wire_dtype
from raysharding.distributed.weights.plan_shards import MergedShards, base_tensors
from raysharding.models import RunIndex, SavedTensor, saved_layout

_iterating: list[WeightStream] = []
"""Streams of this process whose iterators have begun and are not closed: a traceback may hold one that has failed."""


class WeightStream:
    """Gives full tensors on some ranks, a bucket at a time. Every rank makes one with equal arguments and iterates it.

    As a context manager it ends with an error on every rank if a rank has not iterated to the end. Before each bucket,
    and after the last, the ranks tell each other that they go on, so that none waits for messages of one that stopped.

    Wire: each shard once to each of `ranks`, and an all-reduce of 16 bytes per rank for each bucket. Memory on `ranks`,
    above the shards and the tensors that the caller still holds: one bucket and one tensor, or the tensors that lie
    interleaved in one parameter; on the other ranks, at most a bucket. A merge takes `MergedShards` on every rank.

    Args:
        module: A sharded module.
        ranks: Global ranks that get the tensors; the others iterate too, and get none.
        bucket_bytes: Bytes in flight, over all `ranks` together.
        dtype: dtype that floating-point tensors are converted to, on their shards where it is narrower. Default: their
            own.
        merge: True for the base model with its LoRA adapters merged, values as from peft's `merge_and_unload`; False
            for what a save writes, of a model with adapters these alone.
        timeout_s: Longest wait for the other ranks to begin, and for one round of messages, in seconds. Between two
            buckets a rank may take as long as the process group's timeout, for its engine.

    Raises:
        ValueError: `ranks`, `bucket_bytes` or `dtype` is invalid.
        PlanError: With `merge`, no adapters, or such that cannot be merged; see `adapter_merges`.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        ranks: Collection[int] = (0,),
        bucket_bytes: int = GATHER_BUCKET_BYTES,
        dtype: torch.dtype | None = None,
        merge: bool = False,
        timeout_s: float = 120.0,
    ) -> None:
        _check(ranks, bucket_bytes, dtype)
        module = unwrapped(module)
        reshard(module)
        if merge:
            tensors = base_tensors(module)
            layout = saved_layout(module, tensors, merged=True)
        else:
            tensors, layout = model_contents(module)
        names = list(dict.fromkeys(run.source for saved in layout.values() for run in saved.runs))
        device = message_device(module)
        self._assembly = _Assembly(layout, device, dtype)
        self._merged: MergedShards | None = None
        if merge:
            num_elements = {name: len({*ranks}) * local_tensor(tensors[name]).numel() for name in names}
            self._merged = MergedShards(module, num_elements)
        self._num_merge_messages = 0
        self._timeout_s = timeout_s
        self._num_tensors = len(layout)
        self._state: Literal["open", "done", "left", "failed"] = "open"
        arguments = (sorted(ranks), bucket_bytes, dtype, merge, names)
        self._fingerprint = zlib.crc32(repr(arguments).encode())
        self._received: list[tuple[int, int, torch.Tensor]] = []
        place = {name: index for index, name in enumerate(names)}
        own = {name: tensors[name].dtype for name in names if tensors[name].is_floating_point()}
        self._gather = Gather(
            {name: tensors[name] for name in names},
            dict.fromkeys(sorted(ranks), names),
            lambda name, first, values: self._received.append((place[name], first, values)),
            device,
            timeout_s,
            bucket_bytes,
            in_order=True,
            dtypes=own if dtype is None else {name: wire_dtype(stored, dtype) for name, stored in own.items()},
            read=None if self._merged is None else self._merged.read,
            on_device=True,
        )
        self._names = names

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (key, full tensor) of each tensor of a save; on ranks that are not in `ranks`, nothing. Collective.

        The tensors are on the device of the module's mesh (the CPU for gloo), contiguous, and the caller's to keep.

        Raises:
            ConnectionAbortedError: Another rank has stopped early; the message says why.
            TimeoutError: Another rank has not begun to iterate within `timeout_s`.
            ValueError: The ranks gave different arguments, or this rank is iterating over another stream.
        """
        if any(stream._state == "open" for stream in _iterating):
            # Ranks that get nothing go through one stream after the other: checks of two streams would meet.
            raise ValueError("weights(): another one is not at its end; iterate over one at a time")
        _iterating.append(self)
        thread = get_ident()
        try:
            self._meet(timeout_s=self._timeout_s)
            if self._merged is not None:
                self._num_merge_messages = self._merged.gather_adapters(self._timeout_s)
            if get_rank() in self._gather.destinations:
                yield from self._assembly.without_elements()  # no bucket holds them
            for _ in self._gather.rounds():
                yield from self._complete()
                if self._state != "open":
                    raise ValueError("weights(): this iterator has ended with the call that it was made in")
                self._meet()
            self._state = "done"
        except GeneratorExit:
            # The others hear of it at once: this rank's next collective would meet their check. Where the garbage
            # collector runs on another thread, which must not communicate, the end of the context tells them.
            if get_ident() == thread:
                self._stop(self._progress)
            raise
        except BaseException:
            if self._state == "open":
                self._state = "failed"  # messages may be pending, and no later check would match the others'
            raise
        finally:
            _iterating.remove(self)

    def __enter__(self) -> Self:
        """Return the stream."""
        return self

    def __exit__(self, error_type: object, error: BaseException | None, traceback: object) -> None:
        """Tell the other ranks if this rank has not iterated to the end.

        Raises:
            ValueError: It has not, and there is no other error.
        """
        if isinstance(error, Exception):
            try:
                self._stop(f"{self._progress}: {type(error).__name__}: {error}")
            except Exception as failure:  # noqa: BLE001 - the caller's error is the one to report
                error.add_note(f"raysharding: the other ranks were not told: {type(failure).__name__}: {failure}")
        elif error is None and self._state in ("open", "left"):
            self._stop(self._progress)
            raise ValueError(f"weights(): rank {get_rank()} {self._progress}: every rank iterates to the end")
        elif self._state == "open":
            self._state = "failed"  # an interrupt, which may have struck in a message: nothing more can match

    @property
    def num_messages(self) -> int:
        """Number of messages that this rank has sent or received."""
        return self._gather.num_messages + self._num_merge_messages

    @property
    def _progress(self) -> str:
        return f"stopped after {self._assembly.num_given} of {self._num_tensors} tensors"

    def _complete(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the tensors that the round's values complete; a tensor is allocated when its first values are taken."""
        # The gather gives the segments by shard. In the order of the elements few tensors are incomplete at a time.
        for index, first, values in sorted(self._received, key=lambda item: item[:2]):
            yield from self._assembly.take(self._names[index], first, values)
        self._received.clear()

    def _stop(self, why: str) -> None:
        """Tell the other ranks that this rank does not go on, unless it has finished or failed. Collective.

        The other ranks take part in their next check.
        """
        if self._state == "open":
            self._state = "left"
            self._meet(why, timeout_s=self._timeout_s)

    def _meet(self, why: str | None = None, timeout_s: float = 0.0) -> None:
        """Check that all ranks go on; collective.

        Args:
            why: Why this rank does not; `None` if it does.
            timeout_s: Longest wait. Default: the timeout of the process group.
        """
        since = monotonic()
        try:
            # Every rank calls this before each bucket, after the last, and when it stops early: the others would wait
            # for messages of the bucket that it does not take part in.
            rows = all_gather_ints([why is not None, self._fingerprint], timeout_s=timeout_s)
        except RuntimeError as error:
            if timeout_s and monotonic() - since >= timeout_s:
                raise TimeoutError(
                    f"weights(): other ranks did not take part within {timeout_s:g} s: call it on every rank and "
                    "iterate to the end, also on those that ranks= leaves out"
                ) from error
            raise
        if len({fingerprint for _, fingerprint in rows}) > 1:
            raise ValueError("weights(): the ranks gave different arguments; give the same on every rank")
        leaving = [rank for rank, (leaves, _) in enumerate(rows) if leaves]
        if leaving:
            # All ranks know that one leaves, so all take part.
            reasons = all_gather_json(why)
            if why is None:
                raise ConnectionAbortedError(f"weights(): rank {leaving[0]} {reasons[leaving[0]]}")


def _check(ranks: Any, bucket_bytes: Any, dtype: Any) -> None:
    world_size = get_world_size()
    given = list(ranks) if isinstance(ranks, Collection) else []
    if not given or any(type(one) is not int or not 0 <= one < world_size for one in given):
        raise ValueError(f"ranks={ranks!r}: give one or more ranks from 0 to {world_size - 1}, such as [0]")
    check_int("bucket_bytes", bucket_bytes)
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise ValueError(f"dtype={dtype!r}: give a floating-point dtype, such as torch.bfloat16, or None")


class _Assembly:
    """Puts tensors together from ranges of the module's tensors, which come in order."""

    def __init__(self, layout: Mapping[str, SavedTensor], device: torch.device, dtype: torch.dtype | None) -> None:
        self._layout = layout
        self._device, self._dtype = device, dtype
        self._runs = RunIndex()
        for key, saved in self._layout.items():
            self._runs.add(key, saved)
        self.num_given = 0
        self._open: dict[str, torch.Tensor] = {}
        self._missing: dict[str, int] = {}

    def take(self, source: str, first: int, values: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        """Copy a range of a module's tensor, and yield (key, tensor) of each tensor that it completes.

        No reference to a yielded tensor is kept, in a local variable neither: its memory is the caller's to free.

        Args:
            source: FQN of the tensor.
            first: First element, in the flattened tensor.
            values: 1-D values, on any device.
        """
        for key, at, start, stop in self._runs.parts(source, first, values.numel()):
            if key not in self._open:
                self._open[key] = self._allocated(key)
                self._missing[key] = self._open[key].numel()
            self._open[key].view(-1)[at : at + stop - start].copy_(values[start:stop])
            self._missing[key] -= stop - start
            if not self._missing[key]:
                self.num_given += 1
                yield key, self._open.pop(key)

    def without_elements(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (key, tensor) of each tensor that has no elements."""
        for key, saved in self._layout.items():
            if not prod(saved.shape):
                self.num_given += 1
                yield key, self._allocated(key)

    def _allocated(self, key: str) -> torch.Tensor:
        saved = self._layout[key]
        dtype = self._dtype if saved.dtype.is_floating_point else None
        return torch.empty(saved.shape, dtype=dtype or saved.dtype, device=self._device)
