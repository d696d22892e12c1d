"""Collectives of JSON values, which travel as uint8 tensors and never as pickles."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist


def metadata_device(group: dist.ProcessGroup | None = None) -> torch.device:
    """Return the device for small metadata tensors of `group`: the CPU if the group has a CPU backend, else the GPU."""
    backends = dist.get_backend_config(group)
    if "gloo" in backends or "cpu:" in backends:
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


_LENGTH_BYTES = 8
_GATHER_BYTES = 4 << 10
_BROADCAST_BYTES = 64 << 10
"""Length of the first message, in bytes. A longer value needs a second message."""


def _encode(value: Any) -> bytes:
    text = json.dumps(value, separators=(",", ":")).encode()
    return len(text).to_bytes(_LENGTH_BYTES, "little") + text


def _tensor(data: bytes, num_bytes: int, device: torch.device) -> torch.Tensor:
    """Return `data` truncated or padded to `num_bytes`, the same size on every rank."""
    return torch.frombuffer(bytearray(data[:num_bytes].ljust(num_bytes, b"\0")), dtype=torch.uint8).to(device)


def _bytes(tensor: torch.Tensor) -> bytes:
    data: bytes = tensor.cpu().numpy().tobytes()
    return data


def _length(first: bytes) -> int:
    """Return the length of a whole message, which its first bytes state."""
    return _LENGTH_BYTES + int.from_bytes(first[:_LENGTH_BYTES], "little")


def _decode(data: bytes) -> Any:
    return json.loads(data[_LENGTH_BYTES : _length(data)])


def all_gather_json(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Gather one JSON value from every rank; collective over `group`.

    Args:
        value: Any value that `json.dumps` accepts.
        group: Process group. Default: the default group.

    Returns:
        The values in rank order, on every rank. Wire: from each rank to each, 4 KiB, and the longest value's length if
        that is more than 4 KiB.
    """
    device = metadata_device(group)
    data = _encode(value)
    # The first message has a fixed size and states the length: all_gather hangs or fails if sizes differ between ranks.
    found = _all_gather(_tensor(data, _GATHER_BYTES, device), group)
    longest = max(map(_length, found))
    if longest > _GATHER_BYTES:
        found = _all_gather(_tensor(data, longest, device), group)
    return list(map(_decode, found))


def _all_gather(mine: torch.Tensor, group: dist.ProcessGroup | None) -> list[bytes]:
    gathered = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(gathered, mine, group=group)
    return list(map(_bytes, gathered))


def all_gather_ints(values: Sequence[int]) -> list[list[int]]:
    """Gather a few integers from every rank; collective over the default group, cheap enough for every step.

    Args:
        values: The same number of values on every rank, each below 2^63.

    Returns:
        The values of each rank, in rank order, on every rank. Wire: an all-reduce of 8 bytes per value and rank.
    """
    table = torch.zeros(dist.get_world_size(), len(values), dtype=torch.int64, device=metadata_device())
    table[dist.get_rank()] = torch.tensor(values)
    # Every rank calls this, without rows too: the others would wait in the all-reduce. A sum in which each rank fills
    # its own row, because an all-gather over four ranks takes gloo five times as long as an all-reduce.
    dist.all_reduce(table)
    rows: list[list[int]] = table.tolist()
    return rows


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
    data = _encode(value if dist.get_rank(group) == source else None)
    found = _broadcast(_tensor(data, _BROADCAST_BYTES, device), group, source)
    if (length := _length(found)) > _BROADCAST_BYTES:
        # Every rank needs a buffer of exactly the source's length, or the second broadcast never completes.
        found = _broadcast(_tensor(data, length, device), group, source)
    return _decode(found)


def _broadcast(mine: torch.Tensor, group: dist.ProcessGroup | None, source: int) -> bytes:
    dist.broadcast(mine, group_src=source, group=group)
    return _bytes(mine)
