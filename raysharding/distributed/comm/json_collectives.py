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


def _encode(value: Any) -> torch.Tensor:
    return torch.frombuffer(bytearray(json.dumps(value, separators=(",", ":")).encode()), dtype=torch.uint8)


def _decode(data: torch.Tensor) -> Any:
    return json.loads(to_host(data).numpy().tobytes())


def all_gather_json(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Gather one JSON value from every rank; collective over `group`.

    Args:
        value: Any value that `json.dumps` accepts.
        group: Process group. Default: the default group.

    Returns:
        The values in rank order, on every rank. Wire: from each rank to each, the length of the longest value.
    """
    data = _encode(value)
    # The lengths first: all_gather hangs or fails if sizes differ between ranks.
    lengths = [length for (length,) in all_gather_ints([data.numel()], group)]
    mine = nn.functional.pad(data, (0, max(lengths) - data.numel())).to(metadata_device(group))
    gathered = [torch.empty_like(mine) for _ in lengths]
    dist.all_gather(gathered, mine, group=group)
    return [_decode(one[:length]) for one, length in zip(gathered, lengths, strict=True)]


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
    device = metadata_device(group)
    data = _encode(value if dist.get_rank(group) == source else None).to(device)
    # Every rank needs a buffer of exactly the source's length, or the second broadcast never completes.
    length = torch.tensor([data.numel()], device=device)
    dist.broadcast(length, group_src=source, group=group)
    if dist.get_rank(group) != source:
        data = torch.empty(int(to_host(length)), dtype=torch.uint8, device=device)
    dist.broadcast(data, group_src=source, group=group)
    return _decode(data)
