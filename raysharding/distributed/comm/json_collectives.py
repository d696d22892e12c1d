"""Collectives of JSON values, which travel as uint8 tensors and never as pickles."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from raysharding.distributed.comm.device import current_device
from raysharding.distributed.comm.waiting import to_host


def metadata_device(group: dist.ProcessGroup | None = None) -> torch.device:
    """Return the device for small metadata tensors of `group`: the CPU if it has a backend, else the accelerator."""
    types = [part.partition(":")[0] for part in dist.get_backend_config(group).split(",")]
    return current_device("cpu" if "cpu" in types else types[0])


_LENGTH_BYTES = 8
_HEAD_BYTES = 1016
"""Bytes of a value that travel with its length. Nearly all values are shorter, and take one collective."""


def _encode(value: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a value as bytes, and its head: its length and its first bytes, of the same size for every value."""
    data = torch.frombuffer(bytearray(json.dumps(value, separators=(",", ":")).encode()), dtype=torch.uint8)
    length = torch.tensor([data.numel()]).view(torch.uint8)
    head = torch.cat([length, data[:_HEAD_BYTES]])
    return data, nn.functional.pad(head, (0, _LENGTH_BYTES + _HEAD_BYTES - head.numel()))


def _length(head: torch.Tensor) -> int:
    return int(head[:_LENGTH_BYTES].view(torch.int64))


def _decode(data: torch.Tensor) -> Any:
    return json.loads(data.numpy().tobytes())


def all_gather_json(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Gather one JSON value from every rank; collective over `group`.

    Args:
        value: Any value that `json.dumps` accepts.
        group: Process group. Default: the default group.

    Returns:
        The values in rank order, on every rank. Wire: from each rank to each 1 KiB, and the length of the longest value
        if one is longer.
    """
    data, head = _encode(value)
    heads = _all_gather(head, group)
    lengths = [_length(one) for one in heads]
    # All ranks know all lengths: either each takes part in the second all-gather, with the same size, or none does.
    if max(lengths) > _HEAD_BYTES:
        whole = _all_gather(nn.functional.pad(data, (0, max(lengths) - data.numel())), group)
    else:
        whole = [one[_LENGTH_BYTES:] for one in heads]
    return [_decode(one[:length]) for one, length in zip(whole, lengths, strict=True)]


def _all_gather(data: torch.Tensor, group: dist.ProcessGroup | None) -> list[torch.Tensor]:
    """Gather bytes, of which every rank has the same number; collective."""
    mine = data.to(metadata_device(group))
    gathered = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(gathered, mine, group=group)
    return [to_host(one) for one in gathered]


def all_gather_ints(values: Sequence[int], group: dist.ProcessGroup | None = None) -> list[list[int]]:
    """Gather a few integers from every rank; collective over `group`, cheap enough for every step.

    Args:
        values: The same number of values on every rank, each below 2^63.
        group: Process group. Default: the default group.

    Returns:
        The values of each rank, in rank order, on every rank. Wire: an all-reduce of 8 bytes per value and rank.
    """
    table = torch.zeros(dist.get_world_size(group), len(values), dtype=torch.int64, device=metadata_device(group))
    table[dist.get_rank(group)] = torch.tensor(values)
    # Every rank calls this, without rows too: the others would wait in the all-reduce. A sum in which each rank fills
    # its own row, because an all-gather over four ranks takes gloo five times as long as an all-reduce.
    dist.all_reduce(table, group=group)
    rows: list[list[int]] = to_host(table).tolist()
    return rows


def any_rank(flag: bool, group: dist.ProcessGroup | None = None) -> bool:
    """Return True if `flag` is True on a rank; collective over `group`, with the same result on every rank."""
    return any(one for (one,) in all_gather_ints([flag], group))


def broadcast_json(value: Any, group: dist.ProcessGroup | None = None, source: int = 0) -> Any:
    """Broadcast the JSON value of one rank; collective over `group`.

    Args:
        value: Value to send; ignored on all ranks but `source`.
        group: Process group. Default: the default group.
        source: Rank within `group` that sends.

    Returns:
        The value of `source`, on every rank.
    """
    data, head = _encode(value if dist.get_rank(group) == source else None)
    head = _broadcast(head, source, group)
    # Every rank knows the source's length: all take part in the second broadcast, with a buffer of that size, or none.
    if (length := _length(head)) <= _HEAD_BYTES:
        return _decode(head[_LENGTH_BYTES:][:length])
    is_source = dist.get_rank(group) == source
    return _decode(_broadcast(data if is_source else torch.empty(length, dtype=torch.uint8), source, group))


def _broadcast(data: torch.Tensor, source: int, group: dist.ProcessGroup | None) -> torch.Tensor:
    """Broadcast bytes to tensors of the same size; collective."""
    data = data.to(metadata_device(group))
    dist.broadcast(data, group_src=source, group=group)
    return to_host(data)
