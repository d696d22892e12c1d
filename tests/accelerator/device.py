"""`register()`: makes the device type `sim` known to torch, and `torch.sim` its module, as `torch.cuda` is CUDA's."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from tests.accelerator.build import load_extension

DEVICE = "sim"
BACKEND = "simccl"
NUM_DEVICES = 4


class Stream(torch.Stream):
    """A stream of a sim device."""

    def __new__(cls, device: Any = None, priority: int = 0, **kwargs: Any) -> Stream:
        """Make a stream on a device; default: the current one."""
        if kwargs:  # torch makes streams by id
            return super().__new__(cls, priority=priority, **kwargs)
        return super().__new__(cls, _device(device), priority=priority)


class Event(torch.Event):
    """An event of a sim device."""

    def __new__(cls, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> Event:
        """Make an event, on the device of the stream that records it."""
        return super().__new__(cls, DEVICE, enable_timing=enable_timing)


def _device(device: Any) -> torch.device:
    if device is None:
        return torch.device(DEVICE, load_extension().current_device())
    if isinstance(device, int):
        return torch.device(DEVICE, device)
    device = torch.device(device)
    return torch.device(DEVICE, load_extension().current_device() if device.index is None else device.index)


def _make_module(extension: Any) -> ModuleType:
    """Return the module `torch.sim`, with the names that torch and libraries look for."""
    module = ModuleType("torch.sim")

    def by_index(function: Any) -> Any:
        return lambda device=None: function(_device(device).index)

    @contextmanager
    def stream(stream: torch.Stream | None) -> Iterator[None]:
        if stream is None:
            yield
            return
        with stream:
            yield

    @contextmanager
    def device(chosen: Any) -> Iterator[None]:
        before = extension.current_device()
        extension.set_device(_device(chosen).index)
        try:
            yield
        finally:
            extension.set_device(before)

    def manual_seed_all(seed: int) -> None:
        for index in range(NUM_DEVICES):
            extension.default_generator(index).manual_seed(seed)

    def mem_get_info(device: Any = None) -> tuple[int, int]:
        index = _device(device).index
        total = min(extension.limit(index), 1 << 40)
        return total - extension.memory_allocated(index), total

    def get_device_properties(device: Any = None) -> SimpleNamespace:
        seen = os.environ.get("CUDA_VISIBLE_DEVICES") or "0,1,2,3"
        return SimpleNamespace(uuid=f"sim-{seen.split(',')[_device(device).index]}")

    names = {
        "get_device_properties": get_device_properties,
        "Stream": Stream,
        "Event": Event,
        "is_available": lambda: True,
        "is_initialized": lambda: bool(extension.touched()),
        "_initialized": True,
        "_is_in_bad_fork": lambda: False,
        "_lazy_init": lambda: None,
        "device_count": lambda: NUM_DEVICES,
        "current_device": extension.current_device,
        "set_device": lambda device: extension.set_device(_device(device).index),
        "device": device,
        "stream": stream,
        "current_stream": lambda device=None: torch.accelerator.current_stream(_device(device)),
        "synchronize": by_index(extension.synchronize),
        "memory_allocated": by_index(extension.memory_allocated),
        "memory_reserved": by_index(extension.memory_allocated),
        "max_memory_allocated": by_index(extension.max_memory_allocated),
        "reset_peak_memory_stats": by_index(extension.reset_peak_memory_stats),
        "mem_get_info": mem_get_info,
        "empty_cache": lambda: None,
        "get_amp_supported_dtype": lambda: [torch.bfloat16, torch.float16],
        "get_rng_state": lambda device=None: extension.default_generator(_device(device).index).get_state(),
        "set_rng_state": lambda state, device=None: extension.default_generator(_device(device).index).set_state(state),
        "manual_seed": lambda seed: extension.default_generator(extension.current_device()).manual_seed(seed),
        "manual_seed_all": manual_seed_all,
        "initial_seed": lambda: extension.default_generator(extension.current_device()).initial_seed(),
    }
    module.__dict__.update(names)
    return module


def _create_backend(store: dist.Store, rank: int, size: int, timeout: timedelta) -> Any:
    return load_extension().Simccl(dist.ProcessGroupGloo(store, rank, size, timeout), _create_backend)


def register() -> None:
    """Register `sim` with torch in this process, and `simccl` as its backend; idempotent.

    torch calls this by itself where the entry point in `plugin` is on the path, as it does for accelerators that are
    not in its own tree: see `torch.backends` in torch's documentation of entry points.
    """
    if hasattr(torch, DEVICE):
        return
    extension = load_extension()
    torch.utils.rename_privateuse1_backend(DEVICE)
    torch._register_device_module(DEVICE, _make_module(extension))
    sys.modules["torch.sim"] = torch.get_device_module(DEVICE)
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
    dist.Backend.register_backend(BACKEND, _create_backend, devices=[DEVICE])
    # With NCCL, ranks outside a new group take part in a split of the default group.
    extension.Simccl.perform_nocolor_split = lambda backend, device: None
    # gloo takes part in groups that are bound to a device: `new_group("gloo")` asks for the device's own backend else.
    dist.Backend.backend_capability["gloo"].append(DEVICE)


def sim() -> Any:
    """Return `torch.sim`, which a process has once it has registered the device."""
    return torch.get_device_module(DEVICE)
