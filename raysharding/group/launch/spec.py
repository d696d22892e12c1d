"""`GroupSpec`: all arguments of a group, so that the group can be made again.

The driver's checks before anything is placed: arguments, the optimizer, the model and its checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from raysharding.checkpoint import Checkpoint
from raysharding.config import Loading, Placement, Sharding, Timeouts
from raysharding.errors import PlanError
from raysharding.group.calls import ProgressOption
from raysharding.group.cluster import Lifetime, check_name, check_world_size
from raysharding.group.rpc import pack
from raysharding.models import Adapted, AdapterNames, build_module, map_keys, misfit, wrap_groups


def check_configs(
    sharding: Sharding, loading: Loading, placement: Placement, timeouts: Timeouts, max_output_bytes: int
) -> None:
    """Check the types of the configuration objects, and the cap on a rank's output.

    Raises:
        ValueError: One has another type, or the cap is not a positive int; the error says what to give.
    """
    given: list[tuple[str, object, type]] = [
        ("sharding", sharding, Sharding),
        ("loading", loading, Loading),
        ("placement", placement, Placement),
        ("timeouts", timeouts, Timeouts),
    ]
    for name, value, wanted in given:
        if not isinstance(value, wanted):
            kind = type(value).__name__
            raise ValueError(f"{name}={value!r}: give {wanted.__name__}(...) from raysharding, not a {kind}")

    if type(max_output_bytes) is not int or max_output_bytes < 1:
        raise ValueError(f"max_output_bytes={max_output_bytes!r}: give a positive int of bytes, such as 2 << 30")


def check_factories(model: Any, optimizer: Any) -> None:
    """Check the model argument and, if given, the optimizer factory; see `check_model`, `check_optimizer`."""
    check_model(model)
    if optimizer is not None:
        check_optimizer(optimizer)


def check_model(model: Any) -> None:
    """Check the `model` argument of `from_checkpoint`, without calling a callable.

    Raises:
        ValueError: `model` is not `None`, a name or a callable.
        TypeError: `model` cannot be pickled, so it cannot be sent to the ranks.
    """
    if isinstance(model, nn.Module):
        name = type(model).__name__
        raise ValueError(
            f"model is a {name} instance: pass the class, model={name}, or a function that makes one; every rank makes "
            "its own, without memory for the parameters"
        )
    if isinstance(model, Adapted):
        check_model(model.model)
        return
    if model is not None and not isinstance(model, str) and not callable(model):
        raise ValueError(f"model={model!r}: give None, the name of a transformers auto class, or a callable")
    pack(model, "model")


def check_optimizer(factory: Any) -> None:
    """Check an optimizer factory, without calling it.

    Raises:
        ValueError: The factory is not a callable, or is an optimizer instance.
        TypeError: The factory cannot be pickled, so it cannot be sent to the ranks.
    """
    if isinstance(factory, torch.optim.Optimizer):
        name = type(factory).__name__
        raise ValueError(
            f"optimizer is a {name} instance: give its class, or a function that takes the parameters, "
            f"such as functools.partial(torch.optim.{name}, lr=...); every rank makes its own over its shards"
        )
    if not callable(factory):
        raise ValueError(
            f"optimizer={factory!r}: give a class such as torch.optim.AdamW, or a function that takes the parameters"
        )
    pack(factory, "optimizer")


def check_fit(
    model: Any, checkpoint: Checkpoint, sharding: Sharding, loading: Loading, adapters: Checkpoint | None = None
) -> None:
    """Build a transformers model on meta, and compare it with the headers of the checkpoint and of adapters.

    The ranks check a callable's model instead, before data moves, because the callable may need resources that only
    the ranks have. The ranks also check the model if this process lacks a package that the model needs.

    Raises:
        PlanError: There is no such model, or it does not fit the checkpoint; the error lists every mismatch.
    """
    source = model.model if isinstance(model, Adapted) else model
    if source is not None and not isinstance(source, str):
        return
    try:
        module = fitted_module(model, checkpoint, loading)
    except PlanError as error:
        if isinstance(error.__cause__, ImportError):
            return
        raise
    if adapters is not None:
        check_adapters(module, adapters)
    if not callable(sharding.wrap) and not callable(sharding.ignored_modules):
        wrap_groups(module, sharding)


def check_adapters(module: nn.Module, adapters: Checkpoint) -> None:
    """Compare adapters with a model on meta that was built with adapters.

    Raises:
        PlanError: The adapters differ from the model's; the error lists every mismatch.
    """
    names = AdapterNames.of(module)
    assert names is not None, "the model is built with adapters"
    names.check(adapters)
    keys = map_keys(module, adapters.tensors, None)
    problems = [*keys.problems, *(f"unexpected in the checkpoint: {name}" for name in keys.unexpected)]
    # Parameters of the base are not missing: the base is loaded before the adapters.
    problems += [f"missing from the checkpoint: {name}" for name in keys.missing if name in names.files]
    if problems:
        raise misfit(adapters.path, problems)


def fitted_module(model: Any, checkpoint: Checkpoint, loading: Loading) -> nn.Module:
    """Build the module on meta, check that it fits the checkpoint's headers, and return it.

    Raises:
        PlanError: As `check_fit`.
    """
    module = build_module(model, checkpoint, loading.dtype)
    keys = map_keys(module, checkpoint.tensors, loading.key_mapping)
    if problems := keys.mismatches(strict=loading.strict):
        raise misfit(checkpoint.path, problems)
    return module


@dataclass(frozen=True)
class GroupSpec:
    """The arguments of `ShardedModelGroup.from_checkpoint`, with their defaults filled in."""

    checkpoint: str
    """Path or URI, as the user gave it."""
    model: Any = None
    """`None`, the name of a transformers auto class, or a callable."""
    world_size: int | None = None
    """Number of ranks; `None`: one per GPU of the cluster."""
    device: str | None = None
    """`cuda`, `cpu`, or `None` for `cuda` if the cluster has GPUs, else `cpu`."""
    sharding: Sharding = field(default_factory=Sharding)
    """Options of the sharding."""
    loading: Loading = field(default_factory=Loading)
    """Options of the load."""
    placement: Placement = field(default_factory=Placement)
    """Options of the ranks' placement."""
    timeouts: Timeouts = field(default_factory=Timeouts)
    """Deadlines."""
    optimizer: Callable[..., Any] | None = None
    """Factory of the optimizer."""
    max_output_bytes: int = 2 << 30
    """Cap on the bytes that one rank sends back for one call."""
    progress: ProgressOption = None
    """See `from_checkpoint`."""
    name: str | None = None
    """Name of a group that outlives its driver; `None` for a group that does not."""
    preflight: bool = True
    """True if nodes and links are checked before bytes move."""
    max_restarts: int = 0
    """Largest number of times that `fit` restarts a broken group."""

    @property
    def lifetime(self) -> Lifetime:
        """What ends the group's actors and placement group."""
        return Lifetime(self.name, self.timeouts.lease_s, self.timeouts.start_s)

    def check(self) -> None:
        """Refuse arguments that are wrong for any checkpoint and cluster.

        Raises:
            ValueError: A field has a wrong type or value; the error says what to give.
            TypeError: The model or the optimizer's factory cannot be pickled.
        """
        check_configs(self.sharding, self.loading, self.placement, self.timeouts, self.max_output_bytes)
        check_world_size(self.world_size)
        check_factories(self.model, self.optimizer)
        check_name(self.name)
        if type(self.max_restarts) is not int or self.max_restarts < 0:
            raise ValueError(f"max_restarts={self.max_restarts!r}: give a whole number, 0 or more")
        if self.name is not None and self.placement.placement_group is not None:
            raise ValueError(
                f"name={self.name!r} with a placement group of your own: it may end before the group does; omit one"
            )
