"""`Evaluation`: loss and metrics over data, without gradients, equal to those of one process on the same rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import nn

from raysharding.batch import RankBatch
from raysharding.distributed.comm import agreeing, current_group, metadata_device, to_host
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

Metric: TypeAlias = Callable[..., Any]
"""`metric(output, ...)`: takes the arguments of the batch that it names, as a loss does, and returns (sum, count). The
metric over all rows is the sum of the sums divided by the sum of the counts."""


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
        functions = [*plan.metrics.values(), *([plan.loss] if plan.loss else [])]
        known = None
        if module is not None:
            reshard(unwrapped(module))  # an earlier call may have left a group inside a forward
            known = known_arguments(module, functions)
        self.data_loader = DistributedDataLoader(plan.data, device, bounds=bounds, known=known)
        self._loss = Accumulation()
        # Sum and count of each metric, then rows: summed on each rank, and over the ranks by `values`.
        self._sums = torch.zeros(2 * len(plan.metrics) + 1, dtype=torch.float64)

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
        for index, name in enumerate(self._plan.metrics):
            total, count = found[2 * index : 2 * index + 2]
            values[name] = total / count if count else float("nan")
        return {**values, "num_rows": found[-1]}

    def _add(self, output: Any, batch: RankBatch) -> None:
        for index, (name, metric) in enumerate(self._plan.metrics.items()):
            found: Any = call_on_output(metric, output, batch.args, batch.kwargs)
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
