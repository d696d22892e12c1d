"""Floors: the minimal work of a load and nothing else. A floor's time shows how close a transport is to the machine.

`preadv` reads a rank's own byte ranges into its shards, as `local` must; `read_threads` does so by as many threads as a
load has, on accelerators into pinned buffers of the threads. `pinned` copies as many bytes as the shards hold from one
pinned buffer to the device. On accelerators the lower of these two is a load's floor. `scatter` sends as many bytes as
the shards hold from rank 0's memory through gloo, as `scatter` through sockets must. `prepare_*` makes the plans,
untimed.
"""

from __future__ import annotations

import os
import queue
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import nn

from raysharding.checkpoint import Checkpoint, open_checkpoint
from raysharding.distributed import materialize
from raysharding.distributed.comm import current_device, device_module, is_accelerator, is_available
from raysharding.distributed.fully_shard import ShardMap, local_tensor, module_tensors, tensor_layout
from raysharding.distributed.loading.load import read_threads
from raysharding.distributed.transfer.sources import JOB_BYTES, as_memory
from raysharding.models import Target, map_keys
from tests.bench.case import Case, Run

SCATTER_BYTES = 64 << 20
"""Bytes of one scatter, all ranks together."""
PINNED_BYTES = 64 << 20
"""Bytes of the page-locked buffer."""
MAX_VIEWS = 1024
"""Views that one `preadv` takes (IOV_MAX)."""


@dataclass(frozen=True, slots=True)
class FileRange:
    """A range of a file, and the memory that the range is read into."""

    file: int
    """Index into `Checkpoint.files`."""
    offset: int
    """Offset of the first byte in the file."""
    view: memoryview
    """Writable memory, as long as the range."""


def own_ranges(module: nn.Module, checkpoint: Checkpoint) -> list[FileRange]:
    """Return the ranges of the files that hold this rank's part of a module, in file order.

    Args:
        module: The module, sharded and materialised on the CPU. Ranges of a tensor that has the files' dtype point to
            its memory; others (a change of dtype, a conversion) point to scratch memory of the same length.
        checkpoint: The headers of the files.

    Returns:
        The ranges. For a tensor that only transformers' own operations can convert, the rank's share of its sources.
    """
    tensors = module_tensors(module)
    shard_index = ShardMap.of(tensors).shard_index
    ranges: list[FileRange] = []
    for fqn, target in map_keys(module, checkpoint.tensors, None).targets.items():
        layout = tensor_layout(fqn, tensors[fqn])
        start, stop = layout.local_range(shard_index)
        if target.runs is None:
            ranges += _shares(target, checkpoint, shard_index, max(layout.num_shards, 1))
        else:
            memory = as_memory(local_tensor(tensors[fqn]).reshape(-1))
            ranges += _runs(target, checkpoint, start, stop, memory)
    return sorted(ranges, key=lambda item: (item.file, item.offset))


def _runs(target: Target, checkpoint: Checkpoint, start: int, stop: int, memory: memoryview) -> Iterator[FileRange]:
    """Yield the parts of a target's runs that lie in elements `start` to `stop`; `memory` holds these elements."""
    for run in target.runs or ():
        first = max(run.target_start, start)
        last = min(run.target_start + run.num_elements, stop)
        if first >= last:
            continue
        info = checkpoint.tensors[run.source]
        size = info.dtype.itemsize
        if info.dtype == target.dtype:
            view = memory[(first - start) * size : (last - start) * size]
        else:
            view = memoryview(bytearray((last - first) * size))
        yield FileRange(info.file, info.offset + (run.source_start + first - run.target_start) * size, view)


def _shares(target: Target, checkpoint: Checkpoint, index: int, num_shards: int) -> Iterator[FileRange]:
    for name in target.sources:
        info = checkpoint.tensors[name]
        first, last = info.num_bytes * index // num_shards, info.num_bytes * (index + 1) // num_shards
        if first < last:
            yield FileRange(info.file, info.offset + first, memoryview(bytearray(last - first)))


@dataclass(frozen=True, slots=True)
class _Read:
    """Arguments of one `preadv` call."""

    descriptor: int
    offset: int
    views: list[memoryview]
    num_bytes: int


def _merge(ranges: list[FileRange], descriptors: list[int]) -> list[_Read]:
    """Merge adjacent ranges into one read each, up to `MAX_VIEWS` ranges."""
    reads: list[_Read] = []
    for item in ranges:
        last = reads[-1] if reads else None
        descriptor = descriptors[item.file]
        follows = last is not None and (last.descriptor, last.offset + last.num_bytes) == (descriptor, item.offset)
        if last is not None and follows and len(last.views) < MAX_VIEWS:
            views, num_bytes = [*last.views, item.view], last.num_bytes + item.view.nbytes
            reads[-1] = _Read(descriptor, last.offset, views, num_bytes)
        else:
            reads.append(_Read(descriptor, item.offset, [item.view], item.view.nbytes))
    return reads


def _opened(checkpoint: Checkpoint) -> tuple[ExitStack, list[int]]:
    """Open the files; leaving the stack closes them."""
    stack = ExitStack()
    descriptors = [os.open(file.path, os.O_RDONLY | os.O_CLOEXEC) for file in checkpoint.files]
    for descriptor in descriptors:
        stack.callback(os.close, descriptor)
    return stack, descriptors


def prepare_preadv_floor(case: Case, module: nn.Module) -> Run:
    """Prepare every rank's reads of its own ranges into its shards; only `preadv` calls are timed."""
    checkpoint = open_checkpoint(case.checkpoint)
    materialize(module, torch.device("cpu"))
    stack, descriptors = _opened(checkpoint)
    reads = _merge(own_ranges(module, checkpoint), descriptors)

    def run() -> None:
        with stack:
            for read in reads:
                _read_all(read)

    return run


def prepare_read_threads_floor(case: Case, module: nn.Module) -> Run:
    """Prepare every rank's reads of its own ranges by the threads of a load, `JOB_BYTES` each; nothing is copied."""
    checkpoint = open_checkpoint(case.checkpoint)
    materialize(module, torch.device("cpu"))
    stack, descriptors = _opened(checkpoint)
    num_threads = read_threads(torch.device(case.device_type), dist.get_world_size())
    jobs: queue.SimpleQueue[_Read] = queue.SimpleQueue()
    for item in own_ranges(module, checkpoint):
        for first in range(0, item.view.nbytes, JOB_BYTES):
            view = item.view[first : first + JOB_BYTES]
            jobs.put(_Read(descriptors[item.file], item.offset + first, [view], view.nbytes))
    buffers: list[memoryview | None] = [None] * num_threads
    if is_accelerator(torch.device(case.device_type)):
        materialize(module, current_device(case.device_type))
        buffers = [as_memory(torch.empty(JOB_BYTES, dtype=torch.uint8, pin_memory=True)) for _ in buffers]

    def work(buffer: memoryview | None) -> None:
        while True:
            try:
                read = jobs.get_nowait()
            except queue.Empty:
                return
            _read_all(read if buffer is None else replace(read, views=[buffer[: read.num_bytes]]))

    def run() -> None:
        with stack, ThreadPoolExecutor(num_threads) as threads:
            list(threads.map(work, buffers))

    return run


def _read_all(read: _Read) -> None:
    """Read all bytes, mostly by one `preadv`, which stops at 2 GiB."""
    done = os.preadv(read.descriptor, read.views, read.offset)
    while done < read.num_bytes:
        skipped, rest = done, []
        for view in read.views:
            rest.append(view[min(skipped, view.nbytes) :])
            skipped -= min(skipped, view.nbytes)
        count = os.preadv(read.descriptor, [view for view in rest if view.nbytes], read.offset + done)
        if count == 0:
            raise ValueError(f"the file ends {read.num_bytes - done} bytes early: was the file changed?")
        done += count


def wire_bytes(module: nn.Module, checkpoint: Checkpoint, shard_index: int) -> int:
    """Return one shard's bytes on the wire: its elements in the narrower of the files' and the module's dtypes."""
    tensors = module_tensors(module)
    total = 0
    for fqn, target in map_keys(module, checkpoint.tensors, None).targets.items():
        start, stop = tensor_layout(fqn, tensors[fqn]).local_range(shard_index)
        total += (stop - start) * min(target.source_dtype.itemsize, target.dtype.itemsize)
    return total


def prepare_scatter_floor(case: Case, module: nn.Module) -> Run:
    """Prepare gloo scatters of as many bytes as the shards hold, `SCATTER_BYTES` each, from one buffer on rank 0.

    Every rank receives into memory of a shard's size, which is as fresh or as warm as a shard's memory.
    """
    if case.sharding.replicate_size > 1:
        raise ValueError("scatter_floor: replicas fill each other: measure this floor with replicate_size=1")
    world_size = dist.get_world_size()
    # Shard 0 is never shorter than another shard; all messages of a scatter have one length.
    num_bytes = wire_bytes(module, open_checkpoint(case.checkpoint), 0)
    message_bytes = max(1, SCATTER_BYTES // world_size)
    memory = torch.empty(num_bytes, dtype=torch.uint8)
    parts = list(memory.split(message_bytes))
    source: list[torch.Tensor] | None = None
    if dist.get_rank() == 0:
        source = list(torch.ones(message_bytes * world_size, dtype=torch.uint8).split(message_bytes))
    lists = [None if source is None else [item[: part.numel()] for item in source] for part in parts]

    def run() -> None:
        for part, messages in zip(parts, lists, strict=True):
            # Every rank has the same number of parts: the others would wait for a rank that left early.
            dist.scatter(part, messages, src=0)

    return run


def prepare_pinned_floor(case: Case, module: nn.Module) -> Run:
    """Prepare copies of as many bytes as this rank's shards hold, from one page-locked buffer to the rank's GPU."""
    if not is_accelerator(torch.device(case.device_type)) or not is_available(case.device_type):
        raise ValueError("pinned_floor: torch sees no GPU here: leave it out")
    device = current_device(case.device_type)
    materialize(module, device)
    targets = [local_tensor(tensor) for tensor in module_tensors(module).values()]
    parts = [part for item in targets for part in item.reshape(-1).view(torch.uint8).split(PINNED_BYTES)]
    source = torch.ones(PINNED_BYTES, dtype=torch.uint8, pin_memory=True)

    def run() -> None:
        for part in parts:
            part.copy_(source[: part.numel()], non_blocking=True)
        device_module(device).synchronize(device)

    return run
