"""`Training`: the calls that change a group's model: passes, updates, the optimizer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from raysharding.batch import RankBatch, by_name, check_num_parts, deal
from raysharding.distributed.gradients import check_norm
from raysharding.distributed.schedules import Schedule, bound, check_schedule, rescheduled
from raysharding.distributed.training import check_max_grad_norm
from raysharding.group.admission import check_batches
from raysharding.group.call import Call
from raysharding.group.checks import check_optimizer
from raysharding.group.commands import Mode
from raysharding.group.handle import blocking, handle
from raysharding.group.results import collect_rank0
from raysharding.group.storing import Storing
from raysharding.worker import check_mode


class Training(Storing):
    """What `ShardedModelGroup` trains with."""

    @handle
    def train_step(
        self,
        /,
        *args: Any,
        loss: Callable[..., Any] | None = None,
        max_grad_norm: float | None = None,
        mode: Mode = None,
        gradient_accumulation_steps: int = 1,
        **kwargs: Any,
    ) -> Call:
        """Take one optimizer step on a batch: the step that one process would take on the same rows.

        Args:
            *args: The model's arguments, as for `forward`.
            loss: `loss(output, *args, **kwargs)` → a mean, or (sum, count). Default: the output's own `.loss`. To find
                out what it adds up by, the first step also runs it on parts of the batch and on labels that the batch
                does not have: masked by -100 (maps: by 255), or of one of its classes. No weights change then.
            max_grad_norm: Clip gradients to this global norm. Default: no clipping.
            mode: `"eval"` trains with the modules in eval mode: no drop-out, BatchNorm's stored statistics. Default
                train.
            gradient_accumulation_steps: Parts that each rank takes its rows in, one after the other, for less memory;
                the update is that of all rows at once, and gradients are reduced once. Between the parts each rank
                holds full, unsharded gradients. Default 1.
            **kwargs: As `args`.

        Returns:
            `{"loss": float, "grad_norm": float}`; `grad_norm` is the norm before clipping.

        Raises:
            EmptyBatchError: Nothing counts in the batch, so no update was taken; `fit` skips such a batch. The group is
                READY.
            GroupError: The model or the loss raised, or the loss is NaN or infinite in the first step with it.
            ValueError: No optimizer is set, the batch is not valid, or a bad `mode` or number. After a `call`, whose
                function may have set the optimizer, only the ranks know whether there is one: then a `GroupError` says
                so.
        """
        self._require_optimizer("train_step")
        check_mode(mode, default="train")
        check_max_grad_norm(max_grad_norm)
        batches = self._deal("train_step", args, kwargs)
        check_num_parts(gradient_accumulation_steps, batches[0].num_rows)
        extra = (loss, max_grad_norm, mode, gradient_accumulation_steps)
        options: dict[str, Any] = {"collect": collect_rank0, "check": self._unless_fit("train_step")}
        return self._channel.submit_batches("train_step", batches, *extra, **options).keep_alive(self)

    @handle
    def forward_backward(
        self,
        /,
        *args: Any,
        loss: Callable[..., Any] | None = None,
        mode: Mode = None,
        sync: bool = True,
        **kwargs: Any,
    ) -> Call:
        """Add a batch's gradients to those since the last update.

        The update that `optim_step` takes then is that of one process on the rows of all these batches at once, each
        weighed by what counts in it. The first call after an update drops the gradients of before.

        Args:
            *args: The model's arguments, as for `forward`.
            loss: As for `train_step`.
            mode: As for `train_step`.
            sync: Whether to reduce the gradients over the ranks, those of earlier calls with them. The last call before
                `optim_step` has to; without it the others save traffic, and each rank holds full, unsharded gradients.
                Default yes.
            **kwargs: As `args`.

        Returns:
            `{"loss": float}` of this batch; NaN where nothing counts in it, which then adds nothing.

        Raises:
            ValueError: The batch is not valid, or a bad `mode`.
            GroupError: The model or the loss raised: the gradients of all calls since the last update are dropped.
        """
        check_mode(mode, default="train")
        batches = self._deal("forward_backward", args, kwargs)
        extra = (loss, mode, sync)
        options: dict[str, Any] = {"collect": collect_rank0, "check": self._unless_fit("forward_backward")}
        return self._channel.submit_batches("forward_backward", batches, *extra, **options).keep_alive(self)

    @handle
    def optim_step(self, *, max_grad_norm: float | None = None) -> Call:
        """Update the parameters with the gradients since the last update.

        Args:
            max_grad_norm: As for `train_step`.

        Returns:
            `{"loss": float, "grad_norm": float}`: the loss over the rows of all batches, and the norm before clipping.
            No `loss` where the gradients are those of a `call(fn)` that ran a backward of its own.

        Raises:
            ValueError: No optimizer is set, as for `train_step`, or `max_grad_norm` is not positive.
            EmptyBatchError: Nothing counted in any batch. The group is READY.
            GroupError: There are no gradients, or the last `forward_backward` did not reduce them. The group is READY.
        """
        self._require_optimizer("optim_step")
        check_max_grad_norm(max_grad_norm)
        check = self._unless_fit("optim_step")
        return self._channel.submit_same("optim_step", max_grad_norm, check=check).keep_alive(self)

    @handle
    def zero_grad(self) -> Call:
        """Drop the gradients since the last update: give up what `forward_backward` has added up."""
        return self._channel.submit_same("zero_grad", check=self._unless_fit("zero_grad")).keep_alive(self)

    @handle
    def clip_grad_norm_(self, max_norm: float | None, norm_type: float = 2.0) -> Call:
        """Scale all gradients so that their global norm is at most `max_norm`.

        For gradients that a `call(fn)` left; `train_step(max_grad_norm=...)` clips its own.

        Args:
            max_norm: Upper bound; `None` only measures.
            norm_type: p of the p-norm, above 0; `inf` for the largest magnitude.

        Returns:
            The norm before clipping, that of one process, as a float.

        Raises:
            ValueError: `norm_type` is not positive, or `max_norm` negative or NaN.
        """
        check_norm(max_norm, norm_type)
        return self._channel.submit_same("clip_grad_norm_", max_norm, norm_type).keep_alive(self)

    @blocking
    def set_optimizer(self, factory: Callable[..., torch.optim.Optimizer], **kwargs: Any) -> None:
        """Make the optimizer on every rank, in place of an earlier one; blocks.

        Args:
            factory: An optimizer class, a callable that takes the parameters and returns an optimizer, a
                `ParamGroups`, for hyperparameters by the names of parameters, or a `Scheduled`.
            **kwargs: Given to `factory` after the parameters.

        Raises:
            ValueError: Not a factory.
            TypeError: It cannot be pickled.
        """
        check_optimizer(factory)
        check = self._unless_fit("set_optimizer")
        self._channel.submit_same("set_optimizer", factory, kwargs, False, check=check).result()
        self._optimizer = bound(factory, kwargs)
        self._may_have_optimizer = True
        self._update_record()

    @blocking
    def set_scheduler(self, schedule: Schedule, **kwargs: Any) -> None:
        """Give the optimizer a learning-rate schedule, which takes a step with every update; blocks.

        It is saved, loaded, copied and made anew with the optimizer; `train_step` and `optim_step` say the `lr` of
        their update then. `optimizer=Scheduled(...)` gives one from the start.

        Args:
            schedule: A class of `torch.optim.lr_scheduler`, or a callable that takes the optimizer and returns one.
            **kwargs: Given to `schedule` after the optimizer.

        Raises:
            ValueError: No optimizer is set, or no schedule was given.
            TypeError: It cannot be pickled.
            GroupError: It cannot be made; the group is READY, with the schedule that it had.
        """
        self._require_optimizer("set_scheduler")
        check_schedule(schedule)
        whole = partial(schedule, **kwargs) if kwargs else schedule
        self._channel.submit_same("set_scheduler", whole, check=self._unless_fit("set_scheduler")).result()
        self._optimizer = None if self._optimizer is None else rescheduled(self._optimizer, whole)
        self._update_record()

    def _require_optimizer(self, method: str) -> None:
        if not self._may_have_optimizer:
            raise ValueError(f"{method} needs an optimizer: call group.set_optimizer(torch.optim.AdamW, lr=...) first")

    def _deal(self, method: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[RankBatch]:
        """Deal a batch out, and refuse one that some ranks could not compute while others wait for them."""
        args, kwargs = by_name(args, kwargs)
        bounds = self._launched.bounds
        batches = deal(args, kwargs, self.world_size, positions=bounds.positions)
        check_batches(method, batches, bounds)
        return batches
