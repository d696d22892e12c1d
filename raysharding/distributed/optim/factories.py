"""Optimizer factories: `ParamGroups` (param groups by parameter name), `Scheduled` (with a learning-rate schedule).

Note [Schedules]: a schedule of torch holds its optimizer and changes its param groups. Here the optimizer also holds
the schedule, so that code that makes, saves, loads or copies an optimizer does the same with its schedule.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import CyclicLR, LRScheduler, OneCycleLR, ReduceLROnPlateau

from raysharding.distributed.fully_shard import reshard, warn_once
from raysharding.distributed.optim.rules import adapt
from raysharding.models import clean_name
from raysharding.units import format_bytes

_NAMES_SHOWN = 3

OptimizerFactory = Callable[..., torch.optim.Optimizer]
"""An optimizer class, or a function of parameters; `ParamGroups` and `Scheduled` take (name, parameter) pairs."""

Rule = str | Callable[[str], bool]
"""Selects FQNs: a regular expression that is searched in the FQN, or a predicate of the FQN."""


class ParamGroups:
    """A factory of an optimizer whose hyperparameters depend on parameter names.

    Accepted wherever an optimizer factory is. Picklable if functions in it are::

        ParamGroups(torch.optim.AdamW, {r"bias$|norm": {"weight_decay": 0.0}, "embed": {"lr": 1e-5}}, lr=1e-4)
    """

    def __init__(self, factory: OptimizerFactory, rules: Mapping[Rule, Mapping[str, Any]], **kwargs: Any) -> None:
        """Check the rules.

        Args:
            factory: An optimizer class, or a function of param groups.
            rules: Rule → hyperparameters of the group. A parameter belongs to the first rule that matches its name;
                parameters that match no rule form a group of their own.
            **kwargs: Hyperparameters of all groups; those of a rule take precedence.

        Raises:
            ValueError: There are no rules, a rule is an invalid regular expression, or its value is no dict.
        """
        if not rules:
            raise ValueError("ParamGroups: no rules; give the optimizer's class itself where all parameters are alike")
        for rule, options in rules.items():
            _check(rule, options)
        self.factory = factory
        self.rules = {rule: dict(options) for rule, options in rules.items()}
        self.kwargs = kwargs

    def __call__(self, named: Iterable[tuple[str, nn.Parameter]], **kwargs: Any) -> torch.optim.Optimizer:
        """Make the optimizer.

        Args:
            named: FQNs and parameters, as from `Module.named_parameters`.
            **kwargs: As in the constructor, with precedence over those.

        Raises:
            ValueError: A rule matches no parameter, or only parameters that an earlier rule matches.
        """
        pairs = list(named)
        if not all(isinstance(pair, tuple) for pair in pairs):
            raise ValueError("ParamGroups needs names: call it with module.named_parameters()")
        groups: dict[Rule | None, list[nn.Parameter]] = {rule: [] for rule in (*self.rules, None)}
        for name, parameter in pairs:
            groups[next((rule for rule in self.rules if _takes(rule, name)), None)].append(parameter)
        for rule in self.rules:
            if not groups[rule]:
                shown = ", ".join(name for name, _ in pairs[:_NAMES_SHOWN])
                raise ValueError(
                    f"ParamGroups: no parameter is left for {rule!r}: of {len(pairs)} that are trained, {shown}, ..., "
                    "none matches, or earlier rules take those that do; change the rule, or leave it out"
                )
        made = [{"params": groups[rule], **options} for rule, options in self.rules.items()]
        rest = [{"params": groups[None]}] if groups[None] else []
        return self.factory([*made, *rest], **{**self.kwargs, **kwargs})

    def __repr__(self) -> str:
        name = getattr(self.factory, "__name__", repr(self.factory))
        options = "".join(f", {key}={value!r}" for key, value in self.kwargs.items())
        return f"ParamGroups({name}, {self.rules!r}{options})"


def _check(rule: Any, options: Any) -> None:
    if not isinstance(options, Mapping) or "params" in options:
        raise ValueError(f"ParamGroups: {rule!r}: {options!r}; give a dict of hyperparameters, without 'params'")
    if isinstance(rule, str):
        try:
            re.compile(rule)
        except re.error as error:
            raise ValueError(f"ParamGroups: {rule!r} is no regular expression: {error}") from error
    elif not callable(rule):
        raise ValueError(f"ParamGroups: {rule!r}: give a regular expression, or a function of a parameter's name")


def _takes(rule: Rule, name: str) -> bool:
    return re.search(rule, name) is not None if isinstance(rule, str) else bool(rule(name))


_ATTRIBUTE = "raysharding_schedule"

Schedule = Callable[[torch.optim.Optimizer], LRScheduler]
"""Makes a schedule (`torch.optim.lr_scheduler`) for an optimizer."""


class Scheduled:
    """A factory of an optimizer with a learning-rate schedule, which steps after every update.

    Accepted wherever an optimizer factory is. Picklable if its parts are::

        Scheduled(torch.optim.AdamW, partial(torch.optim.lr_scheduler.CosineAnnealingLR, T_max=1000), lr=1e-4)
    """

    def __init__(self, factory: OptimizerFactory, schedule: Schedule, **kwargs: Any) -> None:
        """Check and store the parts.

        Args:
            factory: An optimizer class, a function of parameters, or a `ParamGroups`.
            schedule: A class of `torch.optim.lr_scheduler`, or a function of the optimizer.
            **kwargs: Arguments of `factory`.

        Raises:
            ValueError: `schedule` is no factory of a schedule, or is a schedule itself.
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
    """Call an optimizer factory with its kind of argument: (name, parameter) pairs, or parameters."""
    factory = bound(factory, kwargs)
    pairs = list(named)
    made = factory(pairs if isinstance(factory, (ParamGroups, Scheduled)) else [parameter for _, parameter in pairs])
    if isinstance(made, torch.optim.Optimizer):
        adapt(made)  # before a schedule, which wraps the optimizer's `step`
    return made


def bound(factory: OptimizerFactory, kwargs: dict[str, Any]) -> OptimizerFactory:
    """Return a factory with these keyword arguments bound."""
    if not kwargs:
        return factory
    if isinstance(factory, Scheduled):
        return Scheduled(factory.factory, factory.schedule, **kwargs)
    if isinstance(factory, ParamGroups):
        return ParamGroups(factory.factory, factory.rules, **{**factory.kwargs, **kwargs})
    return partial(factory, **kwargs)


def rescheduled(factory: OptimizerFactory, schedule: Schedule) -> Scheduled:
    """Return a factory of the same optimizer with this schedule, which replaces an earlier one."""
    return Scheduled(factory.factory if isinstance(factory, Scheduled) else factory, schedule)


def check_schedule(schedule: Any) -> None:
    """Raise if `schedule` is no factory of a schedule.

    Raises:
        ValueError: `schedule` is not callable, or is a schedule itself.
    """
    if isinstance(schedule, LRScheduler) or not callable(schedule):
        raise ValueError(
            f"schedule={schedule!r}: give a class of torch.optim.lr_scheduler, or a function of the optimizer, such as "
            "functools.partial(torch.optim.lr_scheduler.CosineAnnealingLR, T_max=1000)"
        )


def attach_schedule(optimizer: torch.optim.Optimizer, schedule: Schedule) -> tuple[str, str]:
    """Attach a schedule to an optimizer. One that replaces another continues at its step, with `initial_lr` as base.

    It takes the steps of the replaced schedule first: its rates are those of one that has been there from the first
    step. A `ReduceLROnPlateau`, which would need their losses, begins with the current rate instead.

    Returns:
        Texts, of a schedule that replaces another: how it continues, if that had taken steps; a warning of what that
        wrote over the optimizer's own rate and momentum, if the new one goes on from it.

    Raises:
        ValueError: `schedule` returned no schedule, or one without so many steps. The optimizer is unchanged.
    """
    replaced = schedule_of(optimizer)
    num_steps = 0 if replaced is None else steps_of(replaced.state_dict())
    groups = optimizer.param_groups
    try:
        # Copies: an error leaves the groups as they were.
        optimizer.param_groups = [
            {key: one.clone() if isinstance(one, torch.Tensor) else one for key, one in group.items()}
            for group in groups
        ]
        for group in optimizer.param_groups:
            group["lr"] = group.get("initial_lr", group["lr"])
        made = schedule(optimizer)
        if not callable(getattr(made, "step", None)) or not hasattr(made, "state_dict"):
            raise ValueError(
                f"the schedule's factory returned a {type(made).__name__}; return an lr_scheduler of torch.optim"
            )
        if not isinstance(made, ReduceLROnPlateau):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch warns of steps of a schedule before the optimizer's first
                for _ in range(num_steps):
                    made.step()
            for group, new in zip(groups, optimizer.param_groups, strict=True):
                for key, value in new.items():
                    set_hyperparameter(group, key, value)
    finally:
        optimizer.param_groups = groups
    setattr(optimizer, _ATTRIBUTE, made)
    continues = f"continues at step {num_steps + 1}" if num_steps else ""
    if num_steps and isinstance(made, ReduceLROnPlateau):
        continues = f"begins with the current rate, {float(groups[0]['lr']):g}, and no earlier loss"
    return continues, _inherited(replaced, made, groups[0])


def _inherited(replaced: Any, made: LRScheduler, group: Mapping[str, Any]) -> str:
    writers = [part for part in _parts(replaced) if isinstance(part, (OneCycleLR, CyclicLR, ReduceLROnPlateau))]
    # One that cycles writes the rate itself, and one that cycles the momentum that, too.
    cycles = max((getattr(part, "cycle_momentum", False) for part in writers), default=-1)
    if getattr(made, "cycle_momentum", -1) >= cycles:
        return ""
    shown = {"lr": group.get("initial_lr", group["lr"])}
    shown |= {key: group[key] for key in ("momentum", "betas") if cycles and key in group}
    values = ", ".join(f"{key}={value}" for key, value in shown.items())
    return (
        f"{type(made).__name__} takes {values}, which {type(writers[0]).__name__} wrote over the optimizer's own: "
        "set_optimizer(Scheduled(...)) begins with those that are given"
    )


def _parts(schedule: Any) -> list[Any]:
    return [schedule, *(part for one in getattr(schedule, "_schedulers", ()) for part in _parts(one))]


def set_hyperparameter(group: dict[str, Any], key: str, value: Any) -> None:
    """Set a hyperparameter of a param group; a tensor is filled in place, since a captured graph refers to it."""
    if isinstance(group.get(key), torch.Tensor):
        group[key].fill_(value)
    else:
        group[key] = value


def steps_of(state: Mapping[str, Any]) -> int:
    """Return the number of steps of a schedule; a `ChainedScheduler` only counts them in its parts."""
    parts = [0, *map(steps_of, state.get("_schedulers", ()))]
    return int(state.get("last_epoch", max(parts)))


def schedule_of(optimizer: torch.optim.Optimizer) -> LRScheduler | None:
    """Return the schedule of an optimizer; `None` without one."""
    return getattr(optimizer, _ATTRIBUTE, None)


def check_schedule_has_loss(optimizer: torch.optim.Optimizer, loss: float | None) -> None:
    """Raise, before an update, if the schedule cannot step after it.

    Raises:
        ValueError: The schedule needs the loss (`ReduceLROnPlateau`), and there is none.
    """
    schedule = schedule_of(optimizer)
    if loss is None and isinstance(schedule, ReduceLROnPlateau):
        raise ValueError(f"{type(schedule).__name__} looks at the loss, and gradients of a call(fn) come with none")


def step_schedule(optimizer: torch.optim.Optimizer, loss: float | None) -> dict[str, float]:
    """Step the schedule, after an update.

    Args:
        optimizer: The optimizer.
        loss: Loss of the update, for schedules that need it (`ReduceLROnPlateau`).

    Returns:
        `lr`, the learning rate of the first param group in that update; empty without a schedule.
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
    """Return `lr`, the current learning rate of the first param group; empty without a schedule."""
    return {} if schedule_of(optimizer) is None else {"lr": float(optimizer.param_groups[0]["lr"])}


def make_optimizer(
    module: nn.Module, factory: Callable[..., torch.optim.Optimizer], kwargs: Mapping[str, Any] | None = None
) -> torch.optim.Optimizer:
    """Make `factory(parameters, **kwargs)` over the parameters that require gradients. Not collective.

    Args:
        module: The sharded root module.
        factory: An optimizer class, a function of parameters, a `ParamGroups` or a `Scheduled`.
        kwargs: Keyword arguments of `factory`.

    Raises:
        ValueError: `factory` did not return a torch optimizer.
    """
    # After a forward the root's full parameters are registered; an optimizer must hold the shards.
    reshard(module)
    named = [(clean_name(name), one) for name, one in module.named_parameters()]
    frozen = {name: one for name, one in named if not one.requires_grad}
    optimizer = call_factory(factory, [(name, one) for name, one in named if name not in frozen], **(kwargs or {}))
    if not callable(getattr(optimizer, "step", None)) or not hasattr(optimizer, "zero_grad"):
        kind = type(optimizer).__name__
        raise ValueError(f"the optimizer factory returned a {kind}; return a torch.optim.Optimizer")
    if frozen and isinstance(optimizer, torch.optim.Optimizer):
        optimizer.register_step_pre_hook(partial(_warn_of_untrained, frozen))
    return optimizer


def precision_warning(module: nn.Module) -> str | None:
    """Return a warning of trained weights whose dtype rounds small updates away; `None` if there are none.

    torch's optimizers update weights, and moments, in the weights' dtype.
    """
    trained = [one for one in module.parameters() if one.requires_grad]
    low = [one for one in trained if one.dtype in (torch.bfloat16, torch.float16)]
    if not low:
        return None
    more = format_bytes(2 * sum(one.numel() for one in low))
    return (
        f"{len(low)} of {len(trained)} trained parameters are stored in {low[0].dtype}, and so is the optimizer's "
        "state: an update below 1/256 (float16: 1/2048) of a weight is lost, as with AdamW at small learning "
        'rates. Loading(dtype="float32") with Sharding(mixed_precision="bf16") computes in bf16 and updates in '
        f"float32, for {more} more over all ranks, and as much for each state of the optimizer"
    )


def _warn_of_untrained(frozen: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Warn, before a step, of parameters that were frozen when the optimizer was made, and are no longer."""
    thawed = [name for name, parameter in frozen.items() if parameter.requires_grad]
    if not thawed:
        return
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    missing = [name for name in thawed if id(frozen[name]) not in held]
    if missing:
        warn_once(
            f"{len(missing)} parameters that were frozen when the optimizer was made require gradients now "
            f"({', '.join(missing[:_NAMES_SHOWN])}): they count in grad_norm but are not trained; set the optimizer "
            "again, or add them by its add_param_group, which keeps its state"
        )
