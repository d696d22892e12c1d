"""BatchNorm under mixed precision: computes in the dtype it is stored in, between modules that compute in another."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from raysharding.tree import map_leaves


def keep_full_precision(module: nn.Module) -> None:
    """Cast a module's floating inputs to the dtype it is stored in, and its outputs back; each rank alone.

    As FSDP1 does with `MixedPrecision._module_classes_to_ignore`, which casts to fp32 whatever the module is stored in.

    Args:
        module: After `fully_shard` with a policy that keeps the stored dtype.
    """
    casts = _Casts()
    # Behind FSDP2's hooks: after the parameters are gathered, and before they are freed.
    module.register_forward_pre_hook(casts.before, with_kwargs=True)
    module.register_forward_hook(casts.after)


class _Casts:
    def __init__(self) -> None:
        self._outside: torch.dtype | None = None

    def before(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        inside = _stored_dtype(module)
        self._outside = None

        def cast(_: str, leaf: Any) -> Any:
            if not _is_floating(leaf) or leaf.dtype == inside:
                return leaf
            self._outside = leaf.dtype
            return leaf.to(inside)

        return map_leaves(cast, args), map_leaves(cast, kwargs)

    def after(self, module: nn.Module, args: Any, output: Any) -> Any:
        outside = self._outside
        if outside is None:
            return output
        return map_leaves(lambda _, leaf: leaf.to(outside) if _is_floating(leaf) else leaf, output)


def _is_floating(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.is_floating_point()


def _stored_dtype(module: nn.Module) -> torch.dtype:
    """dtype of the parameters, or of the running statistics; fp32 for a module that holds neither."""
    for tensor in (*module._parameters.values(), *module._buffers.values()):
        if tensor is not None and tensor.is_floating_point():
            return tensor.dtype
    return torch.float32
