"""`ParamGroups`: an optimizer's param groups by the names of their parameters."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn

_NAMES_SHOWN = 3

OptimizerFactory = Callable[..., torch.optim.Optimizer]
"""An optimizer class, or what makes one from parameters; `ParamGroups` and `Scheduled` are given names, too."""

Rule = str | Callable[[str], bool]
"""Which FQNs: a regular expression that is searched for in them, or a function of them."""


class ParamGroups:
    """A factory of an optimizer with other hyperparameters for parameters of some names.

    To be given wherever an optimizer's factory is; it pickles, provided that functions in it do::

        ParamGroups(torch.optim.AdamW, {r"bias$|norm": {"weight_decay": 0.0}, "embed": {"lr": 1e-5}}, lr=1e-4)
    """

    def __init__(self, factory: OptimizerFactory, rules: Mapping[Rule, Mapping[str, Any]], **kwargs: Any) -> None:
        """Check the rules.

        Args:
            factory: An optimizer class, or what takes param groups as one does.
            rules: Which parameters → hyperparameters of their group. A parameter is of the first rule that takes it;
                those that no rule takes are a group of their own.
            **kwargs: Hyperparameters of all groups but for what their rule says.

        Raises:
            ValueError: No rules, a name that is no regular expression, or no dict of hyperparameters.
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
            named: FQNs and parameters, as `Module.named_parameters` gives them.
            **kwargs: As of the constructor, and before those.

        Raises:
            ValueError: A rule takes no parameter, or one that an earlier rule has taken each time.
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
                    "none matches, or earlier rules take those that do; mend the rule, or leave it out"
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
