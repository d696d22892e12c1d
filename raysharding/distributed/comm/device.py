"""Devices: torch's generic interface to them. No other module names the module of a device type, such as torch.cuda.

CUDA is the accelerator that is meant, and ROCm is `cuda` to torch. Any other type works that torch has registered with
a module (`torch.get_device_module`) and a backend of collectives.
"""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist

_MULTI_RANK, _MULTI_RANK_SINCE = "NCCL_MULTI_RANK_GPU_ENABLE", (2, 30)
"""NCCL's variable that lets ranks of one communicator share a GPU, and the first version that reads it."""

_ALLOCATOR_VARIABLES = {
    *("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_NO_CUDA_MEMORY_CACHING"),
    "TORCH_NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK",
}


def is_accelerator(device: torch.device) -> bool:
    """Return True if a device has streams and memory of its own: neither `cpu` nor `meta`."""
    return device.type not in ("cpu", "meta")


def device_module(device: torch.device) -> Any:
    """Return torch's module of an accelerator's type, such as `torch.cuda`."""
    return torch.get_device_module(device)


def current_device(device_type: str) -> torch.device:
    """Return this thread's current device of a type, with its index on accelerators."""
    device = torch.device(device_type)
    return torch.device(device_type, device_module(device).current_device()) if is_accelerator(device) else device


def device_uuid(device: torch.device) -> str | None:
    """Return the identity of an accelerator, the same in every process of its host; `None` if torch does not tell."""
    found = getattr(device_module(device).get_device_properties(device), "uuid", None)
    return None if found is None else str(found)


def share_device(device: torch.device) -> None:
    """Let NCCL make communicators with several ranks on one GPU, unless the user forbids it; before its first one."""
    if (nccl_version(device) or (0,)) >= _MULTI_RANK_SINCE:
        os.environ.setdefault(_MULTI_RANK, "1")


def why_unshareable(version: tuple[int, ...] | None) -> str | None:
    """Return why this process cannot be in a communicator with several ranks on one device; `None` if it can.

    Args:
        version: From `nccl_version`. Only NCCL is known to refuse: of other backends the answer is `None`.
    """
    if version is None:
        return None
    cure = "give each rank a whole GPU (Placement(gpus_per_rank=1)), or device='cpu'"
    if version < _MULTI_RANK_SINCE:
        found = ".".join(map(str, version))
        return f"NCCL {found} refuses that, 2.30 does not: install a newer nvidia-nccl package, or {cure}"
    if (value := os.environ.get(_MULTI_RANK)) != "1":
        return f"{_MULTI_RANK}={value or 'unset'} forbids that to NCCL: set it to 1, or {cure}"
    return None


def passes_shared_device(device: torch.device) -> bool:
    """Return True if messages between two ranks on one device can go through the device; of NCCL alone it is known."""
    version = nccl_version(device)
    return version is not None and why_unshareable(version) is None


def nccl_version(device: torch.device) -> tuple[int, ...] | None:
    """Return the version of NCCL in this process; `None` for a device whose collectives are not NCCL's."""
    if dist.Backend.default_device_backend_map.get(device.type) != "nccl":
        return None
    version: tuple[int, ...] = torch.cuda.nccl.version()
    return version


def use_expandable_segments(device: torch.device) -> None:
    """Make CUDA's caching allocator use expandable segments, which fragment less; before its first allocation.

    Not where the user has set up the allocator, or lets NCCL register its segments: torch drops that for these (2.13).
    """
    if device.type == "cuda" and not _ALLOCATOR_VARIABLES & os.environ.keys():
        os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"


def is_available(device_type: str) -> bool:
    """Return True if this process has a device of a type, which torch need not know."""
    try:
        return device_type == "cpu" or bool(torch.get_device_module(device_type).is_available())
    except RuntimeError:  # torch knows no such type
        return False


def set_current_device(device: torch.device) -> None:
    """Make an accelerator's device the current one of this process.

    Raises:
        RuntimeError: This process's torch does not see the device.
    """
    count = device_module(device).device_count() if is_available(device.type) else 0
    if device.index >= count:
        raise RuntimeError(
            f"{device} is not there for torch {torch.__version__}, which sees {count} devices of type {device.type} on "
            "this node: install torch's build for them there (a +cpu build has none), or give device='cpu'"
        )
    device_module(device).set_device(device)


def accelerator_in_use() -> torch.device | None:
    """Return the current device of the accelerator that this process has used; `None` without one."""
    device = torch.accelerator.current_accelerator()
    if device is None or not device_module(device).is_initialized():
        return None
    return current_device(device.type)


def check_device_type(device_type: str) -> None:
    """Raise a ValueError for a device type without a backend of collectives in this process's torch."""
    known = dist.Backend.default_device_backend_map
    if device_type not in known:
        names = ", ".join(map(repr, known))
        raise ValueError(f"device={device_type!r}: use one of {names}, for which torch has collectives here")


def backends_of(device: torch.device) -> str:
    """Return the `backend` of `init_process_group`: the device's own, and gloo for tensors in host memory."""
    if not is_accelerator(device):
        return "gloo"
    return f"cpu:gloo,{device.type}:{dist.Backend.default_device_backend_map[device.type]}"
