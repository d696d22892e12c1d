"""`IndexChecks`: raise on an index that is out of range before the operation runs.

CPU operations check indices and raise. A CUDA kernel asserts, and every later CUDA call of the process fails: indices
that may be out of range must not reach it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from raysharding.distributed.comm import to_host
from raysharding.torch_internals import TorchDispatchMode

_aten = torch.ops.aten


def _check(what: str, index: torch.Tensor, size: int, *, ignored: int | None = None, least: int = 0) -> None:
    wrong = (index < least) | (index >= size)
    if ignored is not None:
        wrong &= index != ignored
    if to_host(wrong.any()).item():  # behind what is queued, such as FSDP's collectives
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


def _check_anywhere(what: str, tensor: torch.Tensor, index: torch.Tensor, *_: Any) -> None:
    _check(what, index, tensor.numel(), least=-tensor.numel())


def _check_fill(what: str, tensor: torch.Tensor, dim: int, index: torch.Tensor, *_: Any) -> None:
    size = tensor.shape[dim] if tensor.ndim else 1
    _check(what, index, size, least=-size)


def _check_multilabel(what: str, scores: torch.Tensor, target: torch.Tensor, *_: Any) -> None:
    _check(what, target, scores.shape[-1], least=-1)  # -1 ends a row


def _check_ctc(what: str, scores: torch.Tensor, targets: torch.Tensor, _: Any, lengths: Any, *rest: Any) -> None:
    if targets.ndim == 2:  # what follows a row's length is padding, of any value
        counted = torch.as_tensor(lengths, device=targets.device)[:, None]
        targets = targets[torch.arange(targets.shape[1], device=targets.device) < counted]
    _check(what, targets, scores.shape[-1])


def _check_each_dim(what: str, tensor: torch.Tensor, indices: Sequence[torch.Tensor | None], *_: Any) -> None:
    dim = 0
    for index in indices:
        is_mask = index is not None and index.dtype in (torch.bool, torch.uint8)
        if index is not None and not is_mask:
            _check(what, index, tensor.shape[dim], least=-tensor.shape[dim])
        dim += index.ndim if index is not None and is_mask else 1


_ALONG_DIM = ("gather", "index_select", "scatter", "scatter_add", "scatter_reduce", "index_add", "index_copy")

_CHECKS: Mapping[Any, Callable[..., None]] = {
    _aten.nll_loss_forward: _check_targets,
    _aten.nll_loss2d_forward: _check_targets,
    _aten.multi_margin_loss: _check_margins,
    _aten.embedding: _check_rows,
    _aten.index: _check_each_dim,
    _aten.index_put: _check_each_dim,
    _aten.index_put_: _check_each_dim,
    _aten.multilabel_margin_loss_forward: _check_multilabel,
    _aten._embedding_bag: _check_rows,
    _aten.take: _check_anywhere,
    _aten.index_reduce: _check_along_dim,
    _aten.index_reduce_: _check_along_dim,
    _aten.put: _check_anywhere,
    _aten.put_: _check_anywhere,
    _aten.index_fill: _check_fill,
    _aten.index_fill_: _check_fill,
    # These read whatever lies at the index: no device raises.
    **{getattr(_aten, name): _check_ctc for name in ("_ctc_loss", "_cudnn_ctc_loss")},
    **{getattr(_aten, name): _check_along_dim for name in _ALONG_DIM},
    **{getattr(_aten, f"{name}_"): _check_along_dim for name in _ALONG_DIM[2:]},
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
