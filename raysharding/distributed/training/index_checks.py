"""`IndexChecks`: raise on an index that is out of range before the operation runs.

CPU operations check indices and raise. A CUDA kernel asserts, and every later CUDA call of the process fails: indices
that may be out of range must not reach it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from raysharding.torch_internals import TorchDispatchMode

_aten = torch.ops.aten


def _check(what: str, index: torch.Tensor, size: int, *, ignored: int | None = None, least: int = 0) -> None:
    wrong = (index < least) | (index >= size)
    if ignored is not None:
        wrong &= index != ignored
    if bool(wrong.any()):
        besides = "" if ignored is None else f", or {ignored} for what it leaves out"
        raise IndexError(f"{what} was given the index {int(index[wrong][0])}, and takes {least} to {size - 1}{besides}")


def _check_targets(what: str, scores: torch.Tensor, target: torch.Tensor, *rest: Any) -> None:
    _check(what, target, scores.shape[min(scores.ndim, 2) - 1], ignored=rest[2])  # follows weight and reduction


def _check_margins(what: str, scores: torch.Tensor, target: torch.Tensor, *_: Any) -> None:
    _check(what, target, scores.shape[-1])


def _check_along_dim(what: str, tensor: torch.Tensor, dim: int, index: torch.Tensor, *_: Any) -> None:
    _check(what, index, tensor.shape[dim] if tensor.ndim else 1)


def _check_rows(what: str, table: torch.Tensor, index: torch.Tensor, *_: Any) -> None:
    _check(what, index, table.shape[0])


def _check_each_dim(what: str, tensor: torch.Tensor, indices: Sequence[torch.Tensor | None], *_: Any) -> None:
    dim = 0
    for index in indices:
        is_mask = index is not None and index.dtype in (torch.bool, torch.uint8)
        if index is not None and not is_mask:
            _check(what, index, tensor.shape[dim], least=-tensor.shape[dim])
        dim += index.ndim if index is not None and is_mask else 1


_ALONG_DIM = ("gather", "index_select", "scatter", "scatter_", "scatter_add", "scatter_add_", "scatter_reduce")

_CHECKS: Mapping[Any, Callable[..., None]] = {
    _aten.nll_loss_forward: _check_targets,
    _aten.nll_loss2d_forward: _check_targets,
    _aten.multi_margin_loss: _check_margins,
    _aten.embedding: _check_rows,
    _aten.index: _check_each_dim,
    _aten.index_put: _check_each_dim,
    _aten.index_put_: _check_each_dim,
    **{getattr(_aten, name): _check_along_dim for name in _ALONG_DIM},
}
"""Operations by which losses read labels, e.g. `cross_entropy`, `one_hot` and `scores[rows, labels]`."""


class IndexChecks(TorchDispatchMode):
    """While active, operations by which losses read labels check their indices first, on any device.

    Each check synchronizes with the device. Kernels that torch does not dispatch (of Triton, extensions,
    `torch.compile`) and operations on tensor subclasses, such as DTensor, are not checked.
    """

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Return True: otherwise a function whose first call is in this mode would never be compiled."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation.

        Raises:
            IndexError: An index is out of range; the operation has not run.
        """
        check = _CHECKS.get(getattr(func, "overloadpacket", None))
        if check is not None and not types:
            check(func.overloadpacket.__name__, *args)
        return func(*args, **(kwargs or {}))
