"""One loss for the whole batch: each rank's loss becomes its share of the loss of one process.

A loss is a sum of terms, `factor * N / D` on each rank: D is what torch divides by, or a count that the caller returns.
The loss of the whole batch is the sum over the terms of `factor * sum(N) / sum(D)`, over ranks and accumulated parts.
Terms and D are read anew in every call. Kept is only which models' own losses cannot be read, and go by their labels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary
from zlib import crc32

import torch
import torch.distributed as dist
from torch import nn

from raysharding.batch import RankBatch
from raysharding.distributed.comm import HostCopy, all_gather_ints, all_gather_json, current_group, get_rank, to_host
from raysharding.distributed.fully_shard import compute_device, move_inputs, reshard, warn_once, without_trace
from raysharding.distributed.training.losses.calls import (
    LossFunction,
    Recorded,
    call_model,
    is_compiled,
    loss_of,
    positions_of,
    run_recorded,
    takes,
)
from raysharding.distributed.training.losses.graph import GraphReader, Reading, Term
from raysharding.distributed.training.losses.rows import RowCheck, refuse
from raysharding.errors import UnreadableLossError
from raysharding.models import is_transformers_model
from raysharding.tree import leaves

_OWN_TERMS = ("aux_loss", "z_loss")
"""Ends of the names under which mixtures of experts return what they add to their loss."""
_ROUTER_FACTORS = tuple(f"{name}_coef" for name in _OWN_TERMS)
"""Ends of the options by which they multiply it."""
_COUNT = "num_items_in_batch"
"""Argument of transformers' models: what they divide the sum over the labels by."""
_IGNORED_LABEL, _IGNORED_PIXEL = -100, 255
_SHIFTED = ("ForCausalLM", "ForConditionalGeneration")
"""Values of transformers' `loss_type` by which labels are shifted by one position."""


@dataclass(frozen=True, eq=False)
class BatchLoss:
    """The loss of one call, over all ranks. The tensors are fp64, on the module's device, the same on every rank."""

    output: Any
    """The model's output on this rank; `None` where a backward follows, which needs the memory."""
    names: tuple[str, ...]
    """Names of the terms, the same on every rank."""
    is_sum: torch.Tensor
    """Bool, one a term: True for a sum, which has no count."""
    counts: torch.Tensor
    """D over all ranks, one a term; 0 for a sum."""
    numbers: HostCopy
    """fp64: whether factors or constants differ over the ranks, then for each term `is_sum`, N over all ranks, `counts`
    and its factor, then what is added to the terms. Queued before a backward, which runs while the host waits for it.
    """
    roots: tuple[torch.Tensor, ...]
    """What backward starts from: the loss, or the sums of the pairs."""
    terms: tuple[Term, ...]
    """This rank's terms."""
    shares: torch.Tensor
    """This rank's D of means; for pairs and sums 1, or 0 where nothing counts."""
    outputs: tuple[torch.Tensor, ...]
    """Outputs of the model that have a graph, if the roots have none."""
    may_lack_graph: bool
    """True if backward may reach no parameter: of rows of text, where only a vision tower is trained."""

    @property
    def has_several_counts(self) -> bool:
        """True if the ratio of the terms' counts may differ between batches."""
        return len(self.terms) > 1 and any(term.count is not None for term in self.terms)

    def backward(self, scales: torch.Tensor) -> None:
        """Run backward of this rank's loss; collective.

        Args:
            scales: One a term: what the gradient of this rank's N / D, times D, is multiplied by.
        """
        scales = torch.where(self.shares != 0, scales * self.shares, 0.0)
        if self.terms[0].root is not None:
            pairs = zip(self.roots, scales, strict=True)
            alive = [(one, scale.to(one.dtype).reshape(one.shape)) for one, scale in pairs if one.requires_grad]
            # Without a root of its own, a rank takes part in the collectives of the others' backward.
            alive += [(output, torch.zeros_like(output)) for output in self.outputs]
            torch.autograd.backward([root for root, _ in alive], [gradient for _, gradient in alive])
            return
        for term, scale in zip(self.terms, scales, strict=True):
            if term.node is not None:  # else what the model adds has no graph
                gradient = term.factor * scale if term.is_total else None
                term.node.register_prehook(partial(_scaled, scale, gradient))
        torch.autograd.backward(self.roots)


def _scaled(scale: torch.Tensor, gradient: torch.Tensor | None, gradients: Sequence[Any]) -> tuple[torch.Tensor]:
    """Hook of a node: its result's gradient, scaled, or another in its place, where that was divided by 0."""
    (one,) = gradients
    scaled = one * scale.to(one.dtype) if gradient is None else gradient.to(one.device, one.dtype).expand_as(one)
    return (scaled,)


def loss_of_batch(
    module: nn.Module, batch: RankBatch, loss: LossFunction | None = None, *, with_backward: bool = True
) -> BatchLoss:
    """Run the forward and read the loss of the batch.

    Collective: each rank passes its part of one call, in the same mode. Wire: FSDP's own traffic, and two all-reduces
    of a few numbers for each term. A loss that is read costs no second forward.

    Args:
        module: The sharded root module.
        batch: This rank's part of the call, on any device.
        loss: `None` for the output's `.loss`; or a function of the output, and of the arguments of the call that it
            names. It returns

            - a scalar: a linear combination of means that torch states: `cross_entropy`, `mse_loss` and torch's other
              loss functions with `reduction="mean"`, and `mean()` over all elements of what keeps rows apart;
            - `(sum, count)`: the loss is the sum of the sums divided by the sum of the counts, over ranks and parts;
            - a list of such pairs, for several terms with counts of their own;
            - `(sum, None)` for a sum.

            Sums are over this rank's rows. What a rank normalises by itself stays its own: weights that are divided by
            their sum over these rows differ from those of one process.
        with_backward: False where no backward follows: no activations are kept.

    Returns:
        The loss.

    Raises:
        ValueError: On every rank, if a rank has no loss, its loss cannot be read (`UnreadableLossError`), the ranks
            read different terms, or the caller passes `num_items_in_batch`.
    """
    # A sharded root moves the arguments of its forward, but not labels that only the loss function takes.
    device = compute_device(module)
    batch = batch.replaced(lambda value: move_inputs(value, device))
    if loss is None and (module in _counting or (is_compiled(module) and takes(module, _COUNT))):
        return _by_label_counts(module, batch, with_backward)
    # The forward is held in one frame alone, which may have to drop it.
    return _of_recorded(module, batch, _recorded(module, batch, loss, with_backward=with_backward), loss, with_backward)


def forward_with_loss(module: nn.Module, batch: RankBatch) -> tuple[Any, BatchLoss | None]:
    """Run a forward without a backward; return the output, and the loss of the batch if the model has one; collective.

    Args:
        module: The sharded root module.
        batch: This rank's part of the call, on the module's device.

    """
    recorded = _recorded(module, batch, None, with_backward=False)
    if recorded.result is None:
        return recorded.output, None
    try:
        found = _of_recorded(module, batch, recorded, None, with_backward=False)
    except UnreadableLossError as error:
        warn_once(f"{error}. The output's loss is each rank's own, as PerRank")
        return recorded.output, None
    return found.output, found


def _recorded(module: nn.Module, batch: RankBatch, loss: LossFunction | None, *, with_backward: bool) -> Recorded:
    follows_data = batch.split_dims() <= {0}
    return run_recorded(module, batch.args, batch.kwargs, loss, with_backward=with_backward, follows_data=follows_data)


def _of_recorded(
    module: nn.Module, batch: RankBatch, recorded: Recorded, loss: LossFunction | None, with_backward: bool
) -> BatchLoss:
    if recorded.result is None:
        loss_of(recorded.output)  # raises
    reading, refusal = _read(module, recorded, batch, loss)
    refusal = _agree(module, batch, loss, reading, refusal or _check_collectives(recorded, batch))
    if not refusal:
        return _over_ranks(recorded, batch, reading, compute_device(module))
    del recorded, reading  # and its activations
    return _by_label_counts(module, batch, with_backward, refusal)


def _read(module: nn.Module, recorded: Recorded, batch: RankBatch, loss: LossFunction | None) -> tuple[Reading, str]:
    """Return the terms of this rank's loss, and why it cannot be read; an empty text if it can."""
    result = recorded.result
    assert result is not None
    try:
        dims = batch.split_dims()
        rows = RowCheck(recorded.recorder, recorded.outputs(), batch.num_held, batch.rows_per_item, dims)
        if isinstance(result, list):
            terms = [
                Term(f"{'sum' if count is None else 'pair'} {index}", None, total.detach(), True, count, 1.0, total)
                for index, (total, count) in enumerate(result)
            ]
            with_graph = [total for total, _ in result if total.requires_grad]
            for total in with_graph if not recorded.has_collectives else ():
                rows.check_pair(total)
            has_graph = bool(with_graph)
            return Reading(terms, has_graph=has_graph, gave_gradient=recorded.recorder.gave_gradient), ""
        if not result.requires_grad:
            raise refuse("it has no graph: no trainable parameter, and no output, has a part in it")
        if recorded.recorder.took_number:
            raise refuse("it takes a number (item(), tolist(), numpy()) of a tensor that combines this rank's rows")
        own = _own_terms(recorded, batch) if loss is None and _has_router(module) else {}
        return GraphReader(recorded.recorder, rows, own).read(result), ""
    except UnreadableLossError as error:
        return Reading(), str(error)
    except RecursionError:
        return Reading(), str(refuse("its graph is too deep"))


def _check_collectives(recorded: Recorded, batch: RankBatch) -> str:
    """Return an error's text if the loss function gathers over the ranks, and one has no rows; else an empty text."""
    if not recorded.has_collectives or all(batch.rows):
        return ""
    empty = ", ".join(str(rank) for rank, rows in enumerate(batch.rows) if not rows)
    return f"the loss function runs a collective, and rank {empty} has no rows, but a dummy: give every rank an item"


def _has_router(module: nn.Module) -> bool:
    """Return True for a model of transformers with factors of balancing losses."""
    if not is_transformers_model(module):
        return False
    config: Any = module.config
    parts = [one for one in (config, *vars(config).values()) if hasattr(one, "to_dict")]  # of the text, in some
    return any(name.endswith(_ROUTER_FACTORS) for part in parts for name in vars(part))


def _own_terms(recorded: Recorded, batch: RankBatch) -> dict[Any, Term]:
    """Return what a model adds to its loss and returns beside it: each rank's own, averaged by its tokens.

    The key is its node; `None` where blocks ran without a graph.
    """
    ids = batch.kwargs.get("input_ids")
    count = ids.numel() if isinstance(ids, torch.Tensor) else batch.num_rows or 1
    return {
        leaf.grad_fn: Term(path, leaf.grad_fn, leaf.detach().reshape(()), False, count)
        for path, leaf in leaves(recorded.output)
        if isinstance(leaf, torch.Tensor) and leaf.numel() == 1 and path.rstrip("']").endswith(_OWN_TERMS)
    }


def _agree(module: nn.Module, batch: RankBatch, loss: LossFunction | None, reading: Reading, refusal: str) -> str:
    """Return an empty text if every rank has read the same terms; else why not, if labels may be counted; collective.

    Raises:
        ValueError: On every rank.
    """
    text = refusal or reading.signature()
    # Before numbers are summed: ranks with other terms would add up what does not belong together, or hang.
    may_count = loss is None and takes(module, _COUNT)
    has_graph = reading.has_graph or bool(refusal)
    facts = [crc32(text.encode()), bool(refusal), _has_count(module, batch), may_count, reading.is_ambiguous, has_graph]
    rows = all_gather_ints([int(fact) for fact in facts])
    _refuse_count(any(row[2] for row in rows))
    if any(row[1] for row in rows):
        first: str = next(filter(None, all_gather_json(refusal)))
        if all(row[3] for row in rows):
            return first
        raise UnreadableLossError(first)
    if not any(row[5] for row in rows):
        raise refuse("no rank's loss has a graph: no trainable parameter has a part in it")
    with_rows = [row for row, num_rows in zip(rows, batch.rows or (1,) * len(rows), strict=True) if num_rows]
    if len(rows) > 1 and all(row[4] for row in with_rows):
        raise refuse(
            "every rank has one row, so it cannot be told which dims hold rows after a reshape or a broadcast: use "
            "unsqueeze and squeeze with a dim, and tensors of as many dims"
        )
    if len({row[0] for row in rows}) > 1:
        listed = "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(all_gather_json(text)))
        raise ValueError(f"the ranks' losses have different terms ({listed}): return the same terms on every rank")
    return ""


def _refuse_count(is_given: bool) -> None:
    if is_given:
        raise ValueError("num_items_in_batch is computed by raysharding over all ranks; leave it out of the call")


def _over_ranks(recorded: Recorded, batch: RankBatch, reading: Reading, device: torch.device) -> BatchLoss:
    """Sum what this rank has read over all ranks; collective."""
    terms, num_terms, world_size = reading.terms, len(reading.terms), dist.get_world_size(current_group())
    mine = _vector([0.0 if batch.is_dummy or term.count is None else term.count for term in terms], device)
    is_sum = _vector([term.count is None for term in terms], device) > 0
    is_total = _vector([term.is_total for term in terms], device) > 0
    values = _vector([term.value for term in terms], device)
    # A sum of what does not count may still be a number; a dummy row, and the NaN of a mean over nothing, add nothing.
    adds = torch.where(is_total, is_sum | (mine != 0) | values.isfinite(), mine != 0) & (not batch.is_dummy)
    shares = torch.where(adds, torch.where(is_total, 1.0, mine), 0.0)
    if batch.is_replicated:  # a sum counts once; that of a mean is divided by as many counts
        shares = torch.where(is_sum, shares / world_size, shares)
    sums = torch.where(adds, values * shares, 0.0)
    fixed = _vector([*(term.factor for term in terms), reading.constant, *reading.factors], device)
    table = torch.zeros(world_size, 2 * num_terms + len(fixed), dtype=torch.float64, device=device)
    table[get_rank()] = torch.cat([sums, mine, fixed])
    # Every rank calls this, ranks without rows too: the others would wait in the all-reduce. Each fills its own row.
    dist.all_reduce(table, group=current_group())
    roots = tuple(term.root for term in terms if term.root is not None)
    if not roots and isinstance(recorded.result, torch.Tensor):
        roots = (recorded.result,)
    has_roots = any(root.requires_grad for root in roots)
    outputs = () if has_roots else tuple(recorded.outputs())
    # A dummy row has factors of its own, and does not count.
    counting = batch.rows if any(batch.rows) else (1,) * len(table)
    fixed_of = [row[2 * num_terms :] for row, rows in zip(table, counting, strict=True) if rows]
    sums, counts = table[:, : 2 * num_terms].sum(0).split(num_terms)
    differs = (torch.stack(fixed_of) != fixed_of[0]).any()
    return BatchLoss(
        output=None if recorded.with_backward else recorded.output,
        names=tuple(term.name for term in terms),
        is_sum=is_sum,
        counts=counts,
        numbers=HostCopy(torch.cat([differs[None], is_sum, sums, counts, fixed_of[0][: num_terms + 1]])),
        roots=roots,
        terms=tuple(terms),
        shares=shares,
        outputs=outputs,
        may_lack_graph=recorded.recorder.gave_gradient or not (has_roots or outputs),
    )


def _vector(values: Sequence[Any], device: torch.device) -> torch.Tensor:
    """Return numbers and 0-dim tensors as one fp64 tensor, without a wait for the device."""
    parts = [
        value.detach().to(device, torch.float64, non_blocking=True).reshape(())
        if isinstance(value, torch.Tensor)
        else torch.full((), value, dtype=torch.float64, device=device)  # a copy from the host would wait
        for value in values
    ]
    return torch.stack(parts)


_counting: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()
"""Models whose own loss cannot be read, but divides by `num_items_in_batch` → True once it was seen which labels count.

Both are properties of the model's code. The second is seen in a batch in which shifted labels are of another number."""
_TOLERANCE = 1e-3
"""Relative, of the labels that a loss is a mean over, computed from two of its values."""


def _has_count(module: nn.Module, batch: RankBatch) -> bool:
    """Return True if the caller passed `num_items_in_batch`."""
    return _argument(module, _COUNT, batch.wrapped_args, batch.wrapped_kwargs) is not None


def _argument(module: nn.Module, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return an argument of a call of the module, given by position or by name; `None` if it is not given."""
    given = positions_of(module)[: len(args)]
    return args[given.index(name)] if name in given else kwargs.get(name)


def _count_labels(module: nn.Module, batch: RankBatch) -> tuple[int, int] | None:
    """Return how many labels of this rank's rows count, 0 for a dummy; `None` without integer labels. Not collective.

    First by the rule of the model's loss, then by the other one: shifted, if the first is not, and vice versa. Equal
    counts show nothing of the rule.
    """
    labels = _argument(module, "labels", batch.args, batch.kwargs)
    if not isinstance(labels, torch.Tensor) or labels.is_floating_point() or not labels.ndim:
        return None
    if batch.is_dummy:
        return 0, 0
    kind = str(getattr(module, "loss_type", "") or "")
    counted = labels != (_IGNORED_PIXEL if kind == "ForSemanticSegmentation" else _IGNORED_LABEL)
    position_dim = 0 if batch.dim == 1 and labels.ndim == 2 else -1
    shifted = counted.movedim(position_dim, 0)[1:] if labels.ndim > 1 else counted
    plain, after = torch.stack([counted.sum(), shifted.sum()]).tolist()  # one transfer from the device
    return (after, plain) if kind in _SHIFTED else (plain, after)


def _by_label_counts(module: nn.Module, batch: RankBatch, with_backward: bool, refusal: str = "") -> BatchLoss:
    """Return the loss of a model that divides by `num_items_in_batch`: a sum over labels; collective.

    Args:
        module: The sharded root module.
        batch: This rank's part of the call, on the module's device.
        with_backward: False where no backward follows.
        refusal: Why the loss cannot be read, if that was tried.
    """
    counts = _count_labels(module, batch)
    own = [0, 0, 0] if counts is None else [1, *counts]
    rows = all_gather_ints([*own, int(_has_count(module, batch))])
    _refuse_count(any(row[3] for row in rows))
    if not all(row[0] for row in rows):
        raise _uncountable("the call has no integer labels to count", refusal)
    assert counts is not None
    total = max(sum(row[1] for row in rows), 1)
    shows_rule = any(row[1] and row[1] != row[2] for row in rows)
    if module not in _counting or (shows_rule and not _counting[module]):
        reshard(module)  # a forward without a backward has left full parameters registered
        if not _divides_by(module, batch, counts, total + 1):
            raise _uncountable("does not divide by num_items_in_batch as its loss_type says", refusal)
        _counting[module] = shows_rule
    kwargs = {**batch.kwargs, _COUNT: total}
    recorded = run_recorded(module, batch.args, kwargs, None, with_backward=with_backward)
    sum_ = loss_of(recorded.output) * total
    term = Term("labels", None, sum_.detach(), True, counts[0], 1.0, sum_)
    return _over_ranks(recorded, batch, Reading([term]), compute_device(module))


def _uncountable(why: str, refusal: str) -> UnreadableLossError:
    return UnreadableLossError(refusal) if refusal else refuse(f"the model gives no terms, and {why}")


def _divides_by(module: nn.Module, batch: RankBatch, counts: tuple[int, int], divisor: int) -> bool:
    """Compare a model's loss by its own mean with its sum over any divisor: the quotient is what the mean is over.

    Collective: two forwards without a graph, in eval mode.

    Returns:
        True if that is the number of labels that are counted, on every rank.
    """
    with without_trace(module):
        mean = loss_of(call_model(module, batch.args, batch.kwargs))
        by_divisor = loss_of(call_model(module, batch.args, {**batch.kwargs, _COUNT: divisor}))
    found, (counted, other) = float(to_host(by_divisor / mean)) * divisor, counts
    error = abs(found - counted)
    is_other = other != counted and abs(found - other) <= error
    fits = not counted or (error <= _TOLERANCE * counted and not is_other)
    return all(one for (one,) in all_gather_ints([fits]))
