"""Collectives of JSON values, which are sent as uint8 tensors and never as pickles.

Note [Exit]: a thread of gloo drops the tensors of a collective after the caller has gone on, and takes the GIL for that
(torch 2.13). Where the interpreter ends meanwhile, the process aborts with "terminate called without an active
exception" (pytorch/pytorch#190489), as 7 of 24 programs did whose last call was a save, on a machine under load.
"""

from __future__ import annotations

import atexit
import functools
import json
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from raysharding.distributed.comm.current_group import current_group
from raysharding.distributed.comm.device import current_device
from raysharding.distributed.comm.waiting import to_host, wait_for


def metadata_device(group: dist.ProcessGroup | None = None) -> torch.device:
    """Return the device for small metadata tensors of `group`: the CPU if it has a backend, else the accelerator."""
    types = [part.partition(":")[0] for part in dist.get_backend_config(group or current_group()).split(",")]
    return current_device("cpu" if "cpu" in types else types[0])


_EXIT_S = 0.05
"""Time for gloo's threads at the exit of the process, in seconds."""


@functools.cache
def let_gloo_end() -> None:
    """Make the exit of this process leave the GIL to gloo's threads for a moment, once (Note [Exit])."""
    atexit.register(time.sleep, _EXIT_S)


_HEAD_BYTES = 1 << 10
"""Bytes that are sent first. Nearly all values are shorter: a second collective takes a tenth of a fast load's time."""
_LENGTH_BYTES = 8


def _encode(value: Any) -> torch.Tensor:
    """Return the length of a value's JSON, and the JSON."""
    data = json.dumps(value, separators=(",", ":")).encode()
    return torch.frombuffer(bytearray(len(data).to_bytes(_LENGTH_BYTES, "little") + data), dtype=torch.uint8)


def _num_bytes(data: torch.Tensor) -> int:
    """Return the bytes of an encoded value, of which `data` has the first."""
    return _LENGTH_BYTES + int.from_bytes(data[:_LENGTH_BYTES].numpy().tobytes(), "little")


def _decode(data: torch.Tensor) -> Any:
    return json.loads(data[_LENGTH_BYTES : _num_bytes(data)].numpy().tobytes())


def _resized(data: torch.Tensor, num_bytes: int, group: dist.ProcessGroup | None) -> torch.Tensor:
    """Return the first bytes of data, or data with zeros at its end, on the device for metadata."""
    return nn.functional.pad(data, (0, num_bytes - data.numel())).to(metadata_device(group))


def all_gather_json(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Gather one JSON value from every rank; collective over `group`.

    Args:
        value: Any value that `json.dumps` accepts.
        group: Process group. Default: the current group.

    Returns:
        The values in rank order, on every rank. Wire: from each rank to each 1 KiB, and the length of the longest value
        if one is longer.
    """
    data = _encode(value)
    gathered = _all_gather(data, _HEAD_BYTES, group)
    # All ranks know all lengths: either each takes part in the second all-gather, with the same size, or none does.
    if (longest := max(map(_num_bytes, gathered))) > _HEAD_BYTES:
        gathered = _all_gather(data, longest, group)
    return [_decode(one) for one in gathered]


def _all_gather(data: torch.Tensor, num_bytes: int, group: dist.ProcessGroup | None) -> list[torch.Tensor]:
    """Gather as many bytes from every rank; collective."""
    let_gloo_end()
    group = group or current_group()
    mine = _resized(data, num_bytes, group)
    gathered = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(gathered, mine, group=group)
    return [to_host(one) for one in gathered]


def all_gather_ints(
    values: Sequence[int], group: dist.ProcessGroup | None = None, *, timeout_s: float = 0.0
) -> list[list[int]]:
    """Gather a few integers from every rank; collective over `group`, cheap enough for every step.

    Args:
        values: The same number of values on every rank, each below 2^63.
        group: Process group. Default: the current group.
        timeout_s: Longest wait for the other ranks. Default: the timeout of the process group.

    Returns:
        The values of each rank, in rank order, on every rank. Wire: an all-reduce of 8 bytes per value and rank.
    """
    group = group or current_group()
    table = torch.zeros(dist.get_world_size(group), len(values), dtype=torch.int64, device=metadata_device(group))
    table[dist.get_rank(group)] = torch.tensor(values, device="cpu")  # also where the caller makes modules on meta
    # Every rank calls this, without rows too: the others would wait in the all-reduce. A sum in which each rank fills
    # its own row, because an all-gather over four ranks takes gloo five times as long as an all-reduce.
    work: dist.Work | None = dist.all_reduce(table, group=group, async_op=True)
    if work is not None:  # `None`: this rank is not in the group
        wait_for(work, timedelta(seconds=timeout_s))
    rows: list[list[int]] = to_host(table).tolist()
    return rows


def any_rank(flag: bool, group: dist.ProcessGroup | None = None) -> bool:
    """Return True if `flag` is True on a rank; collective over `group`, with the same result on every rank."""
    return any(one for (one,) in all_gather_ints([flag], group))


def broadcast_json(value: Any, group: dist.ProcessGroup | None = None, source: int = 0) -> Any:
    """Broadcast the JSON value of one rank; collective over `group`.

    Args:
        value: Value to send; ignored on all ranks but `source`.
        group: Process group. Default: the current group.
        source: Rank within `group` that sends.

    Returns:
        The value of `source`, on every rank.
    """
    let_gloo_end()
    group = group or current_group()
    data = _encode(value if dist.get_rank(group) == source else None)
    received = _resized(data, _HEAD_BYTES, group)
    dist.broadcast(received, group_src=source, group=group)
    # Every rank knows the source's length: all take part in the second broadcast, with a buffer of that size, or none.
    if (length := _num_bytes(to_host(received))) > _HEAD_BYTES:
        received = _resized(data, length, group)
        dist.broadcast(received, group_src=source, group=group)
    return _decode(to_host(received))


def broadcast_tensor(mine: torch.Tensor | None, dtype: str, shape: Sequence[int], source: int = 0) -> torch.Tensor:
    """Broadcast a tensor of one rank, whose dtype and shape all ranks know; collective.

    Args:
        mine: The tensor, on the source; `None` on the other ranks.
        dtype: Name of its dtype in torch.
        shape: Its shape.
        source: Rank that sends.

    Returns:
        A copy in memory of its own, on `metadata_device`.
    """
    value = torch.empty(tuple(shape), dtype=getattr(torch, dtype), device=metadata_device())
    if mine is not None:
        value.copy_(mine.detach())
    if value.numel():
        dist.broadcast(value.view(-1).view(torch.uint8), group=current_group(), group_src=source)
    return value
