"""`read_state_dict`: read a whole checkpoint file as a state dict."""

from __future__ import annotations

import os
import pickle
from collections.abc import Mapping
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from raysharding.checkpoint.format import EXTRA_STATE_NAME, open_checkpoint
from raysharding.errors import CheckpointError

Device = str | int | torch.device

_DISK = "disk"
"""accelerate's name for tensors that stay in files; they are read to the CPU, as by accelerate."""


def read_state_dict(
    path: str | os.PathLike[str], device_map: Device | Mapping[str, Device] | None
) -> dict[str, torch.Tensor]:
    """Read a file; its tensors on the CPU are mapped pages of the file, read on access.

    Args:
        path: A `.safetensors` file, or any other file for `torch.load(weights_only=True)`.
        device_map: A device for all tensors, or module-name prefix → device.

    Raises:
        CheckpointError: The file is unreadable or unsafe, or holds no state dict.
        ValueError: `device_map` names an unknown device.
    """
    file = os.fspath(path)
    devices = _devices(device_map)
    values = _read_safetensors(file) if file.endswith(".safetensors") else _read_pickled(file)
    return {name: _moved(value, _device_of(name, devices)) for name, value in values.items()}


def _read_safetensors(file: str) -> dict[str, torch.Tensor]:
    names = open_checkpoint(file).tensors  # checks the header with clear errors
    try:
        with safe_open(file, framework="pt", device="cpu") as opened:
            return {name: opened.get_tensor(name) for name in names}
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"cannot be read: {error}", path=file) from error


def _read_pickled(file: str) -> dict[str, torch.Tensor]:
    """Read a file by torch's weights-only unpickler."""
    try:
        try:
            values = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
        except RuntimeError as error:
            if "mmap" not in str(error):
                raise
            values = torch.load(file, map_location="cpu", weights_only=True)  # the format before torch 1.6
    except (RuntimeError, OSError, pickle.UnpicklingError, EOFError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"torch.load(weights_only=True) cannot read it: {error}", path=file) from error
    if not isinstance(values, dict):
        raise CheckpointError(f"holds a {type(values).__name__}, not a state dict", path=file)
    for key, value in values.items():
        is_name = isinstance(key, str)
        if not is_name or not (isinstance(value, torch.Tensor) or key.rpartition(".")[2] == EXTRA_STATE_NAME):
            what = f"is not a flat state dict of tensors: {key!r} is a {type(value).__name__}"
            raise CheckpointError(what, path=file)
    return values


def _devices(device_map: Device | Mapping[str, Device] | None) -> dict[str, torch.device]:
    """Return module-name prefix → device."""
    given = device_map if isinstance(device_map, Mapping) else {"": "cpu" if device_map is None else device_map}
    devices = {}
    for prefix, device in given.items():
        try:
            devices[prefix] = torch.device("cpu" if device == _DISK else device)
        except (RuntimeError, TypeError) as error:
            raise ValueError(f"device_map={device!r} for {prefix!r}: not a device ({error})") from error
    return devices


def _device_of(name: str, devices: Mapping[str, torch.device]) -> torch.device:
    """Return the device of the longest module-name prefix of `name`."""
    prefix = name
    while prefix and prefix not in devices:
        prefix = prefix.rpartition(".")[0]
    return devices.get(prefix, torch.device("cpu"))


def _moved(value: Any, device: torch.device) -> Any:
    return value.to(device) if isinstance(value, torch.Tensor) and device.type != "cpu" else value
