"""`patch_accelerate`: accelerate's checkpoint loading, with rank 0 as the only reader.

Note: what is patched.
    `accelerate.load_checkpoint_in_model`. For a `DistModule` it runs with another function to read files; for any other
    module it runs unchanged. The patch replaces the function's code, not the name: a user may have imported the
    function before (`from accelerate import load_checkpoint_in_model`).

Note: why files are read into a `FileStateDict`.
    `load_checkpoint_in_model` reads one file at a time and passes the state dict to torch's `set_model_state_dict`.
    That function returns at once if the dict is empty, as it would be on the ranks that read nothing, and slices
    tensors itself if there are any. Therefore the dict has rank 0's keys on every rank, and its values are not tensors,
    so that torch passes them on unchanged. `DistModule.load_state_dict`, which torch calls last, takes the tensors from
    rank 0's dict.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Mapping
from types import FunctionType
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import nn

from raysharding.checkpoint import read_state_dict
from raysharding.distributed.comm import from_rank_0, using_group
from raysharding.distributed.fully_shard import group_of


class Unread:
    """Placeholder of a tensor of a file that rank 0 has read."""

    def __repr__(self) -> str:
        return "<a tensor that rank 0 distributes: give it to DistModule.load_state_dict>"


class FileStateDict(dict[str, Any]):
    """Result of the patched reader on every rank: rank 0's keys, and `Unread` values.

    Args:
        names: Rank 0's keys.
        values: Key → full tensor on rank 0; empty elsewhere.
    """

    def __init__(self, names: list[str], values: Mapping[str, torch.Tensor]) -> None:
        super().__init__(dict.fromkeys(names, Unread()))
        self.rank_0_values = values
        """Key → full tensor on rank 0; empty elsewhere."""


def _read(checkpoint_file: str | os.PathLike[str], device_map: Any = None) -> dict[str, Any]:
    """Read like accelerate's `load_state_dict`; collective if there is a process group."""
    if not dist.is_initialized():
        return read_state_dict(checkpoint_file, device_map)
    if device_map is not None:
        raise ValueError("device_map: under patch_accelerate() the module's mesh says where tensors go; leave it out")
    values: dict[str, torch.Tensor] = {}

    def read() -> list[str]:
        values.update(read_state_dict(checkpoint_file, None))
        return list(values)

    # The other ranks' dicts must have keys, or torch leaves them out of the load and rank 0 waits for them.
    return FileStateDict(from_rank_0(read), values)


_patches: list[AcceleratePatch] = []
"""Active patches."""


class AcceleratePatch:
    """The patch of `patch_accelerate`; as a context manager, removes the patch at the end.

    Args:
        kind: Class of the modules that all ranks load together.
    """

    def __init__(self, kind: type[nn.Module]) -> None:
        from accelerate.utils import modeling

        self._kind = kind
        self._function: FunctionType = modeling.load_checkpoint_in_model
        self._original: FunctionType = _patches[0]._original if _patches else _copy(self._function, {})
        # The defaults are by position: those of other code would be taken for arguments that it does not have.
        self._function.__defaults__ = None
        self._function.__code__ = _load_checkpoint_in_model.__code__
        _patches.append(self)

    def load(self, model: nn.Module, *args: Any, **kwargs: Any) -> None:
        """Run `load_checkpoint_in_model`; collective for a module of `kind`."""
        if not isinstance(model, self._kind):
            self._original(model, *args, **kwargs)
            return
        call = inspect.signature(self._original).bind(model, *args, **kwargs)
        # Rank 0 alone would enter the reader, whose tensors come from rank 0 anyway.
        call.arguments["broadcast_from_rank0"] = False
        with using_group(group_of(model)):
            _copy(self._original, {"load_state_dict": _read})(*call.args, **call.kwargs)

    def restore(self) -> None:
        """Restore accelerate's function; a second call does nothing."""
        if self in _patches:
            _patches.remove(self)
        if not _patches:
            self._function.__code__ = self._original.__code__
            self._function.__defaults__ = self._original.__defaults__

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.restore()


def _copy(function: FunctionType, replaced: Mapping[str, Any]) -> FunctionType:
    """Copy a function; in the copy some global names mean other objects."""
    names = {**function.__globals__, **replaced} if replaced else function.__globals__
    return FunctionType(function.__code__, names, function.__name__, function.__defaults__, function.__closure__)


def _load_checkpoint_in_model(*args: Any, **kwargs: Any) -> None:
    """Take the place of accelerate's code, which runs in accelerate's module: no name of this one is there."""
    import sys

    sys.modules["raysharding.distributed.accelerate_compat.patch"]._patches[-1].load(*args, **kwargs)
