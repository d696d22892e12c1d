"""`patch_accelerate`: accelerate's checkpoint loading, with rank 0 as the only reader.

Note: why its reader returns a dict of a class of its own.
    `accelerate.load_checkpoint_in_model` reads file by file and hands each to `set_model_state_dict` of torch, which
    leaves at once where the dict is empty (the ranks that read nothing), and slices tensors itself where it is not. So
    on every rank the reader's dict has rank 0's keys, and values that torch passes on untouched, because they are no
    tensors; `DistModule.load_state_dict`, at the end of that road, takes the tensors from rank 0's.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Self

import torch
import torch.distributed as dist

from raysharding.checkpoint import read_state_dict
from raysharding.distributed.agreement import from_rank_0


class Unread:
    """Stands for a tensor of a file that rank 0 holds."""

    def __repr__(self) -> str:
        return "<a tensor that rank 0 distributes: give it to DistModule.load_state_dict>"


class FileStateDict(dict[str, Any]):
    """What the patched reader returns on every rank: rank 0's keys, and `Unread` values.

    Args:
        names: Rank 0's keys.
        values: Key → full tensor on rank 0; empty elsewhere.
    """

    def __init__(self, names: list[str], values: Mapping[str, torch.Tensor]) -> None:
        super().__init__(dict.fromkeys(names, Unread()))
        self.rank_0_values = values
        """Key → full tensor on rank 0; empty elsewhere."""


def _read(checkpoint_file: str | os.PathLike[str], device_map: Any = None) -> dict[str, Any]:
    """Take the place of accelerate's `load_state_dict`; collective where there is a process group."""
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


class AcceleratePatch:
    """accelerate as `patch_accelerate` left it; as a context manager it is put back at the end."""

    def __init__(self) -> None:
        from accelerate.utils import modeling

        self._modeling = modeling
        self._original: Callable[..., Any] | None = modeling.load_state_dict
        modeling.load_state_dict = _read

    def restore(self) -> None:
        """Put accelerate's own reader back; a second call does nothing."""
        if self._original is not None:
            self._modeling.load_state_dict = self._original
            self._original = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.restore()


def patch_accelerate() -> AcceleratePatch:
    """Make `accelerate.load_checkpoint_in_model(DistModule(m), checkpoint)` read on rank 0 alone, and distribute.

    Works from the call on, or inside `with patch_accelerate():`. Every rank calls `load_checkpoint_in_model`, which
    then is collective, file by file; missing keys stay as they are, as its `strict=False` says. Tensors on meta get
    the dtype of the files, as torch's `set_model_state_dict` asks for.

    Returns:
        The patch; `restore()` takes it back.

    Raises:
        ModuleNotFoundError: accelerate is not installed.
    """
    return AcceleratePatch()
