"""Check that each element below a reduction depends on one item of the batch alone, by the autograd graph.

A mean over a batch is the mean of the ranks' means, weighted by their counts, only if nothing below it combines rows.
`RowCheck` follows the dim of the rows from the model's outputs up to the reduction, and refuses what it does not know.
An item is one row, or `rows_per_item` rows that stay on one rank.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Sequence
from typing import NamedTuple

import torch
from torch.autograd.graph import get_gradient_edge

from raysharding.distributed.training.losses.reductions import Node, Recorder, Reduction, names_of
from raysharding.errors import UnreadableLossError
from raysharding.torch_internals import saved, shape_of

Edge = tuple[Node, int]
"""A forward result: the node of its operation, and the number of the output."""
Shape = tuple[int, ...]


class Rows(NamedTuple):
    """Where the rows of a tensor are."""

    dim: int | None
    """Dim, counted from the end, so negative; `None` if a single row's dim was removed."""
    extent: int | None
    """Number of consecutive indices of that dim that belong to one item; `None` if an item's are not consecutive."""


_ELEMENTWISE = names_of("""
    Abs Acos Acosh Add Addcdiv Addcmul Alias Angle Asin Asinh Atan Atan2 Atanh Celu Clamp ClampMax ClampMin Clone
    Copysign Cos Cosh Div Elu Erf Erfc Exp Exp2 Expm1 Gelu Hardshrink Hardsigmoid Hardswish Hardtanh LeakyRelu Lerp
    Log Log10 Log1p Log2 LogSigmoid Logaddexp Logaddexp2 Logit Maximum Minimum Mish Mul NanToNum Neg Pow Reciprocal
    Relu Rsqrt Rsub Selu Sgn Sigmoid Sign Silu Sin Sinh Softplus Softshrink Sqrt Sub Tan Tanh Threshold ToCopy Xlogy
""")
_VIEWS = names_of("View UnsafeView ReshapeAlias")
_DIMS = _VIEWS | names_of("T Transpose Permute Squeeze Unsqueeze Expand")
SAME_ELEMENTS = _DIMS | names_of("ToCopy Clone Alias")
"""Operations that change no value."""
_REDUCTIONS = names_of("Amax Amin LinalgVectorNorm Logsumexp Max Mean Median Min Norm Prod Std Sum Var")
_ALONG_A_DIM = names_of("Cummax Cummin Cumprod Cumsum Gather LogCumsumExp LogSoftmax Softmax Sort Topk")
_PARTS = names_of("Index Slice Select Split SplitWithSizes Unbind")
_OF_ONE = _DIMS | _REDUCTIONS | _ALONG_A_DIM | _PARTS
"""Operations of one operand."""
_OUTPUTS = SAME_ELEMENTS | _ELEMENTWISE | _OF_ONE | names_of("IndexSelect")
"""Operations between the last layers of a model and its output."""
_PRODUCTS = names_of("Mm Addmm Bmm Baddbmm")
_LAYERS = _PRODUCTS | names_of("""
    AvgPool2D Convolution CudnnConvolution Embedding MkldnnConvolution MkldnnLinear NativeDropout NativeGroupNorm
    NativeLayerNorm UpsampleBicubic2D UpsampleBilinear2D UpsampleLinear1D UpsampleNearest2D
""")
_MAX_NODES = 1000
_WAY_OUT = "let loss= return (sum over the rank's rows, count), or a list of such pairs; (sum, None) for a sum"


def kind_of(node: Node) -> str:
    """Return the operation of a node, such as "Mul"; a custom function's name is returned whole."""
    return re.sub(r"Backward\d+$", "", node.name())


def refuse(what: str) -> UnreadableLossError:
    """Return the error for a loss that cannot be read; it names the way out."""
    return UnreadableLossError(f"the loss of the whole batch cannot be read from this rank's: {what}; {_WAY_OUT}")


class RowCheck:
    """Follows the rows of one rank's batch through the graph of its loss.

    Args:
        recorder: What was noted while the loss was computed.
        outputs: The model's outputs that have a gradient.
        num_rows: Number of rows in the tensors of this rank, dummies included; `None` if unknown.
        rows_per_item: Number of consecutive rows that belong together.
        dims: Dims of the call's Splits.
    """

    def __init__(
        self,
        recorder: Recorder,
        outputs: list[torch.Tensor],
        num_rows: int | None,
        rows_per_item: int,
        dims: Collection[int],
    ) -> None:
        self._recorder = recorder
        self._num_rows = num_rows
        self._num_items = None if num_rows is None else max(num_rows // rows_per_item, 1)
        self._rows_per_item = rows_per_item
        self._border: dict[Edge, Rows | None] = {
            edge_of(output): self._at_border(tuple(output.shape), self._row_dim(tuple(output.shape), num_rows, dims))
            for output in outputs
            if output.ndim
        }
        self._known: dict[tuple[Edge, bool], Rows | None] = {}
        self.factors: list[torch.Tensor] = []
        """0-dim factors below the reductions, which must be equal on all ranks."""
        self.is_ambiguous = False
        """True if this rank's one item does not show which dims hold rows."""

    def check(self, reduction: Reduction) -> None:
        """Check the inputs of a loss function.

        Raises:
            UnreadableLossError: An input combines rows, or may do so.
        """
        for tensor in reduction.inputs:
            rows = self.of(edge_of(tensor), in_model=reduction.in_model)
            _check_along(rows, tuple(tensor.shape), reduction.along, f"{reduction.name} combines")
            if reduction.first_dim and rows is not None and rows.dim not in (None, -tensor.ndim):
                raise refuse(f"{reduction.name} divides by the size of dim 0, which does not hold the rows")

    def of(self, edge: Edge, *, in_model: bool) -> Rows | None:
        """Return where the rows of a forward result are; `None` if it depends on parameters alone.

        Args:
            edge: The result.
            in_model: True for a loss that the model computed: its layers are not followed further.

        Raises:
            UnreadableLossError: It combines rows, or may do so.
        """
        key = edge, in_model
        if key not in self._known:
            self._known[key] = self._find(edge, in_model)
        return self._known[key]

    def _find(self, edge: Edge, in_model: bool) -> Rows | None:
        node, kind = edge[0], kind_of(edge[0])
        if edge in self._border:
            self._check_output(edge)
            return self._border[edge]
        if node in self._recorder.reductions:
            return self._of_losses(self._recorder.reductions[node])
        if kind == "torch::autograd::AccumulateGrad":
            return None
        if node in self._recorder.layers:
            return self._of_recorded_layer(edge, in_model)
        if kind in _ELEMENTWISE:
            return self._elementwise(edge, in_model)
        if kind in _OF_ONE:
            return self._of_one(edge, in_model)
        if kind in ("Cat", "Stack"):
            return self._joint(edge, in_model)
        if kind in _PRODUCTS and self._multiplies_rows(node):
            raise refuse(f"{node.name()} multiplies rows with rows, or with a tensor that may hold them")
        if kind not in _LAYERS or not in_model:
            raise refuse(f"{node.name()} is not known to keep rows apart")
        return self._at_border(shape_of(*edge), 0)

    def _row_dim(self, shape: Shape, num_rows: int | None, dims: Collection[int]) -> int:
        """Return the dim of an output's rows: that of the Splits, or else the only one that has as many."""
        given = [dim for dim in sorted(dims) if -len(shape) <= dim < len(shape) and shape[dim] == num_rows]
        found = given or [dim for dim, size in enumerate(shape) if size == num_rows]
        if len(dims) > 1 and len(found) != 1:
            raise refuse(f"the Splits of this call have different dims, and an output has shape {shape}")
        if not found and num_rows is not None and len(shape) == 1:
            raise refuse(f"an output of the model has shape {shape}, and no dim of {num_rows} rows")
        return found[0] if len(found) == 1 or given else next(iter(dims), 0)

    def _at_border(self, shape: Shape, dim: int) -> Rows | None:
        if self._num_items is None or not -len(shape) <= dim < len(shape):
            return Rows(-len(shape), None)
        dim %= len(shape)
        extent, rest = divmod(shape[dim], self._num_items)
        return Rows(dim - len(shape), None if rest or not extent else extent)

    def _check_output(self, edge: Edge) -> None:
        """Raise if an output of the model compares rows with rows, as CLIP's similarities do."""
        shape, queue, seen = shape_of(*edge), [edge], set[Node]()
        # Layers may happen to have as many features as there are rows.
        may_compare = len(shape) > 1 and shape[0] == shape[1] == self._num_rows
        while queue:
            node, output = queue.pop()
            kind, children = kind_of(node), _children(node)
            if node in seen or node in self._recorder.layers or _is_parameter(node):
                continue
            seen.add(node)
            if kind in _PRODUCTS and self._multiplies_rows(node):
                raise refuse(
                    f"{node.name()} in the model multiplies rows with rows, so that each depends on the others"
                )
            sizes = {shape_of(*child) for child in children}
            is_followed = kind in _OUTPUTS and bool(children)
            is_broadcast = kind == "Expand" or (kind in _ELEMENTWISE and shape_of(node, output) not in sizes)
            if self._num_rows == 1:  # to compare it with others, a dim was made for them
                self.is_ambiguous |= may_compare and kind == "Unsqueeze"
            elif may_compare and kind not in _LAYERS and (is_broadcast or not is_followed):
                raise refuse(f"an output of the model of shape {shape} may compare rows with rows ({node.name()})")
            queue += children if is_followed else []

    def check_pair(self, total: torch.Tensor) -> None:
        """Check a sum, whose rows the caller answers for: it may not compare rows with those of this rank alone.

        Raises:
            UnreadableLossError: It multiplies rows with rows, and they are not those of one item.
        """
        queue, seen = [edge_of(total)[0]], {edge[0] for edge in self._border}
        while queue and self._rows_per_item == 1 and len(seen) < _MAX_NODES:
            node = queue.pop()
            if node in seen or node in self._recorder.layers:
                continue
            seen.add(node)
            has_data = all(child for child, _ in node.next_functions[-2:]) or node in self._recorder.data_ndim
            if has_data and kind_of(node) in _PRODUCTS and self._multiplies_rows(node):
                raise refuse(
                    f"{node.name()} in the loss function multiplies rows with rows, and each rank has only its own: "
                    "gather them with torch.distributed.nn.functional.all_gather, or keep together what belongs "
                    "together by Split(..., rows_per_item=)"
                )
            queue += [child for child, _ in _children(node)]

    def _multiplies_rows(self, node: Node) -> bool:
        """Return True if both operands of a matrix product may be rows, and the product is not one for each row."""
        if kind_of(node) in ("Bmm", "Baddbmm") and (shape_of(node, 0)[0] != 1 or self._num_items == 1):
            return False
        return not any(_is_parameter(child) for child, _ in node.next_functions[-2:])

    def _of_recorded_layer(self, edge: Edge, in_model: bool) -> Rows | None:
        given = self._recorder.layers[edge[0]]
        if in_model:
            return self._at_border(shape_of(*edge), 0)
        if given is None:
            raise refuse("the loss function uses what is inside the model, and not in its output")
        if not given.requires_grad:
            raise refuse(f"{edge[0].name()} combines parameters with data")
        rows = self.of(edge_of(given), in_model=in_model)
        _check_along(rows, tuple(given.shape), [-1], f"{edge[0].name()} multiplies")
        return rows

    def _of_losses(self, reduction: Reduction) -> Rows | None:
        """Return where the rows of a loss with `reduction="none"` are."""
        if reduction.value is not None:
            raise refuse(f"{reduction.name} is reduced already, and is used as if it were a row")
        if reduction.problem:
            raise refuse(reduction.problem)
        self.check(reduction)
        tensor = reduction.inputs[0]
        along = [dim % tensor.ndim for dim in reduction.along]
        order = [dim for dim in range(tensor.ndim) if dim not in along]
        rows = self.of(edge_of(tensor), in_model=reduction.in_model)
        return rows and _moved(rows, order, tensor.ndim)

    def _elementwise(self, edge: Edge, in_model: bool) -> Rows | None:
        node, output = edge
        shape = shape_of(node, output)
        found, is_expanded = list[Rows](), False
        for child in _children(node):
            rows = self.of(child, in_model=in_model)
            if rows is None:
                continue
            before = shape_of(*child)
            is_expanded |= before != shape
            if rows.dim is not None and shape[rows.dim] != before[rows.dim]:
                raise refuse(f"{node.name()} broadcasts the rows of {before} to {shape}, and so combines rows")
            found.append(rows)
        if any(child is None for child, _ in node.next_functions):
            self._check_data(node, found, is_expanded, shape)
        return _joined(node, found)

    def _check_data(self, node: Node, found: list[Rows], is_expanded: bool, shape: Shape) -> None:
        """Check an operand without a gradient: a number, or data."""
        kind = kind_of(node)
        if node in self._recorder.with_mixed:
            raise refuse(f"{node.name()}, with a tensor that the loss function made by combining this rank's rows")
        if kind in ("Mul", "Div"):
            factor = saved(node, "other" if node.next_functions[0][0] is not None else "self")
            if factor.ndim:
                raise refuse(
                    f"{node.name()}, by a tensor of shape {tuple(factor.shape)} without gradient: weights, masks and "
                    "advantages may have been made from this rank's rows"
                )
            self.factors.append(factor)
        elif kind in ("Pow", "Addcmul", "Addcdiv", "Lerp") and len(node.next_functions) > 1:
            raise refuse(f"{node.name()} with a tensor without gradient")
        # One row's dim of size 1 may be broadcast, and may as well be another row's.
        self.is_ambiguous |= self._num_items == 1 and self._recorder.data_ndim.get(node, len(shape)) < len(shape)
        if shape and not found:
            raise refuse(f"{node.name()} combines parameters with data")
        if is_expanded:
            raise refuse(f"{node.name()} broadcasts rows to {shape} against a tensor without gradient")

    def _of_one(self, edge: Edge, in_model: bool) -> Rows | None:
        node, kind = edge[0], kind_of(edge[0])
        child = _children(node)[0]
        rows, before, shape = self.of(child, in_model=in_model), shape_of(*child), shape_of(*edge)
        is_unchanged = shape == before and (kind in _DIMS or not before)
        if rows is None or (rows.dim is None and is_unchanged):
            return rows
        if kind in _VIEWS:
            found = _reshaped(rows, before, shape)
            # With one item, dims of size 1 look alike: the rows' and others.
            others = [size for dim, size in enumerate(shape, -len(shape)) if dim != found.dim and size == 1]
            self.is_ambiguous |= self._num_items == 1 and bool(others)
            return found
        if kind == "Index":
            # Models take out padded positions, by masks that are arguments; a loss function may select by the batch.
            if not in_model or any(index is not None and index.dtype != torch.bool for index in saved(node, "indices")):
                raise refuse(f"{node.name()} selects by an index or a mask")
            return Rows(-len(shape), None)
        is_along_rows = kind == "Gather" and rows.dim == saved(node, "dim") % len(shape) - len(shape)
        if is_along_rows and in_model and _takes_rows(node):  # DeBERTa takes out the rows that have a label
            return Rows(rows.dim, None)
        order = _order(node, kind, before, shape)
        if kind != "Squeeze":
            _check_along(rows, before, [dim for dim in range(len(before)) if dim not in order], f"{node.name()} works")
        found = _moved(rows, order, len(before))
        if found.dim is not None and shape[found.dim] != before[rows.dim or 0]:
            raise refuse(f"{node.name()} repeats the rows of {before}, or takes a part of them")
        return found

    def _joint(self, edge: Edge, in_model: bool) -> Rows | None:
        """`cat` and `stack` of tensors with the same rows."""
        node, shape, children = edge[0], shape_of(*edge), _children(edge[0])
        if len(children) < len(node.next_functions):
            raise refuse(f"{node.name()} with a tensor without gradient")
        rows = _joined(node, [one for child in children if (one := self.of(child, in_model=in_model)) is not None])
        dim, ndim = saved(node, "dim") % len(shape), len(shape_of(*children[0]))
        if kind_of(node) == "Stack":
            return rows and _moved(rows, [*range(dim), None, *range(dim, ndim)], ndim)
        _check_along(rows, shape, [dim], f"{node.name()} joins")
        return rows


def _check_along(rows: Rows | None, shape: Shape, dims: Sequence[int], what: str) -> None:
    if rows is None or not dims:
        return
    if rows.dim is None:
        raise refuse(f"a dim of size 1 was squeezed that is the rows' with more rows: give squeeze() the dim; {what}")
    if any(dim % len(shape) == rows.dim % len(shape) for dim in dims):
        raise refuse(f"{what} along dim {rows.dim % len(shape)} of shape {shape}, which holds the rows")


def _takes_rows(node: Node) -> bool:
    """Return True if a `gather` takes whole rows, each once and in their order. Waits for the device."""
    places = saved(node, "index").movedim(saved(node, "dim"), 0).flatten(1)
    return bool((places == places[:, :1]).all()) and bool((places[1:, 0] > places[:-1, 0]).all())


def _joined(node: Node, found: list[Rows]) -> Rows | None:
    placed = [rows for rows in found if rows.dim is not None]
    if len({rows.dim for rows in placed}) > 1:
        raise refuse(f"{node.name()} combines rows with other rows: they are in different dims")
    extents = {rows.extent for rows in placed}
    if placed:
        return Rows(placed[0].dim, extents.pop() if len(extents) == 1 else None)
    return found[0] if found else None


def _order(node: Node, kind: str, before: Shape, shape: Shape) -> list[int | None]:
    """Return the operand's dim that each dim of the result is; `None` for one that is new, or made of several."""
    ndim = len(before)
    order: list[int | None] = list(range(ndim))
    if kind == "Permute":
        return [dim % ndim for dim in saved(node, "dims")]
    if kind in ("T", "Transpose"):
        one, other = (0, ndim - 1) if kind == "T" else (saved(node, "dim0"), saved(node, "dim1"))
        order[one], order[other] = order[other], order[one]
        return order
    if kind == "Expand":
        return [None] * (len(shape) - ndim) + order
    if kind == "Unsqueeze":
        order.insert(saved(node, "dim") % (ndim + 1), None)
        return order
    if kind == "Slice" and (saved(node, "start"), saved(node, "step")) == (0, 1) and saved(node, "end") >= 1 << 62:
        return order
    dims = _dims(node, ndim)
    if kind == "Squeeze":
        dims = {dim for dim in dims if before[dim] == 1}
    if len(shape) < ndim:
        return [dim for dim in order if dim not in dims]
    return [None if dim in dims else dim for dim in order]


def _dims(node: Node, ndim: int) -> set[int]:
    """Return the dims along which an operation works; all of them for a reduction to one number."""
    found = saved(node, "dim") if hasattr(node, "_saved_dim") else None
    given = found if isinstance(found, tuple) else (found,)
    return set(range(ndim)) if given in ((), (None,)) else {dim % ndim for dim in given}


def _moved(rows: Rows, order: Sequence[int | None], ndim: int) -> Rows:
    """Return where the rows of a tensor of `ndim` dims are after an operation; nowhere if it removes their dim."""
    if rows.dim is None or rows.dim % ndim not in order:
        return Rows(None, None)
    return Rows(order.index(rows.dim % ndim) - len(order), rows.extent)


def _reshaped(rows: Rows, before: Shape, shape: Shape) -> Rows:
    """Return where the rows are after a reshape of contiguous elements."""
    if rows.dim is None:
        return rows
    first = rows.dim % len(before)
    inner = math.prod(before[first + 1 :])
    is_outermost = rows.extent is not None and math.prod(before[:first]) == 1
    item = (rows.extent or 1) * inner if is_outermost else inner
    # Rows merge with whole dims: sizes that depend on their number would depend on the ranks'.
    whole = {item, *(math.prod(before[dim:]) for dim in range(first + 1, len(before) + 1))}
    for dim in reversed(range(len(shape))):
        after = math.prod(shape[dim + 1 :])
        if dim and shape[dim] * after <= item:
            continue
        if is_outermost and after in whole and item % after == 0 and math.prod(shape[:dim]) == 1:
            return Rows(dim - len(shape), item // after)
        if not is_outermost and shape[dim] == before[first] and after == inner:
            return Rows(dim - len(shape), rows.extent)
        if not is_outermost and after <= inner and shape[dim] * after % (before[first] * inner) == 0:
            return Rows(dim - len(shape), None)
        raise refuse(f"a reshape of {before} to {shape} divides the rows over several dims")
    return Rows(None, None)  # one item alone, in a 0-dim tensor


def edge_of(tensor: torch.Tensor) -> Edge:
    """Return the forward result that a tensor is."""
    edge = get_gradient_edge(tensor)
    return edge.node, edge.output_nr


def _children(node: Node) -> list[Edge]:
    return [(child, output) for child, output in node.next_functions if child is not None]


def _is_parameter(node: Node | None) -> bool:
    """Return True if a forward result is a parameter, or a view, a cast or a product of parameters."""
    if node is None:
        return False
    kind = kind_of(node)
    if kind == "torch::autograd::AccumulateGrad":
        return True
    known = kind in SAME_ELEMENTS or kind in ("Mm", "Add", "Mul", "Cat")
    children = node.next_functions
    return known and bool(children) and all(_is_parameter(child) or _is_number(node, child) for child, _ in children)


def _is_number(node: Node, child: Node | None) -> bool:
    factor = saved(node, "other") if child is None and kind_of(node) == "Mul" else None
    return factor is not None and not factor.ndim
