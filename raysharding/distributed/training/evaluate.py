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
    current_group,
    from_rank_0,
    get_rank,
    get_world_size,
    metadata_device,
    to_host,
)
from raysharding.distributed.fully_shard import module_mode, over_ranks_of, recovering, reshard, unwrapped
from raysharding.distributed.training.data_loader import DataPlan, DistributedDataLoader
from raysharding.distributed.training.losses import (
    LossFunction,
    call_model,
    call_on_output,
    known_arguments,
    loss_of_batch,
)
from raysharding.distributed.training.step import Accumulation
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
        # Metric of two functions → this rank's values, on the CPU: a tuple of tensors for each batch.
        self._kept: dict[str, list[tuple[torch.Tensor, ...]]] = {
            name: [] for name, metric in plan.metrics.items() if isinstance(metric, tuple)
        }

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
                values[name] = self._of_all_rows(self._kept[name], metric[1])
        return {**values, "num_rows": found[-1]}

    def _of_all_rows(self, kept: list[tuple[torch.Tensor, ...]], compute: Callable[..., Any]) -> float:
        """Return a metric of the values of all rows; collective: rank 0 gets them all."""
        by_rank: list[Any] | None = [None] * get_world_size() if get_rank() == 0 else None
        # Every rank calls this, without rows too: rank 0 would wait for it.
        dist.gather_object(kept, by_rank, group=self._group, group_dst=0)

        def made() -> float:
            in_order = [one for batch in zip(*(by_rank or []), strict=True) for one in batch if one]
            return float(compute(*map(torch.cat, zip(*in_order, strict=True))))

        found: float = from_rank_0(made)
        return found

    def _add(self, output: Any, batch: RankBatch) -> None:
        for index, (name, metric) in enumerate(self._plan.metrics.items()):
            first = metric[0] if isinstance(metric, tuple) else metric
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
    if not made or not all(one.ndim for one in made):
        raise ValueError(f"metrics[{name!r}]: its first function returned a value without rows; return them in dim 0")
    return made
