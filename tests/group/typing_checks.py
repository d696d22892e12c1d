"""What mypy sees of a group's methods: checked by the `mypy` of `tests/run.sh`, and never run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, assert_type

import torch

from raysharding import Call, FitReport, LoadReport, Out, SaveReport, ShardedModelGroup
from raysharding.group.launch import RestartReport

if TYPE_CHECKING:

    def results(group: ShardedModelGroup) -> None:
        assert_type(group.forward(1, mode="eval", out=Out.rank0()), Any)
        assert_type(group.train_step(1, max_grad_norm=1.0), dict[str, float])
        assert_type(group.optim_step(), dict[str, float])
        assert_type(group.clip_grad_norm_(1.0), float)
        assert_type(group.evaluate([], batch_size=2, rows_per_item=2), dict[str, float])
        assert_type(group.fit([], batch_size=2, rows_per_item=2), FitReport)
        assert_type(group.save("path"), SaveReport | None)
        assert_type(group.load("path"), LoadReport)
        assert_type(group.state_dict(), dict[str, torch.Tensor])
        assert_type(group.restart(), RestartReport)

    def calls(group: ShardedModelGroup) -> None:
        assert_type(group.train_step.remote(1), Call[dict[str, float]])
        assert_type(group.train_step.remote(1).result(timeout_s=1.0), dict[str, float])
        assert_type(group.fit.remote([], batch_size=1), Call[FitReport])
        assert_type(group.shutdown.remote(), Call[None])

    async def awaited(group: ShardedModelGroup) -> None:
        assert_type(await group.state_dict.remote(), dict[str, torch.Tensor])

    def of_the_class(group: ShardedModelGroup) -> None:
        assert_type(ShardedModelGroup.state_dict(group, keys="a"), dict[str, torch.Tensor])

    def refused(group: ShardedModelGroup) -> None:
        group.fit([], batchsize=1)  # type: ignore[call-arg]
        group.fit([], batch_size=2, rows_per_item="2")  # type: ignore[arg-type]
        group.save.remote(path=1)  # type: ignore[arg-type]
        group.forward(out="rank0")  # type: ignore[arg-type]
