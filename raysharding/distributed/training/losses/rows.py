"""Check that each element below a reduction depends on one item of the batch alone, by the autograd graph.

A mean over a batch is the mean of the ranks' means, weighted by their counts, only if nothing below it combines rows.
`RowCheck` follows the dim of the rows from the model's outputs up to the reduction, and refuses what it does not know.
An item is one row, or `rows_per_item` rows that stay on one rank.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Mapping
from typing import NamedTuple

import torch
from torch.autograd.graph import get_gradient_edge

from raysharding.distributed.training.losses.reductions import Node, Recorder, Reduction, names_of
from raysharding.errors import UnreadableLossError
from raysharding.torch_internals import saved, shape_of

Edge = tuple[Node, int]
"""A forward result: the node of its operation, and the number of the output."""


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
_REDUCTIONS = names_of("Amax Amin LinalgVectorNorm Logsumexp Max Mean Median Min Norm Prod Std Sum Var")
_ALONG_A_DIM = names_of("Cummax Cummin Cumprod Cumsum LogCumsumExp LogSoftmax Softmax Sort Topk")
_VIEWS = names_of("View UnsafeView ReshapeAlias")
_TRANSPOSITIONS = names_of("T Transpose Permute")
_PARTS = names_of("Slice Select Split SplitWithSizes Unbind")
_PRODUCTS = names_of("Mm Addmm Bmm Baddbmm")
_LAYERS = _PRODUCTS | names_of("""
    AvgPool2D Convolution CudnnConvolution Embedding MkldnnConvolution MkldnnLinear NativeDropout NativeGroupNorm
    NativeLayerNorm UpsampleBicubic2D UpsampleBilinear2D UpsampleLinear1D UpsampleNearest2D
""")
SAME_ELEMENTS = _VIEWS | _TRANSPOSITIONS | names_of("Squeeze Unsqueeze Expand ToCopy Clone Alias")
"""Operations that change no value."""
_OUTPUTS = SAME_ELEMENTS | _ELEMENTWISE | _ALONG_A_DIM | _PARTS | names_of("Gather Index IndexSelect")
"""Operations between the last layers of a model and its output."""
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
            _edge(output): self._at_border(tuple(output.shape), self._row_dim(tuple(output.shape), num_rows, dims))
            for output in outputs
            if output.ndim
        }
        self._known: dict[tuple[Edge, bool], Rows | None] = {}
        self.factors: list[torch.Tensor] = []
        """0-dim factors below the reductions, which must be equal on all ranks."""
        self.is_ambiguous = False
        """True if it cannot be told from this rank's one item which dims hold rows."""

    def check(self, reduction: Reduction) -> None:
        """Check the inputs of a loss function.

        Raises:
            UnreadableLossError: An input combines rows, or may do so.
        """
        for tensor in reduction.inputs:
            rows = self.of(_edge(tensor), in_model=reduction.in_model)
            self._check_along(rows, tuple(tensor.shape), reduction.along, f"{reduction.name} combines")
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
        node, output = edge
        if edge in self._border:
            self._check_products(edge)
            return self._border[edge]
        reduction = self._recorder.reductions.get(node)
        if reduction is not None and reduction.value is not None:
            raise refuse(f"{reduction.name} is reduced already, and is used as if it were a row")
        if reduction is not None:
            return self._of_losses(reduction, shape_of(node, output))
        kind = kind_of(node)
        if kind == "torch::autograd::AccumulateGrad":
            return None
        if node in self._recorder.layers:
            return self._of_recorded_layer(edge, in_model)
        rule = _RULES.get(kind)
        if rule is not None:
            return rule(self, edge, in_model)
        if kind in _LAYERS:
            return self._of_layer(edge, in_model)
        raise refuse(f"{node.name()} is not known to keep rows apart")

    def _row_dim(self, shape: tuple[int, ...], num_rows: int | None, dims: Collection[int]) -> int:
        """Return the dim of an output's rows: that of the Splits, or else the only one that has as many."""
        given = [dim for dim in sorted(dims) if -len(shape) <= dim < len(shape) and shape[dim] == num_rows]
        found = given or [dim for dim, size in enumerate(shape) if size == num_rows]
        if len(dims) > 1 and len(found) != 1:
            raise refuse(f"the Splits of this call have different dims, and an output has shape {shape}")
        if not found and num_rows is not None and len(shape) == 1:
            raise refuse(f"an output of the model has shape {shape}, and no dim of {num_rows} rows")
        return found[0] if len(found) == 1 or given else next(iter(dims), 0)

    def _at_border(self, shape: tuple[int, ...], dim: int) -> Rows | None:
        if self._num_items is None or not -len(shape) <= dim < len(shape):
            return Rows(-len(shape), None)
        dim %= len(shape)
        extent, rest = divmod(shape[dim], self._num_items)
        return Rows(dim - len(shape), None if rest or not extent else extent)

    def _check_products(self, edge: Edge) -> None:
        """Raise if an output of the model is a product of rows with rows, as CLIP's similarities are."""
        kinds = _ELEMENTWISE | SAME_ELEMENTS | _ALONG_A_DIM
        node = self._product_of_rows([edge[0]], set(), kinds)
        if node is not None:
            raise refuse(f"{node.name()} in the model multiplies rows with rows, so that each depends on the others")
        shape = shape_of(*edge)
        is_square = len(shape) > 1 and shape[0] == shape[1] == self._num_rows and shape[0] > 1
        if is_square and not self._ends_in_layers(edge):
            raise refuse(f"an output of the model of shape {shape} may compare rows with rows ({edge[0].name()})")

    def _ends_in_layers(self, edge: Edge) -> bool:
        """Return True if a result is that of layers, whose size may happen to be the number of rows."""
        node, kind = edge[0], kind_of(edge[0])
        if node in self._recorder.layers or kind in _LAYERS or _is_parameter(node):
            return True
        children = _children(node)
        is_broadcast = kind in _ELEMENTWISE and all(shape_of(*child) != shape_of(*edge) for child in children)
        return kind in _OUTPUTS and not is_broadcast and bool(children) and all(map(self._ends_in_layers, children))

    def check_pair(self, total: torch.Tensor) -> None:
        """Check a sum, whose rows the caller answers for: it may not compare rows with those of this rank alone.

        Raises:
            UnreadableLossError: It multiplies rows with rows, and they are not those of one item.
        """
        border = {edge[0] for edge in self._border}
        start = _edge(total)[0]
        node = self._product_of_rows([start], border, None) if self._rows_per_item == 1 else None
        if node is not None:
            raise refuse(
                f"{node.name()} in the loss function multiplies rows with rows, and each rank has only its own: gather "
                "them with torch.distributed.nn.functional.all_gather, or keep together what belongs together by "
                "Split(..., rows_per_item=)"
            )

    def _product_of_rows(self, queue: list[Node], border: set[Node], kinds: frozenset[str] | None) -> Node | None:
        """Return a product of rows with rows among the operations of `kinds`, any if `None`, above a border."""
        seen = set(border)
        while queue and len(seen) < _MAX_NODES:
            node = queue.pop()
            if node in seen or node in self._recorder.layers:
                continue
            seen.add(node)
            kind = kind_of(node)
            is_product = kind in _PRODUCTS and self._multiplies_rows(node)
            if is_product and (kinds is not None or self._is_of_data(node)):
                return node
            if kinds is None or kind in kinds:
                queue += [child for child, _ in node.next_functions if child is not None]
        return None

    def _is_of_data(self, node: Node) -> bool:
        """Return True if both operands of a product in a loss function have rows, and none is a constant."""
        return all(child is not None for child, _ in node.next_functions[-2:]) or node in self._recorder.data_ndim

    def _multiplies_rows(self, node: Node) -> bool:
        """Return True if both operands of a matrix product may be rows, and the product is not one for each row."""
        kind, shape = kind_of(node), shape_of(node, 0)
        if kind in ("Bmm", "Baddbmm") and (shape[0] != 1 or self._num_items == 1):
            return False
        return not any(_is_parameter(child) for child, _ in node.next_functions[-2:])

    def _of_recorded_layer(self, edge: Edge, in_model: bool) -> Rows | None:
        given, shape = self._recorder.layers[edge[0]], shape_of(*edge)
        if in_model:
            return self._at_border(shape, 0)
        if given is None:
            raise refuse("the loss function uses what is inside the model, and not in its output")
        if not given.requires_grad:
            raise refuse(f"{edge[0].name()} combines parameters with data")
        rows = self.of(_edge(given), in_model=in_model)
        self._check_along(rows, tuple(given.shape), (-1,), f"{edge[0].name()} multiplies")
        return rows

    def _of_layer(self, edge: Edge, in_model: bool) -> Rows | None:
        node, output = edge
        if kind_of(node) in _PRODUCTS and self._multiplies_rows(node):
            raise refuse(f"{node.name()} multiplies rows with rows, or with a tensor that may hold them")
        if not in_model:
            raise refuse(f"{node.name()} in the loss function is not known to keep rows apart")
        return self._at_border(shape_of(node, output), 0)

    def _of_losses(self, reduction: Reduction, shape: tuple[int, ...]) -> Rows | None:
        """Return where the rows of a loss with `reduction="none"` are."""
        if reduction.problem:
            raise refuse(reduction.problem)
        self.check(reduction)
        tensor = reduction.inputs[0]
        rows = self.of(_edge(tensor), in_model=reduction.in_model)
        if rows is None or rows.dim is None or not reduction.along:
            return rows
        along = {dim % tensor.ndim for dim in reduction.along}
        left = [dim for dim in range(tensor.ndim) if dim not in along]
        return Rows(left.index(rows.dim % tensor.ndim) - len(shape), rows.extent)

    def _check_along(self, rows: Rows | None, shape: tuple[int, ...], dims: tuple[int, ...], what: str) -> None:
        if rows is None or not dims:
            return
        if rows.dim is None:
            raise refuse(
                f"a dim of size 1 was squeezed that is the rows' with more rows: give squeeze() the dim; {what}"
            )
        if any(dim % len(shape) == rows.dim % len(shape) for dim in dims):
            raise refuse(f"{what} along dim {rows.dim % len(shape)} of shape {shape}, which holds the rows")

    # Operations.

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

    def _check_data(self, node: Node, found: list[Rows], is_expanded: bool, shape: tuple[int, ...]) -> None:
        """Check an operand without a gradient: a number, or data."""
        kind = kind_of(node)
        if node in self._recorder.with_mixed:
            raise refuse(f"{node.name()}, with a tensor that the loss function made by combining this rank's rows")
        if kind in ("Mul", "Div"):
            name = "other" if node.next_functions[0][0] is not None else "self"
            factor = saved(node, name)
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

    def _reduce(self, edge: Edge, in_model: bool) -> Rows | None:
        node, output = edge
        child = _only_child(node)
        rows, before, shape = self.of(child, in_model=in_model), shape_of(*child), shape_of(node, output)
        dims = _dims(node, len(before))
        self._check_along(rows, before, dims, f"{node.name()} reduces")
        if rows is None or rows.dim is None or len(shape) == len(before):
            return rows
        dim = rows.dim % len(before)
        dim -= sum(other % len(before) < dim for other in dims)
        return Rows(dim - len(shape), rows.extent)

    def _along(self, edge: Edge, in_model: bool) -> Rows | None:
        node = edge[0]
        child = _only_child(node)
        rows, before, shape = self.of(child, in_model=in_model), shape_of(*child), shape_of(*edge)
        self._check_along(rows, before, (saved(node, "dim"),), f"{node.name()} works")
        if rows is not None and rows.dim is not None and shape[rows.dim] != before[rows.dim]:
            raise refuse(f"{node.name()} takes a part of the rows")
        return rows

    def _gather(self, edge: Edge, in_model: bool) -> Rows | None:
        node, dim = edge[0], saved(edge[0], "dim")
        rows, ndim = self.of(_only_child(node), in_model=in_model), len(shape_of(*edge))
        # DeBERTa takes out the rows that have a label.
        if in_model and rows is not None and rows.dim == dim % ndim - ndim and _takes_rows(saved(node, "index"), dim):
            return Rows(rows.dim, None)
        return self._along(edge, in_model)

    def _view(self, edge: Edge, in_model: bool) -> Rows | None:
        node, output = edge
        child = _only_child(node)
        rows, shape = self.of(child, in_model=in_model), shape_of(node, output)
        if rows is None:
            return None
        found = _reshaped(rows, shape_of(*child), shape)
        # With one item, dims of size 1 look alike: the rows' and others.
        others = [size for dim, size in enumerate(shape, -len(shape)) if dim != found.dim and size == 1]
        self.is_ambiguous |= self._num_items == 1 and bool(others)
        return found

    def _squeeze(self, edge: Edge, in_model: bool) -> Rows | None:
        node, output = edge
        child = _only_child(node)
        rows, before, shape = self.of(child, in_model=in_model), shape_of(*child), shape_of(node, output)
        if rows is None or (rows.dim is None and len(shape) == len(before)):
            return rows
        if rows.dim is None:
            raise refuse(f"{node.name()} of a row whose dim was squeezed")
        inner, ndim = rows.dim % len(before), max(len(before), len(shape))
        if len(shape) > len(before):
            return Rows(inner + (saved(node, "dim") % ndim <= inner) - ndim, rows.extent)
        dims = {dim % ndim for dim in _dims(node, ndim) if before[dim] == 1}
        return (
            Rows(None, None)
            if inner in dims
            else Rows(inner - sum(dim < inner for dim in dims) - len(shape), rows.extent)
        )

    def _permute(self, edge: Edge, in_model: bool) -> Rows | None:
        node = edge[0]
        child = _only_child(node)
        rows, ndim = self.of(child, in_model=in_model), len(shape_of(*child))
        if rows is None or rows.dim is None:
            return rows
        order = list(range(ndim))
        if kind_of(node) == "Permute":
            order = [dim % ndim for dim in saved(node, "dims")]
        else:
            one, other = (0, ndim - 1) if kind_of(node) == "T" else (saved(node, "dim0"), saved(node, "dim1"))
            order[one], order[other] = order[other], order[one]
        return Rows(order.index(rows.dim % ndim) - ndim, rows.extent)

    def _part(self, edge: Edge, in_model: bool) -> Rows | None:
        """Slices, and the results of `split`, `chunk`, `select` and `unbind`."""
        node, output = edge
        child = _only_child(node)
        rows, before, shape = self.of(child, in_model=in_model), shape_of(*child), shape_of(node, output)
        dim = saved(node, "dim")
        is_whole = kind_of(node) == "Slice" and saved(node, "start") == 0 and saved(node, "end") >= (1 << 62)
        if is_whole and saved(node, "step") == 1:
            return rows
        self._check_along(rows, before, (dim,), f"{node.name()} takes a part")
        if rows is None or rows.dim is None or len(shape) == len(before):
            return rows
        inner = rows.dim % len(before)
        return Rows(inner - (dim % len(before) < inner) - len(shape), rows.extent)

    def _joint(self, edge: Edge, in_model: bool) -> Rows | None:
        """`cat` and `stack` of tensors with the same rows."""
        node, output = edge
        children, shape = _children(node), shape_of(node, output)
        if len(children) < len(node.next_functions):
            raise refuse(f"{node.name()} with a tensor without gradient")
        rows = _joined(node, [one for child in children if (one := self.of(child, in_model=in_model)) is not None])
        if rows is None or rows.dim is None:
            return rows
        before = len(shape_of(*children[0]))
        dim = saved(node, "dim") % len(shape)
        inner = rows.dim % before
        if kind_of(node) == "Stack":
            return Rows(inner + (dim <= inner) - len(shape), rows.extent)
        if dim == inner:
            raise refuse(f"{node.name()} joins along dim {dim}, which holds the rows")
        return rows

    def _expand(self, edge: Edge, in_model: bool) -> Rows | None:
        node, output = edge
        child = _only_child(node)
        rows, before, shape = self.of(child, in_model=in_model), shape_of(*child), shape_of(node, output)
        if rows is not None and rows.dim is not None and shape[rows.dim] != before[rows.dim]:
            raise refuse(f"{node.name()} repeats the rows of {before}")
        return rows

    def _index(self, edge: Edge, in_model: bool) -> Rows | None:
        node, output = edge
        rows = self.of(_only_child(node), in_model=in_model)
        is_mask = all(index is None or index.dtype == torch.bool for index in saved(node, "indices"))
        # Models take out padded positions, by masks that are arguments; a loss function may select by the batch.
        if rows is not None and not (in_model and is_mask):
            raise refuse(f"{node.name()} selects by an index or a mask")
        return None if rows is None else Rows(-len(shape_of(node, output)), None)


def _takes_rows(index: torch.Tensor, dim: int) -> bool:
    """Return True if `gather` by this index takes whole rows, each once and in their order. Waits for the device."""
    places = index.movedim(dim, 0).flatten(1)
    return bool((places == places[:, :1]).all()) and bool((places[1:, 0] > places[:-1, 0]).all())


def _joined(node: Node, found: list[Rows]) -> Rows | None:
    placed = [rows for rows in found if rows.dim is not None]
    if len({rows.dim for rows in placed}) > 1:
        raise refuse(f"{node.name()} combines rows with other rows: they are in different dims")
    extents = {rows.extent for rows in placed}
    if placed:
        return Rows(placed[0].dim, extents.pop() if len(extents) == 1 else None)
    return found[0] if found else None


def _reshaped(rows: Rows, before: tuple[int, ...], shape: tuple[int, ...]) -> Rows:
    """Return where the rows are after a reshape of contiguous elements."""
    if rows.dim is None:
        return rows
    inner = math.prod(before[rows.dim + 1 :] if rows.dim != -1 else ())
    if rows.extent is None or math.prod(before[: rows.dim]) != 1:
        return _reshaped_inside(rows, before, shape, inner)
    item = rows.extent * inner
    for dim in reversed(range(len(shape))):
        after = math.prod(shape[dim + 1 :])
        if shape[dim] * after > item or (dim == 0 and shape[dim] * after == item):
            # Rows merge with whole dims: sizes that depend on their number would depend on the ranks'.
            whole = {
                item,
                *(math.prod(before[inside:]) for inside in range(rows.dim % len(before) + 1, len(before) + 1)),
            }
            if after not in whole or item % after or math.prod(shape[:dim]) != 1:
                raise refuse(f"a reshape of {before} to {shape} divides the rows over several dims")
            return Rows(dim - len(shape), item // after)
    return Rows(None, None)  # one item alone, in a 0-dim tensor


def _reshaped_inside(rows: Rows, before: tuple[int, ...], shape: tuple[int, ...], inner: int) -> Rows:
    """As `_reshaped`, for rows that are not outermost, or are no longer consecutive."""
    assert rows.dim is not None
    for dim in reversed(range(len(shape))):
        after = math.prod(shape[dim + 1 :])
        if shape[dim] * after <= inner and dim:
            continue
        if shape[dim] == before[rows.dim] and after == inner:
            return Rows(dim - len(shape), rows.extent)
        # Rows merge with what is before or after them.
        if after <= inner and shape[dim] * after % (before[rows.dim] * inner) == 0:
            return Rows(dim - len(shape), None)
        break
    raise refuse(f"a reshape of {before} to {shape} divides the rows over several dims")


def _edge(tensor: torch.Tensor) -> Edge:
    edge = get_gradient_edge(tensor)
    return edge.node, edge.output_nr


def _children(node: Node) -> list[Edge]:
    return [(child, output) for child, output in node.next_functions if child is not None]


def _only_child(node: Node) -> Edge:
    return _children(node)[0]


def _dims(node: Node, ndim: int) -> tuple[int, ...]:
    """Return the dims that a reduction removes; all of them for a reduction to one number."""
    try:
        found = saved(node, "dim")
    except AttributeError:
        found = None
    if found is None or found == ():
        return tuple(range(ndim))
    return found if isinstance(found, tuple) else (found,)


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


Rule = Callable[[RowCheck, Edge, bool], Rows | None]
_RULES: Mapping[str, Rule] = {
    **dict.fromkeys(_ELEMENTWISE, RowCheck._elementwise),
    **dict.fromkeys(_REDUCTIONS, RowCheck._reduce),
    **dict.fromkeys(_ALONG_A_DIM, RowCheck._along),
    **dict.fromkeys(_VIEWS, RowCheck._view),
    "Squeeze": RowCheck._squeeze,
    "Unsqueeze": RowCheck._squeeze,
    **dict.fromkeys(_TRANSPOSITIONS, RowCheck._permute),
    **dict.fromkeys(_PARTS, RowCheck._part),
    **dict.fromkeys(("Cat", "Stack"), RowCheck._joint),
    "Gather": RowCheck._gather,
    "Expand": RowCheck._expand,
    "Index": RowCheck._index,
}
