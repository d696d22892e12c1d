"""Forward over a distributed batch: inference mode, reduced loss, and detection of outputs that hold rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from raysharding.batch import RankBatch, RankOutput
from raysharding.distributed.comm import agreeing, any_rank, using_group
from raysharding.distributed.fully_shard import (
    check_execution_order,
    group_of,
    module_mode,
    recovering,
    without_trace,
)
from raysharding.distributed.training.losses import BatchLoss, call_model, find_loss, forward_with_loss, positions_of
from raysharding.distributed.training.passes import own_pass, passes_of_call
from raysharding.distributed.training.step import Accumulation
from raysharding.errors import DataError
from raysharding.tree import children, leaves, map_leaves, rebuild

_CACHES = ("past_key_values", "cache_params", "mems")
OutputFunction: TypeAlias = Callable[[Any, Any], Any]
"""`fn(outputs, batch)`: the model's output on its device, and its arguments, a mapping or a tuple."""
LeafKey = tuple[str, int, int]
"""Path, number of dims, row dim."""
_NAMES_OF_LABELS = ("label", "position", "loss")
"""Parts of names of arguments with which models compute a loss; other calls that have one run twice."""


class Forwarding:
    """Runs forwards of one module, and records which of its outputs hold rows.

    Args:
        module: The sharded root module.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._holds_rows: dict[LeafKey, bool] = {}

    def run(
        self, batch: RankBatch, fn: OutputFunction | None = None, *, training: bool = False, keep: bool = True
    ) -> RankOutput:
        """Run the module on this rank's part of a batch, without gradients; collective.

        Args:
            batch: From `deal`, on the module's device.
            fn: `fn(outputs, batch)`: returns what is kept in place of the output. Not collective.
            training: True for train mode, False for eval mode; modes of submodules are restored.
            keep: True if this rank's output is needed.

        Returns:
            The output, detached and on the CPU, with key-value caches replaced by `None`. If the call has a `Split`,
            `loss` is that of the whole batch, and tensors that only look like rows are listed.

        Raises:
            Exception: Any error of the module; if all ranks raise the same, later calls are correct.
            DataError: On every rank: `fn` raised on one rank.
        """
        with using_group(group_of(self._module)), recovering(self._module):
            with torch.no_grad(), module_mode(self._module, training=training):
                value, own, reduced = self._over_passes(batch)
                if fn is not None:
                    with agreeing():
                        value, reduced = call_on_outputs(fn, value, own, self._module), ()
            local = self._settle(value, batch, fn)
        return RankOutput(map_leaves(to_cpu, value) if keep else None, reduced, local)

    def _over_passes(self, batch: RankBatch) -> tuple[Any, RankBatch, tuple[str, ...]]:
        """Return the output, with the loss of the whole batch for this rank's, its batch, and the name of that loss."""
        (passes,) = passes_of_call(self._module, batch, 1, "forward")
        done, own, value = Accumulation(), own_pass(passes), None
        for one in passes:
            output, found = self._forward(one)
            output = map_leaves(_whole, without_caches(output))
            value = output if one is own else value
            check_execution_order(self._module)
            if found is not None:
                done.add(found)
        loss, nodes = find_loss(value), children(value)
        if done.num_passes < len(passes) or nodes is None:
            return value, own, ()
        names = [name for name, item in nodes if item is loss][:1]
        whole = torch.full_like(loss, done.loss())
        return rebuild(value, [whole if name in names else item for name, item in nodes]), own, tuple(names)

    def _forward(self, batch: RankBatch) -> tuple[Any, BatchLoss | None]:
        """Return the output, and the loss of all ranks' rows if the model has one."""
        if not batch.rows or not any(part in name for name in batch.kwargs for part in _NAMES_OF_LABELS):
            value = call_model(self._module, batch.args, batch.kwargs)
            if not batch.rows or find_loss(value) is None:
                return value, None
        return forward_with_loss(self._module, batch)

    def _settle(self, value: Any, batch: RankBatch, fn: OutputFunction | None) -> tuple[str, ...]:
        """Return the leaves that only look like rows. Collective if all ranks have the same number of rows.

        A [2, 2] output of 2 rows can be two labels per row, or rows by rows (CLIP): another forward, with a different
        number of rows, shows which dims change. Not needed if ranks have different numbers of rows.
        """
        counts = {rows for rows in batch.rows if rows}
        if len(counts) != 1 or sum(rows > 0 for rows in batch.rows) == 1:
            return ()
        num_rows = counts.pop()
        found = dict(leaves(value))
        keys = {path: (path, found[path].ndim, batch.dim) for path in ambiguous_leaves(value, num_rows, batch.dim)}
        known = self._holds_rows if fn is None else {}
        # The extra forward is collective: a rank that ran it alone would wait in its first all-gather.
        if any_rank(any(key not in known for key in keys.values())):
            item = batch.rows_per_item
            other = item if num_rows > item else 2 * item
            (probes,) = passes_of_call(self._module, batch.resized(other), 1, "forward")
            with without_trace(self._module):
                outputs = [without_caches(call_model(self._module, probe.args, probe.kwargs)) for probe in probes]
            own = own_pass(probes)
            output = outputs[probes.index(own)]
            if fn is not None:
                with agreeing():
                    output = call_on_outputs(fn, output, own, self._module)
            after = dict(leaves(output))
            for path, key in keys.items():
                known[key] = follows_rows(found[path], after.get(path), other, batch.dim)
        return tuple(path for path, key in keys.items() if not known[key])


def call_on_outputs(fn: OutputFunction, outputs: Any, batch: RankBatch, called: Callable[..., Any]) -> Any:
    """Return `fn(outputs, batch)`; positional arguments beside others have the names that `called` gives them.

    Raises:
        DataError: `fn` raised.
    """
    own = getattr(fn, "__wrapped__", fn)
    with naming(f"fn={getattr(own, '__qualname__', type(own).__name__)}"), torch.no_grad():
        named = dict(zip(positions_of(called), batch.args, strict=False))
        return fn(outputs, {**named, **batch.kwargs} if batch.kwargs else batch.args)


@contextmanager
def naming(function: str) -> Iterator[None]:
    """Raise an error of a function as a `DataError` that names it, of one kind on all ranks: the group stays READY."""
    try:
        yield
    except Exception as error:
        raise DataError(f"{function} raised {type(error).__name__}: {error}") from error


def _whole(_: str, leaf: Any) -> Any:
    """Return the full tensor of a leaf; collective for a DTensor, so all ranks call it before one drops its output."""
    return leaf.full_tensor() if isinstance(leaf, DTensor) else leaf


def to_cpu(_: str, leaf: Any) -> Any:
    """Return a tensor detached, on the CPU, and without storage beyond its elements."""
    if not isinstance(leaf, torch.Tensor):
        return leaf
    tensor = leaf.detach().to("cpu")
    # The pickle of a view contains its whole storage.
    is_view = tensor.layout == torch.strided and tensor.untyped_storage().nbytes() > tensor.numel() * tensor.itemsize
    return tensor.clone() if is_view else tensor


def ambiguous_leaves(value: Any, num_rows: int, dim: int) -> list[str]:
    """Return the paths of tensors with `num_rows` in `dim` and in another dim: these may be rows, or rows × rows."""
    tensors = ((path, leaf.shape) for path, leaf in leaves(value) if isinstance(leaf, torch.Tensor))
    return [
        path
        for path, shape in tensors
        if -len(shape) <= dim < len(shape) and shape[dim] == num_rows and shape.count(num_rows) > 1
    ]


def follows_rows(before: torch.Tensor, after: Any, num_rows: int, dim: int) -> bool:
    """Return True if a leaf's size changes with the rows in `dim` only.

    Args:
        before: The leaf from one forward.
        after: The leaf from a forward of `num_rows` rows.
        num_rows: Rows of the second forward.
        dim: The dim that holds rows.
    """
    expected = list(before.shape)
    expected[dim] = num_rows
    return isinstance(after, torch.Tensor) and list(after.shape) == expected


def without_caches(value: Any, name: str = "") -> Any:
    """Return the output with `None` in place of key-value caches, which stay on the rank.

    Args:
        value: The output, or the part of it that `name` names.
        name: As in `children`.
    """
    # By the names of its base classes: transformers is not imported here.
    is_cache = any(one.__name__ == "Cache" and one.__module__.startswith("transformers") for one in type(value).__mro__)
    if is_cache or any(name in (f"[{cache!r}]", f".{cache}") for cache in _CACHES):
        return None
    nodes = children(value)
    return rebuild(value, [without_caches(item, child) for child, item in nodes]) if nodes else value
