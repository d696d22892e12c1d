"""`Evaluation`: loss and metrics over data, without gradients, equal to those of one process on the same rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import nn

from raysharding.batch import RankBatch
from raysharding.distributed.comm import (
    agreeing,
    all_gather_json,
    broadcast_tensor,
    current_group,
    from_rank_0,
    get_rank,
    metadata_device,
    to_host,
    using_group,
)
from raysharding.distributed.fully_shard import module_mode, over_ranks_of, recovering, reshard, unwrapped
from raysharding.distributed.training.data_loader import DataPlan, DistributedDataLoader
from raysharding.distributed.training.forward import naming
from raysharding.distributed.training.losses import (
    LossFunction,
    call_model,
    call_on_output,
    known_arguments,
    loss_of_batch,
)
from raysharding.distributed.training.step import Accumulation
from raysharding.errors import DataError
from raysharding.models import InputBounds
from raysharding.tree import map_leaves

Metric: TypeAlias = Callable[..., Any] | tuple[Callable[..., Any], Callable[..., Any]]
"""`metric(output, ...)`: takes the arguments of the batch that it names, as a loss does, and returns (sum, count). The
metric over all rows is the sum of the sums divided by the sum of the counts.

Or a pair `(values, compute)`, for what is no such sum: `values(output, ...)` returns a tensor, or a tuple of tensors,
with its rows in the first dim; `compute(*values)` returns the metric, given those of all batches in their order."""


@dataclass(frozen=True)
class EvaluationPlan:
    """Options of an evaluation. Picklable; the same on every rank."""

    data: DataPlan
    """The data."""
    loss: LossFunction | None = None
    """Function of the output; `None` for the output's `.loss`."""
    with_loss: bool = True
    """True to compute the loss."""
    metrics: Mapping[str, Metric] = field(default_factory=dict)
    """Name → metric."""
    summon_full_params: bool | None = None
    """See `Sharding.summon_full_params`."""


class Evaluation:
    """An evaluation. Every rank makes one with the same plan, and takes the same steps."""

    @over_ranks_of("module")
    def __init__(
        self,
        plan: EvaluationPlan,
        device: torch.device,
        bounds: InputBounds | None = None,
        module: nn.Module | None = None,
    ) -> None:
        """Open the data, and free parameters that are gathered; collective. Arguments as for `Fit`."""
        self._plan = plan
        self._group = current_group()
        functions = [one[0] if isinstance(one, tuple) else one for one in plan.metrics.values()]
        functions += [plan.loss] if plan.loss else []
        known = None
        if module is not None:
            reshard(unwrapped(module))  # an earlier call may have left a group inside a forward
            known = known_arguments(module, functions)
        self.data_loader = DistributedDataLoader(plan.data, device, bounds=bounds, known=known)
        self._loss = Accumulation()
        # Sum and count of each metric, then rows: summed on each rank, and over the ranks by `values`.
        self._sums = torch.zeros(2 * len(plan.metrics) + 1, dtype=torch.float64)
        # Metric → if it has two functions, this rank's values, on the CPU: a tuple of tensors for each batch.
        self._kept: dict[str, list[tuple[torch.Tensor, ...]]] = {name: [] for name in plan.metrics}

    @over_ranks_of("module")
    def step(self, module: nn.Module) -> bool:
        """Process one batch; collective.

        Args:
            module: The sharded root module; its modes are restored.

        Returns:
            False if there was no batch left.

        Raises:
            DataError: On every rank: a rank could not make the next batch.
            Exception: On every rank: the error of a metric on one rank.
        """
        passes = self.data_loader.next()
        if passes is None:
            return False
        module = unwrapped(module)
        for kept in self._kept.values():
            kept.append(())
        for batch in passes[0]:
            with recovering(module), torch.no_grad(), module_mode(module, training=False):
                output = self._forward(module, batch)
            with agreeing():
                if not batch.is_dummy:
                    self._add(output, batch)
        self.data_loader.advance()
        return True

    def values(self) -> dict[str, float]:
        """Return `loss`, each metric and `num_rows` of all batches so far; collective. NaN without counted items."""
        sums = self._sums.to(metadata_device(), copy=True)
        # Every rank calls this, ranks without rows with zeros: the others would wait in the all-reduce.
        dist.all_reduce(sums, group=self._group)
        found = to_host(sums).tolist()
        values = {"loss": self._loss.loss()} if self._plan.with_loss else {}
        for index, (name, metric) in enumerate(self._plan.metrics.items()):
            total, count = found[2 * index : 2 * index + 2]
            values[name] = total / count if count else float("nan")
            if isinstance(metric, tuple) and found[-1]:
                with using_group(self._group):
                    values[name] = self._of_all_rows(name, metric[1])
        return {**values, "num_rows": found[-1]}

    def _of_all_rows(self, name: str, compute: Callable[..., Any]) -> float:
        """Return a metric of the values of all rows; collective. Wire: the values of each rank to all others."""
        kept, columns = self._kept[name], list[torch.Tensor]()
        # Every rank calls what follows, without rows too: the others would wait in the all-gather and the broadcasts.
        with agreeing(), naming(f"metrics[{name!r}]"):
            columns = [torch.cat(column) for column in zip(*filter(None, kept), strict=True)]
        kinds = [(str(one.dtype).removeprefix("torch."), list(one.shape)) for one in columns]
        every = all_gather_json([[len(batch[0]) if batch else 0 for batch in kept], kinds])
        if len({str([(dtype, shape[1:]) for dtype, shape in own]) for _, own in every if own}) != 1:
            what = "values have other dtypes or shapes on other ranks"
            raise DataError(f"metrics[{name!r}]: {what}: {[own for _, own in every]}")
        by_rank: list[list[tuple[torch.Tensor, ...]]] = []
        for rank, (lengths, own) in enumerate(every):
            mine = iter(columns if rank == get_rank() else ())
            tensors = (broadcast_tensor(next(mine, None), dtype, shape, rank) for dtype, shape in own)
            by_rank.append([one.cpu().split(lengths) for one in tensors])

        def made() -> float:
            pieces = zip(*filter(None, by_rank), strict=True)  # of each column: by rank, and there by batch
            in_order = [torch.cat([one for batch in zip(*column, strict=True) for one in batch]) for column in pieces]
            with naming(f"metrics[{name!r}]"):
                return float(compute(*in_order))

        return float(from_rank_0(made))

    def _add(self, output: Any, batch: RankBatch) -> None:
        for index, (name, metric) in enumerate(self._plan.metrics.items()):
            first = metric[0] if isinstance(metric, tuple) else metric
            with naming(f"metrics[{name!r}]"):
                found: Any = call_on_output(first, output, batch.args, batch.kwargs)
            if isinstance(metric, tuple):
                self._kept[name][-1] = _rows_of(name, found)
                continue
            if not isinstance(found, tuple) or len(found) != 2:
                what = f"metrics[{name!r}] returned a {type(found).__name__}"
                raise ValueError(f"{what}: return (sum, count) over its rows")
            self._sums[2 * index : 2 * index + 2] += torch.tensor(list(map(float, found)), dtype=torch.float64)
        self._sums[-1] += batch.num_rows or 0

    def _forward(self, module: nn.Module, batch: RankBatch) -> Any:
        """Run the model, record the loss, and return the output."""
        if not self._plan.with_loss:
            return call_model(module, batch.args, batch.kwargs)
        found = loss_of_batch(module, batch, self._plan.loss, with_backward=False)
        self._loss.add(found)
        return map_leaves(lambda _, leaf: leaf.detach() if isinstance(leaf, torch.Tensor) else leaf, found.output)


def _rows_of(name: str, found: Any) -> tuple[torch.Tensor, ...]:
    """Return what the first function of a metric returned as a tuple of tensors on the CPU."""
    made = tuple(torch.as_tensor(one).detach().cpu() for one in (found if isinstance(found, tuple) else (found,)))
    if not made or not all(one.ndim for one in made) or len(set(map(len, made))) != 1:
        shapes = [tuple(one.shape) for one in made]
        raise DataError(
            f"metrics[{name!r}]: its first function returned shapes {shapes}: return rows in dim 0, as many"
        )
    return made
