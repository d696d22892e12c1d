"""Typed metadata between ranks: JSON as uint8 tensors, never pickle."""

from __future__ import annotations

import json
from typing import Any

import torch
import torch.distributed as dist


def metadata_device(group: dist.ProcessGroup | None = None) -> torch.device:
    """Device on which `group` carries small metadata tensors: the CPU where it has a CPU backend, else the GPU."""
    backends = dist.get_backend_config(group)
    if "gloo" in backends or "cpu:" in backends:
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def _encode(value: Any, device: torch.device) -> torch.Tensor:
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8).to(device)


def _decode(data: torch.Tensor) -> Any:
    return json.loads(data.cpu().numpy().tobytes())


def all_gather_json(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Gather one JSON value from every rank; collective over `group`.

    Args:
        value: Anything `json.dumps` takes.
        group: Process group, the default group if `None`.

    Returns:
        The values in rank order, on every rank. Wire: the longest value × world size to each rank.
    """
    device = metadata_device(group)
    data = _encode(value, device)
    world_size = dist.get_world_size(group)
    lengths = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(world_size)]
    # Lengths first: all_gather hangs or fails on tensors whose sizes differ between ranks.
    dist.all_gather(lengths, torch.tensor([data.numel()], device=device), group=group)
    sizes = [int(length.item()) for length in lengths]
    padded = torch.zeros(max(sizes), dtype=torch.uint8, device=device)
    padded[: data.numel()] = data
    gathered = [torch.empty_like(padded) for _ in range(world_size)]
    dist.all_gather(gathered, padded, group=group)
    return [_decode(item[:size]) for item, size in zip(gathered, sizes, strict=True)]


def broadcast_json(value: Any, group: dist.ProcessGroup | None = None) -> Any:
    """Send rank 0's JSON value to every rank; collective over `group`.

    Args:
        value: Rank 0's value; ignored on the other ranks.
        group: Process group, the default group if `None`.

    Returns:
        Rank 0's value, on every rank.
    """
    device = metadata_device(group)
    is_source = dist.get_rank(group) == 0
    data = _encode(value, device) if is_source else torch.empty(0, dtype=torch.uint8, device=device)
    length = torch.tensor([data.numel()], device=device)
    # The others must post a buffer of exactly rank 0's length, or the second broadcast never completes.
    dist.broadcast(length, group_src=0, group=group)
    if not is_source:
        data = torch.empty(int(length.item()), dtype=torch.uint8, device=device)
    dist.broadcast(data, group_src=0, group=group)
    return _decode(data)
