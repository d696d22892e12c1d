"""`Writes`: what in-place operations do to tensors, seen while an initialisation rule runs on a stand-in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_SETTERS = frozenset(
    {
        "bernoulli_",
        "cauchy_",
        "copy_",
        "exponential_",
        "fill_",
        "log_normal_",
        "normal_",
        "random_",
        "uniform_",
        "zero_",
    }
)
"""Operations after which nothing is left of what was there before; `mul_` is none, and `copy_` of itself neither."""


class Writes(TorchDispatchMode):
    """Watches in-place operations, among tensors of which some are on meta and have no values."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._set: dict[int, torch.UntypedStorage] = {}
        self._unknown: set[int] = set()

    def cover(self, tensor: torch.Tensor) -> bool:
        """Whether one operation set all of `tensor`, and none wrote what was computed from values unknown here."""
        return _key(tensor) in self._set and not self.spoiled(tensor)

    def spoiled(self, tensor: torch.Tensor) -> bool:
        """Whether an operation should have used another tensor's values, which are not there.

        torch does not always raise then: `real.mul_(on_meta)` returns without having changed anything.
        """
        return _key(tensor) in self._unknown

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run the operation and note what it wrote."""
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        names = [argument.name for argument in func._schema.arguments]
        arguments = dict(zip(names, args, strict=False)) | dict(kwargs)
        read: list[torch.Tensor] = []
        written: list[torch.Tensor] = []
        for argument in func._schema.arguments:
            if isinstance(tensor := arguments.get(argument.name), torch.Tensor):
                is_written = argument.alias_info is not None and argument.alias_info.is_write
                (written if is_written else read).append(tensor)
        for tensor in written:
            self._note(func.overloadpacket.__name__, tensor, read)
        return result

    def _note(self, operation: str, tensor: torch.Tensor, read: Sequence[torch.Tensor]) -> None:
        key = _key(tensor)
        of_itself = [item.device == tensor.device and _key(item) == key for item in read]
        if any(item.is_meta and not same for item, same in zip(read, of_itself, strict=True)):
            self._unknown.add(key)
        elif operation in _SETTERS and not any(of_itself) and _is_whole(tensor):
            self._unknown.discard(key)
            # Held, so that no later storage takes its address.
            self._set[key] = tensor.untyped_storage()


def _key(tensor: torch.Tensor) -> int:
    """Identity of a tensor's memory; data pointers are all 0 on meta."""
    return int(tensor.untyped_storage()._cdata)


def _is_whole(tensor: torch.Tensor) -> bool:
    """Whether the tensor's elements are all of its memory's."""
    return tensor.numel() * tensor.itemsize == tensor.untyped_storage().nbytes() and tensor.is_contiguous()
