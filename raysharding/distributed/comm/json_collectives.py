"""Typed metadata between ranks: JSON as uint8 tensors, never pickle."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist


def metadata_device(group: dist.ProcessGroup | None = None) -> torch.device:
    """Device on which `group` carries small metadata tensors: the CPU where it has a CPU backend, else the GPU."""
    backends = dist.get_backend_config(group)
    if "gloo" in backends or "cpu:" in backends:
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


_LENGTH_BYTES = 8
_GATHER_BYTES = 4 << 10
_BROADCAST_BYTES = 64 << 10
"""Length of the first message. What fits needs no second one."""


def _encode(value: Any) -> bytes:
    text = json.dumps(value, separators=(",", ":")).encode()
    return len(text).to_bytes(_LENGTH_BYTES, "little") + text


def _tensor(data: bytes, num_bytes: int, device: torch.device) -> torch.Tensor:
    """`num_bytes` of `data`, which is cut off or padded: of the same size on every rank."""
    return torch.frombuffer(bytearray(data[:num_bytes].ljust(num_bytes, b"\0")), dtype=torch.uint8).to(device)


def _bytes(tensor: torch.Tensor) -> bytes:
    data: bytes = tensor.cpu().numpy().tobytes()
    return data


def _length(first: bytes) -> int:
    """Length of a whole message, from how it begins."""
    return _LENGTH_BYTES + int.from_bytes(first[:_LENGTH_BYTES], "little")


def _decode(data: bytes) -> Any:
    return json.loads(data[_LENGTH_BYTES : _length(data)])


def all_gather_json(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Gather one JSON value from every rank; collective over `group`.

    Args:
        value: Anything `json.dumps` takes.
        group: Process group, the default group if `None`.

    Returns:
        The values in rank order, on every rank. Wire: 4 KiB or twice the longest value from each rank to each.
    """
    device = metadata_device(group)
    data = _encode(value)
    # Of one size first, with the lengths: all_gather hangs or fails on tensors whose sizes differ between ranks.
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
    """Gather a few whole numbers from every rank; collective over the default group, for every step.

    Args:
        values: As many on every rank, each below 2^63.

    Returns:
        Every rank's, in rank order, on every rank. Wire: an all-reduce of 8 bytes for each value of each rank.
    """
    table = torch.zeros(dist.get_world_size(), len(values), dtype=torch.int64, device=metadata_device())
    table[dist.get_rank()] = torch.tensor(values)
    # Every rank comes here, without rows too: one that did not would leave the others waiting. A sum of zeros and the
    # rank's own row, because gloo takes five times as long for an all-gather over four ranks as for an all-reduce.
    dist.all_reduce(table)
    rows: list[list[int]] = table.tolist()
    return rows


def broadcast_json(value: Any, group: dist.ProcessGroup | None = None, source: int = 0) -> Any:
    """Send one rank's JSON value to every rank; collective over `group`.

    Args:
        value: The source's value; ignored on the other ranks.
        group: Process group, the default group if `None`.
        source: Who sends: a rank in `group`.

    Returns:
        The source's value, on every rank.
    """
    device = metadata_device(group)
    data = _encode(value if dist.get_rank(group) == source else None)
    found = _broadcast(_tensor(data, _BROADCAST_BYTES, device), group, source)
    if (length := _length(found)) > _BROADCAST_BYTES:
        # The others must post a buffer of exactly the source's length, or the second broadcast never completes.
        found = _broadcast(_tensor(data, length, device), group, source)
    return _decode(found)


def _broadcast(mine: torch.Tensor, group: dist.ProcessGroup | None, source: int) -> bytes:
    dist.broadcast(mine, group_src=source, group=group)
    return _bytes(mine)
