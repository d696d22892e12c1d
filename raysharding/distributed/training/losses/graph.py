"""Read a loss as a linear combination of means and sums, from the loss downward through the autograd graph.

Sums, differences, signs, casts, reshapes and constant factors of what already is a mean are followed; a loss function
of torch's, or a mean over all elements, ends the way. Everything else is refused.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from raysharding.distributed.training.losses.reductions import ADDITIONS, Count, Node, Recorder, has_gradient
from raysharding.distributed.training.losses.rows import SAME_ELEMENTS, Edge, RowCheck, edge_of, kind_of, refuse
from raysharding.torch_internals import saved, shape_of

Factor = float | torch.Tensor


@dataclass(eq=False)
class Term:
    """A mean or a sum in a loss."""

    name: str
    """What reduces, for messages; the same on every rank."""
    node: Node | None
    """Node whose gradient is scaled; `None` for a pair, and a term without gradient."""
    value: torch.Tensor | None
    """Mean or sum on this rank, 0-dim; `None` if it is unknown."""
    is_total: bool
    """True if `value` is the sum, also for a mean."""
    count: Count | float | None
    """What this rank's mean is divided by; `None` for a sum."""
    factor: Factor = 0.0
    """Factor in the loss."""
    root: torch.Tensor | None = None
    """For a pair: the sum, 0-dim, with its graph."""


@dataclass
class Reading:
    """A loss, as the sum of its terms and of constants."""

    terms: list[Term] = field(default_factory=list)
    """In the order of the graph."""
    constant: Factor = 0.0
    """What is added to the terms."""
    factors: list[torch.Tensor] = field(default_factory=list)
    """0-dim factors below the terms, which must be equal on all ranks."""
    is_ambiguous: bool = False
    """True if this rank's one item does not show which dims hold rows."""
    has_graph: bool = True
    """False for pairs whose sums on this rank depend on no trainable parameter."""
    gave_gradient: bool = False
    """True if a tensor without a graph got one, so that the loss can be read."""

    def signature(self) -> str:
        """Return a text that is the same on every rank."""
        listed = [f"{term.name} x {_text(term.factor)}" for term in self.terms]
        inside = [_text(_number(factor)) for factor in self.factors]
        graph = " (no graph)" if self.gave_gradient else ""  # or some ranks would wait in their backward
        return " + ".join(listed) + (f" (inside: {', '.join(inside)})" if inside else "") + graph


def _text(factor: Factor) -> str:
    return "a tensor" if isinstance(factor, torch.Tensor) else f"{factor:.10g}"


def _number(value: Any) -> Factor:
    """Return a number, without a wait for a device; a 0-dim tensor on an accelerator is returned as it is."""
    if isinstance(value, torch.Tensor) and value.device.type != "cpu":
        return value.detach().double().reshape(())
    return float(value)


class GraphReader:
    """Reads one loss.

    Args:
        recorder: What was noted while the loss was computed.
        rows: The check of what is below the terms.
        own_terms: Node → name and value of what the model adds to its loss and returns beside it, such as the balancing
            loss of a mixture of experts, and its count.
    """

    def __init__(self, recorder: Recorder, rows: RowCheck, own_terms: Mapping[Node, Term]) -> None:
        self._recorder = recorder
        self._rows = rows
        self._own_terms = own_terms
        self._found: dict[Node, Term] = {}
        self._constant: Factor = 0.0

    def read(self, loss: torch.Tensor) -> Reading:
        """Return the terms of a loss.

        Args:
            loss: One element, with its graph.

        Raises:
            UnreadableLossError: It is not a linear combination of known terms.
        """
        self._walk(edge_of(loss), 1.0)
        terms = list(self._found.values())
        self._complete(loss, terms)
        factors, is_ambiguous = self._rows.factors, self._rows.is_ambiguous
        return Reading(terms, self._constant, factors, is_ambiguous, gave_gradient=self._recorder.gave_gradient)

    def _complete(self, loss: torch.Tensor, terms: list[Term]) -> None:
        """Compute the value of a mean that was taken inside a function of torch's, from that of the loss."""
        unknown = [term for term in terms if term.value is None]
        if not unknown:
            return
        if len(unknown) > 1 or unknown[0].factor == 0 or any(term.is_total for term in terms):
            raise refuse("a mean is taken where it cannot be seen")
        rest = sum((term.factor * term.value for term in terms if term.value is not None), self._constant)
        unknown[0].value = (loss.detach().reshape(()).double() - rest) / unknown[0].factor

    def _walk(self, edge: Edge, factor: Factor) -> None:
        node, kind = edge[0], kind_of(edge[0])
        if node in self._recorder.reductions:
            self._add_reduction(node, factor)
        elif node in self._own_terms:
            self._add(node, self._own_terms[node], factor)
        elif kind in SAME_ELEMENTS:
            self._walk_all(node, factor)
        elif kind == "Neg":
            self._walk_all(node, -factor)
        elif kind in ("Add", "Sub", "Rsub"):
            self._walk_sum(node, kind, factor)
        elif kind in ("Mul", "Div"):
            self._walk_product(node, factor)
        elif kind in ("Mean", "Sum") and _size_before(node) == ():
            self._walk_all(node, factor)
        elif kind in ("Mean", "Sum") and _joins_scalars(node):
            for part in node.next_functions[0][0].next_functions:
                self._walk(part, factor / math.prod(_size_before(node)) if kind == "Mean" else factor)
        elif kind == "Mean" and math.prod(shape_of(*edge)) == 1:
            self._add_mean(node, factor)
        else:
            raise refuse(_what(node, kind))

    def _walk_all(self, node: Node, factor: Factor) -> None:
        for child, output in node.next_functions:
            if child is not None:
                if math.prod(shape_of(child, output)) != 1:
                    raise refuse(f"{node.name()} takes one element of several")
                self._walk((child, output), factor)

    def _walk_sum(self, node: Node, kind: str, factor: Factor) -> None:
        alpha = saved(node, "alpha")
        signs = {"Add": (1, alpha), "Sub": (1, -alpha), "Rsub": (-alpha, 1)}[kind]
        for (child, output), sign in zip(node.next_functions, signs, strict=False):
            if child is not None:
                self._walk((child, output), factor * sign)
        if len(node.next_functions) < 2 or any(child is None for child, _ in node.next_functions):
            added, own = self._constant_of(node, signs), self._own_terms.get(None)
            if own is None:
                self._constant = self._constant + factor * added
            else:  # it is in the loss with a factor of the model's
                self._add(node, replace(own, value=torch.as_tensor(added)), factor)

    def _constant_of(self, node: Node, signs: tuple[Any, Any]) -> Factor:
        """Return what a node adds to its operand with a gradient."""
        name, operands = self._recorder.operands.get(node, ("", ()))
        if len(operands) != 2 or name not in ADDITIONS:
            raise refuse(f"{node.name()} adds something without gradient that cannot be seen")
        place = 0 if has_gradient(operands[1]) else 1
        sign: float = signs[1] if place else signs[0]
        return _number(operands[place]) * sign

    def _walk_product(self, node: Node, factor: Factor) -> None:
        (one, number_one), (other, number_other) = node.next_functions
        if one is not None and other is not None:
            raise refuse(f"{node.name()} is not linear: both operands have a gradient")
        if one is None and kind_of(node) == "Div":
            raise refuse(f"{node.name()} is not linear: it divides by what has a gradient")
        constant = saved(node, "other" if other is None else "self")
        if math.prod(constant.shape) != 1:
            raise refuse(f"{node.name()}, by a tensor of shape {tuple(constant.shape)}")
        number = _number(constant)
        if kind_of(node) == "Div":
            number = 1 / number if isinstance(number, torch.Tensor) or number else math.inf
        self._walk((one, number_one) if other is None else (other, number_other), factor * number)
        if node in self._recorder.with_mixed:
            raise refuse(f"{node.name()}, by a number that the loss function made by combining this rank's rows")
        _, operands = self._recorder.operands.get(node, ("", ()))
        if any(isinstance(item, torch.Tensor) and not item.is_floating_point() for item in operands):
            raise refuse(f"{node.name()}, by a tensor of whole numbers, which may be a count")

    def _add_reduction(self, node: Node, factor: Factor) -> None:
        reduction = self._recorder.reductions[node]
        if reduction.problem:
            raise refuse(reduction.problem)
        if reduction.value is None or math.prod(reduction.value.shape) != 1:
            raise refuse(f"{reduction.name} gives a loss for each row, of which one is taken")
        if node not in self._found:
            self._rows.check(reduction)
        is_total = reduction.total is not None or reduction.count is None
        at, value = reduction.total or node, reduction.value.reshape(())
        self._add(node, Term(reduction.name, at, value, is_total, reduction.count), factor)

    def _add_mean(self, node: Node, factor: Factor) -> None:
        value, in_model = self._recorder.means.get(node, (None, False))
        if node not in self._found:
            self._rows.of(node.next_functions[0], in_model=in_model)
        self._add(node, Term("mean", node, value, False, math.prod(_size_before(node))), factor)

    def _add(self, node: Node, term: Term, factor: Factor) -> None:
        term = self._found.setdefault(node, term)
        term.factor = term.factor + factor


def _joins_scalars(node: Node) -> bool:
    """Return True for the sum or mean of a `stack` or `cat` of 0-dim tensors; not of rows, if there is one alone."""
    child = node.next_functions[0][0]
    if child is None or kind_of(child) not in ("Stack", "Cat"):
        return False
    return all(part is not None and _is_scalar(part, output) for part, output in child.next_functions)


def _is_scalar(node: Node, output: int) -> bool:
    shape = shape_of(node, output)
    is_view = shape == (1,) and kind_of(node) in ("View", "ReshapeAlias", "Unsqueeze")
    return shape == () or (is_view and shape_of(*node.next_functions[0]) == ())


def _size_before(node: Node) -> tuple[int, ...]:
    return tuple(saved(node, "self_sym_sizes"))


def _what(node: Node, kind: str) -> str:
    if kind == "Sum":
        return f"{node.name()} is a sum, and whether it is then divided by a count nobody can tell"
    if kind == "torch::autograd::AccumulateGrad":
        return "a parameter is added to the loss as it is"
    return f"{node.name()} is neither a mean nor a linear combination of means"
