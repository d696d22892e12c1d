"""torch's loss functions by name: what each divides by, read from its arguments while a loss is computed.

The autograd graph has the same `DivBackward0` for a mean of torch's own and for a caller's division by a number, and it
has no values. `Recorder` is active while a model or a loss function runs, and notes both.

Note: what it costs.
    To each torch call outside the FSDP blocks, a torch function mode adds 1.4 times what a small one takes (20 us to 15
    on two loaded cores), and 2.4 times where data is followed: in the caller's loss function, and in models that are
    not transformers'. Inside FSDP blocks it is not active. For `cross_entropy` it counts the labels.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias
from weakref import ref

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from raysharding.torch_internals import saved_tensors_hooks

Node: TypeAlias = Any
"""A node of the autograd graph: `torch.autograd.graph.Node`, or the class of a custom function."""
Count: TypeAlias = torch.Tensor | int
Dims: TypeAlias = tuple[int, ...]


def names_of(text: str) -> frozenset[str]:
    """Return the words of a text."""
    return frozenset(text.split())


def has_gradient(value: Any) -> bool:
    """Return True for a tensor that requires a gradient."""
    return isinstance(value, torch.Tensor) and value.requires_grad


@dataclass(frozen=True, eq=False)
class Reduction:
    """One call of a loss function of torch's."""

    name: str
    """Name of the function."""
    value: torch.Tensor | None
    """Copy of the result, 0-dim, or of the sum, if `total` is one; `None` for `reduction="none"`."""
    total: Node | None
    """Node of the sum, where its quotient by the count may be 0 / 0; `None` otherwise."""
    count: Count | None
    """What a mean is divided by: a number, or a 0-dim tensor on the device. `None` for a sum, and for "none"."""
    inputs: tuple[torch.Tensor, ...]
    """Arguments with a gradient."""
    along: tuple[int, ...]
    """Dims that the function combines, which must not be those of the rows; negative ones count from the end."""
    first_dim: bool
    """True if the count is the size of the first dim, which must be that of the rows."""
    in_model: bool
    """True if the model computed it, False for the caller's loss function."""
    problem: str = ""
    """Why this reduction cannot be combined over ranks; empty if it can."""


Arguments: TypeAlias = Mapping[str, Any]


def _results(call: Arguments, along: Dims) -> Count:
    """Count what `reduction="none"` returns: the elements of the first argument, without the dims that are combined."""
    shape = _first(call).shape or (1,)
    return math.prod(shape) // max(math.prod(shape[dim] for dim in along), 1)


def _classes(call: Arguments, along: Dims) -> Count:
    """Count the weights of the labels of `cross_entropy` and `nll_loss`, without ignored ones."""
    target, weight = call["target"], call.get("weight")
    if target.is_floating_point():  # probabilities: a mean over positions, with or without weights
        return _results(call, along)
    counted = target != call["ignore_index"]
    weights = counted if weight is None else torch.where(counted, weight[target.masked_fill(~counted, 0)], 0)
    total: torch.Tensor = weights.sum()
    return total


def _weights(call: Arguments, along: Dims) -> Count:
    """Count elements, or the weights that they are given."""
    weight = call.get("weight")
    return _results(call, along) if weight is None else weight.sum()


def _first(call: Arguments) -> torch.Tensor:
    first: torch.Tensor = next(iter(call.values()))
    return first


@dataclass(frozen=True)
class _Rule:
    """How a loss function reduces."""

    count: Callable[[Arguments, Dims], Count] = _results
    """What its mean is divided by, given `along`."""
    along: Dims = ()
    """Dims that it combines, which must not be those of the rows."""
    same_shape: tuple[str, ...] = ()
    """Arguments that must have the shape of the first: others are broadcast, and may meet other rows."""
    sums: bool = False
    """True if its sum is read, too."""


_PAIR = ("target",)
_BY_ELEMENTS = (
    F.smooth_l1_loss, F.huber_loss, F.binary_cross_entropy, F.binary_cross_entropy_with_logits, F.kl_div,
    F.poisson_nll_loss, F.gaussian_nll_loss, F.soft_margin_loss, F.hinge_embedding_loss,
)  # fmt: skip
_RULES: Mapping[Any, _Rule] = {
    F.cross_entropy: _Rule(_classes),
    F.nll_loss: _Rule(_classes),
    F.mse_loss: _Rule(_weights, same_shape=_PAIR),
    F.l1_loss: _Rule(_weights, same_shape=_PAIR),
    **dict.fromkeys(_BY_ELEMENTS, _Rule(same_shape=_PAIR)),
    F.margin_ranking_loss: _Rule(same_shape=("input2", "target")),
    F.multilabel_soft_margin_loss: _Rule(along=(-1,), same_shape=_PAIR),
    F.multilabel_margin_loss: _Rule(along=(-1,), same_shape=_PAIR),
    F.multi_margin_loss: _Rule(along=(-1,)),
    F.cosine_embedding_loss: _Rule(along=(-1,), same_shape=("input2",)),
    F.triplet_margin_loss: _Rule(along=(-1,), same_shape=("positive", "negative")),
    F.ctc_loss: _Rule(along=(0, -1), sums=True),
}
"""torch's loss functions whose reduction is known. CTC's sum is one over rows, and a model's default."""


ADDITIONS = ("add", "radd", "iadd", "sub", "isub", "rsub")
_PRODUCTS = ("linear", "matmul", "mm")
_ROW_LOCAL = names_of("""
    abs add and bernoulli bfloat16 bool byte cast ceil celu clamp clamp_max clamp_min clip clone contiguous copy cos
    cpu cuda data detach div double elu embedding eq erf exp exp2 expm1 float floor floor_divide floordiv full_like ge
    gelu getitem gt half iadd iand idiv imul int invert ior ipow isfinite isin isinf isnan isub itruediv ixor le
    leaky_relu lerp log log10 log1p log2 logaddexp logical_and logical_not logical_or logical_xor logit logsigmoid
    long lt masked_fill maximum minimum mod mul nan_to_num ne neg not one_hot ones_like or pad pow radd rand rand_like
    randn_like rdiv reciprocal relu remainder requires_grad rfloordiv rmod rmul ror round rpow rsqrt rsub rtruediv
    rxor setitem sgn short sigmoid sign silu sin softplus sqrt square sub tan tanh to truediv trunc type type_as
    unsqueeze where xlogy xor zeros_like
""")
"""Functions whose results keep rows apart; comparisons, arithmetic and casts among them."""
_SHAPES = names_of("expand expand_as flatten mT repeat_interleave reshape squeeze unflatten unsqueeze view view_as")
_BY_DIM = names_of("""
    all amax amin any argmax argmin argsort cat concat count_nonzero cummax cummin cumprod cumsum gather index_select
    log_softmax logsumexp max mean median min nanmean nansum narrow norm normalize prod softmax sort
    stack std sum take_along_dim topk var
""")
"""Functions that keep rows apart along another dim than the first."""
_NUMBERS = ("__array__", "__float__", "item", "numpy", "tolist")
"""Functions that take values out of tensors, where they cannot be followed."""
_PLACE_OF_DIM = {"take_along_dim": 2, "topk": 2, "norm": 2, "normalize": 2}
"""Index of the argument `dim` where it is not the second."""


class _Tensors:
    """A set of tensors, by identity; it keeps none of them alive."""

    def __init__(self) -> None:
        self._refs: dict[int, ref[torch.Tensor]] = {}

    def add(self, tensor: torch.Tensor) -> None:
        self._refs[id(tensor)] = ref(tensor)

    def __len__(self) -> int:
        return len(self._refs)

    def __contains__(self, value: object) -> bool:
        found = self._refs.get(id(value))  # an id may be another tensor's by now
        return found is not None and found() is value


class Recorder(TorchFunctionMode):
    """Notes the loss functions that run while it is active, and the values that the graph does not keep.

    Args:
        data: The tensors of the call, which hold rows.
        in_model: True to follow them in the model, too, and not in the loss function alone.
    """

    def __init__(self, data: Iterable[torch.Tensor] = (), *, in_model: bool = False) -> None:
        super().__init__()
        self._follows_model = in_model
        self.in_model = True
        """False while the caller's loss function runs."""
        self.reductions: dict[Node, Reduction] = {}
        """Node of the result → the call, also for `reduction="none"`."""
        self.means: dict[Node, tuple[torch.Tensor, bool]] = {}
        """Node of a `mean()` to one element → copy of its value, and `in_model`."""
        self.operands: dict[Node, tuple[str, tuple[Any, ...]]] = {}
        """Node of a result of one element → name of the function, and its arguments."""
        self.layers: dict[Node, torch.Tensor | None] = {}
        """Node of a product with a parameter, even a frozen one → its input; `None` in the model, and for the output of
        an FSDP block, or what got a gradient here."""
        self.with_mixed: set[Node] = set()
        """Nodes that have an operand without gradient which the loss function made by combining rows."""
        self.data_ndim: dict[Node, int] = {}
        """Node in the loss function → smallest number of dims, 1 or more, of an operand that is data."""
        self.keeps_nothing = False
        """True where no backward follows: saved tensors are dropped."""
        self.gave_gradient = False
        """True if a tensor without a graph got one, so that the loss can be read: backward may reach no parameter."""
        self.has_graph = False
        """True once a tensor has a graph: a loss function without one may be a metric, of which values are taken."""
        self.took_number = False
        """True if the loss function took a value out of a tensor that depends on several rows."""
        self._data, self._mixed = _Tensors(), _Tensors()
        self.add_data(data)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a function, and note it."""
        kwargs = kwargs or {}
        if torch.compiler.is_compiling():  # else the compiler gives up on what it cannot trace, for good
            return func(*args, **kwargs)
        if func in _RULES:
            return self._reduce(func, _RULES[func], args, kwargs)
        name = func.__name__.strip("_")
        # `total += loss` changes its operand.
        noted = tuple(map(_copied, args)) if name in ADDITIONS else args
        result = func(*args, **kwargs)
        if self._data and (self._follows_model or not self.in_model):
            self._follow_data(func, name, args, kwargs, result)
        if not isinstance(result, torch.Tensor) or result.grad_fn is None:
            return result
        self.has_graph = True
        if name in _PRODUCTS and any(self._is_constant(one) for one in (*args[1:], *kwargs.values())):
            self.layers[result.grad_fn] = None if self.in_model else args[0] if args else kwargs["input"]
        if result.numel() == 1:
            self.operands[result.grad_fn] = (name, noted)
            if name == "mean":  # a copy: the caller may change it in place
                self.means[result.grad_fn] = (result.detach().clone().reshape(()), self.in_model)
        return result

    def add_data(self, tensors: Iterable[torch.Tensor]) -> None:
        """Follow more tensors that hold rows; those with a gradient are followed anyway."""
        for one in tensors:
            if not one.requires_grad:
                self._data.add(one)

    def _is_constant(self, value: Any) -> bool:
        """Return True for a parameter, and in the loss function for a tensor without gradient that is no data."""
        is_tensor = isinstance(value, torch.Tensor) and not value.requires_grad and value not in self._data
        return isinstance(value, nn.Parameter) or (is_tensor and not self.in_model)

    def _follow_data(self, func: Any, name: str, args: Any, kwargs: Any, result: Any) -> None:
        """Note results that depend on data, those that depend on several rows, and the nodes made with them."""
        operands = _tensors((*args, *kwargs.values()))
        data = [one for one in operands if not one.requires_grad and one in self._data]
        if not data and not any(one.requires_grad for one in operands):
            return
        if name == "get":  # an attribute
            name = getattr(func.__self__, "__name__", "")
        mixed = [one for one in operands if one in self._mixed]
        self.took_number |= func.__name__ in _NUMBERS and bool(mixed or any(one.ndim for one in operands))
        is_mixed = bool(mixed) or not _keeps_rows_apart(name, args, kwargs)
        if name == "getitem" and isinstance(args[1], torch.Tensor) and args[1].dtype != torch.bool:
            # Rows in another order; but each row's own entry of a table that is no data.
            is_mixed |= args[0].requires_grad or args[0] in self._data
        for one in [args[0]] if name == "setitem" else _tensors((result,)):
            if is_mixed:
                self._mixed.add(one)
            if one.grad_fn is None:
                self._data.add(one)
                continue
            if not all(other.requires_grad for other in mixed):
                self.with_mixed.add(one.grad_fn)
            if ndims := [other.ndim for other in data if other.ndim]:
                self.data_ndim[one.grad_fn] = min(ndims)

    def _reduce(self, func: Any, rule: _Rule, args: Any, kwargs: Any) -> Any:
        bound = inspect.signature(func).bind(*args, **kwargs)
        bound.apply_defaults()
        call = bound.arguments
        reduction, first = call["reduction"], _first(call)
        along = rule.along if rule.count is not _classes else (1 if first.ndim > 1 else 0,)
        in_graph = any(map(has_gradient, call.values()))
        self.has_graph |= in_graph
        if self.in_model and torch.is_grad_enabled() and not in_graph and (self.gave_gradient or not self.has_graph):
            first = call[next(iter(call))] = with_gradient(first)
            self.layers[first.grad_fn] = None
            self.gave_gradient = True
        if func is F.l1_loss and "weight" in call:
            call["weight"] = _weight_of_l1_loss()
        # Without counted items its gradient would be NaN, and NaN * 0 is NaN; that of `nll_loss` alone is 0.
        is_quotient = reduction == "mean" and (call.get("weight") is not None or bool(call.get("label_smoothing")))
        is_quotient &= rule.count is not _results
        # Activation checkpointing computes it again, without this.
        is_checkpointed = is_quotient and not self.keeps_nothing and saved_tensors_hooks() is not None
        is_quotient &= not is_checkpointed
        if is_quotient:
            call["reduction"] = "sum"
        result = total = func(*bound.args, **bound.kwargs)
        if total.grad_fn is None and not is_quotient:
            return result
        count = (first.shape or (1,))[0] if reduction == "batchmean" else rule.count(call, along)
        if is_quotient:
            result = total / count
            call["reduction"] = reduction
        if reduction != "none":
            self._mixed.add(result)
        if result.grad_fn is None:
            return result
        self.reductions[result.grad_fn] = Reduction(
            name=func.__name__,
            value=total.detach().clone() if reduction != "none" else None,
            total=total.grad_fn if is_quotient else None,
            count=count if reduction in ("mean", "batchmean") else None,
            inputs=tuple(filter(has_gradient, call.values())),
            along=along,
            first_dim=reduction == "batchmean",
            in_model=self.in_model,
            problem=f"{func.__name__} may divide by 0 inside a checkpoint"
            if is_checkpointed
            else _problem(func.__name__, rule, call, self._mixed),
        )
        return result


def with_gradient(leaf: Any) -> Any:
    """Return a floating tensor that requires a gradient and may still be changed in place; anything else as it is."""
    if not isinstance(leaf, torch.Tensor) or leaf.requires_grad or not leaf.is_floating_point() or not leaf.ndim:
        return leaf
    return leaf + torch.zeros((), dtype=leaf.dtype, device=leaf.device, requires_grad=True)


def _weight_of_l1_loss() -> torch.Tensor | None:
    """Return the `weight` that a caller gave to `l1_loss`, which torch 2.13 does not pass on to a mode."""
    frame = inspect.currentframe()
    while frame is not None and frame.f_code is not F.l1_loss.__code__:
        frame = frame.f_back
    weight: torch.Tensor | None = None if frame is None else frame.f_locals["weight"]
    return weight


def _copied(value: Any) -> Any:
    is_number = isinstance(value, torch.Tensor) and value.numel() == 1 and not value.requires_grad
    return value.clone() if is_number else value


def _tensors(values: Iterable[Any]) -> list[torch.Tensor]:
    """Return the tensors among values, and in lists and tuples of them."""
    found = []
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, tuple | list):
            found += _tensors(value)
    return found


def _keeps_rows_apart(name: str, args: Any, kwargs: Any) -> bool:
    """Return True if each row of a function's result is made of the same row of its operands."""
    first = args[0] if args else None
    if name == "getitem":
        index = args[1][0] if isinstance(args[1], tuple) and args[1] else args[1]
        is_whole = index is Ellipsis or index is None or (isinstance(index, slice) and index == slice(None))
        return is_whole or (isinstance(index, torch.Tensor) and not isinstance(args[1], tuple))
    if name == "transpose" and len(args) == 3:
        return 0 not in args[1:] and isinstance(first, torch.Tensor) and -first.ndim not in args[1:]
    if name in _BY_DIM:
        place = _PLACE_OF_DIM.get(name, 1)
        dims = kwargs.get("dim", args[place] if len(args) > place else None)
        found = dims if isinstance(dims, tuple | list) else [dims]
        ndims = [one.ndim for one in _tensors((first,))]
        return bool(ndims) and all(isinstance(dim, int) and dim not in (0, -ndims[0]) for dim in found)
    return name in _ROW_LOCAL or name in _SHAPES


def _problem(name: str, rule: _Rule, call: Arguments, mixed: _Tensors) -> str:
    if any(isinstance(one, torch.Tensor) and not one.requires_grad and one in mixed for one in call.values()):
        return f"{name} has an argument that the loss function made by combining this rank's rows"
    if call["reduction"] == "sum" and not rule.sums:
        return f"{name}(reduction='sum') is a sum"
    if call.get("size_average") is not None or call.get("reduce") is not None:
        return f"{name}(size_average=, reduce=) is deprecated by torch: give reduction="
    first = _first(call)
    for other in rule.same_shape:
        if isinstance(call[other], torch.Tensor) and call[other].shape != first.shape:
            shapes = f"{next(iter(call))} of shape {tuple(first.shape)} and {other} of shape {tuple(call[other].shape)}"
            return f"{name} broadcasts {shapes}, and so compares rows with other rows"
    return ""
