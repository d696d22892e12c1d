"""`Scheduled`: an optimizer with a learning-rate schedule that goes wherever the optimizer goes.

Note [Schedules]: a schedule belongs to its optimizer: torch's holds it and changes its param groups. Here the optimizer
holds the schedule, too, so that whatever makes, saves, loads or copies an optimizer does so with its schedule.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from raysharding.distributed.param_groups import OptimizerFactory, ParamGroups

_ATTRIBUTE = "raysharding_schedule"

Schedule = Callable[[torch.optim.Optimizer], LRScheduler]
"""Makes a schedule of `torch.optim.lr_scheduler` for an optimizer."""


class Scheduled:
    """A factory of an optimizer with a learning-rate schedule, which takes a step with every update.

    To be given wherever an optimizer's factory is; it pickles if its parts do::

        Scheduled(torch.optim.AdamW, partial(torch.optim.lr_scheduler.CosineAnnealingLR, T_max=1000), lr=1e-4)
    """

    def __init__(self, factory: OptimizerFactory, schedule: Schedule, **kwargs: Any) -> None:
        """Keep the parts.

        Args:
            factory: As elsewhere: an optimizer class, a function of parameters, or a `ParamGroups`.
            schedule: A class of `torch.optim.lr_scheduler`, or what takes an optimizer as one does.
            **kwargs: Given to `factory`.

        Raises:
            ValueError: The schedule is none, or one that exists already.
        """
        check_schedule(schedule)
        self.factory = bound(factory, kwargs)
        self.schedule = schedule

    def __call__(self, named: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
        """Make the optimizer and its schedule from names and parameters."""
        optimizer = call_factory(self.factory, named)
        attach_schedule(optimizer, self.schedule)
        return optimizer

    def __repr__(self) -> str:
        return f"Scheduled({self.factory!r}, {self.schedule!r})"


def call_factory(
    factory: OptimizerFactory, named: Iterable[tuple[str, nn.Parameter]], **kwargs: Any
) -> torch.optim.Optimizer:
    """Call an optimizer's factory with what it takes: names and parameters, or parameters alone."""
    factory = bound(factory, kwargs)
    pairs = list(named)
    return factory(pairs if isinstance(factory, (ParamGroups, Scheduled)) else [parameter for _, parameter in pairs])


def bound(factory: OptimizerFactory, kwargs: dict[str, Any]) -> OptimizerFactory:
    """Return a factory that needs these keywords no more."""
    if not kwargs:
        return factory
    if isinstance(factory, Scheduled):
        return Scheduled(factory.factory, factory.schedule, **kwargs)
    if isinstance(factory, ParamGroups):
        return ParamGroups(factory.factory, factory.rules, **{**factory.kwargs, **kwargs})
    return partial(factory, **kwargs)


def rescheduled(factory: OptimizerFactory, schedule: Schedule) -> Scheduled:
    """Return a factory of the same optimizer with this schedule, in place of one that it may have."""
    return Scheduled(factory.factory if isinstance(factory, Scheduled) else factory, schedule)


def check_schedule(schedule: Any) -> None:
    """Refuse what makes no schedule.

    Raises:
        ValueError: Not a callable, or a schedule that exists already.
    """
    if isinstance(schedule, LRScheduler) or not callable(schedule):
        raise ValueError(
            f"schedule={schedule!r}: give a class of torch.optim.lr_scheduler, or a function of the optimizer, such as "
            "functools.partial(torch.optim.lr_scheduler.CosineAnnealingLR, T_max=1000)"
        )


def attach_schedule(optimizer: torch.optim.Optimizer, schedule: Schedule) -> None:
    """Give an optimizer a schedule, in place of an earlier one.

    Raises:
        ValueError: `schedule` made none.
    """
    made = schedule(optimizer)
    if not callable(getattr(made, "step", None)) or not hasattr(made, "state_dict"):
        raise ValueError(
            f"the schedule's factory returned a {type(made).__name__}; return an lr_scheduler of torch.optim"
        )
    setattr(optimizer, _ATTRIBUTE, made)


def schedule_of(optimizer: torch.optim.Optimizer) -> LRScheduler | None:
    """Return an optimizer's schedule, if it has one."""
    return getattr(optimizer, _ATTRIBUTE, None)


def check_schedule_has_loss(optimizer: torch.optim.Optimizer, loss: float | None) -> None:
    """Before an update: refuse one whose schedule could not take its step after it.

    Raises:
        ValueError: The schedule looks at the loss (`ReduceLROnPlateau`), and there is none.
    """
    schedule = schedule_of(optimizer)
    if loss is None and isinstance(schedule, ReduceLROnPlateau):
        raise ValueError(f"{type(schedule).__name__} looks at the loss, and gradients of a call(fn) come with none")


def step_schedule(optimizer: torch.optim.Optimizer, loss: float | None) -> dict[str, float]:
    """After an update: take the schedule's step.

    Args:
        optimizer: It.
        loss: Of the update, for schedules that look at it (`ReduceLROnPlateau`).

    Returns:
        `lr`, the first param group's learning rate in that update; nothing where there is no schedule.
    """
    schedule = schedule_of(optimizer)
    if schedule is None:
        return {}
    used = learning_rate(optimizer)
    if isinstance(schedule, ReduceLROnPlateau):
        assert loss is not None, "check_schedule_has_loss comes before the update"
        schedule.step(loss)
    else:
        schedule.step()
    return used


def learning_rate(optimizer: torch.optim.Optimizer) -> dict[str, float]:
    """Return `lr`, the first param group's learning rate now; nothing where there is no schedule."""
    return {} if schedule_of(optimizer) is None else {"lr": float(optimizer.param_groups[0]["lr"])}
