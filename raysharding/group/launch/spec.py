"""`GroupSpec`: all arguments of a group, so that the group can be made again.

`Opened`: a group's checkpoint, or LoRA adapters and the checkpoint that they name as their base. A checkpoint is opened
where its files are visible: on the driver, or on the first such node of the cluster. The driver checks the arguments
before anything is placed, and compares the model with the headers while the actors start.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Self

import ray
import torch
from torch import nn

from raysharding.arguments import check_int, for_fields
from raysharding.checkpoint import Checkpoint, locate, open_checkpoint, open_config
from raysharding.checkpoint.storage import HubAccess, HubPath, access_to, is_remote, normal_path
from raysharding.config import Loading, Placement, Sharding, Timeouts
from raysharding.errors import CheckpointError, PlanError, RayshardingError
from raysharding.group.calls import ProgressOption
from raysharding.group.cluster import ask_nodes, check_name, join_announced
from raysharding.group.messages import pack
from raysharding.models import Adapted, AdapterNames, build_module, map_keys, misfit, override_config, wrap_groups


def is_by_config(model: Any) -> bool:
    """Return True if config.json says how the model is built, and not the user's own code."""
    source = model.model if isinstance(model, Adapted) else model
    return source is None or isinstance(source, str)


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
    if not is_by_config(model) and not callable(model):
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


@dataclass(frozen=True)
class GroupSpec:
    """The arguments of `ShardedModelGroup.from_checkpoint`, with their defaults filled in."""

    checkpoint: str
    """Path, URI or hub id, as the user gave it; after `located`, what any process opens the same files with."""
    model: Any = None
    """`None`, the name of a transformers auto class, or a callable."""
    world_size: int | None = None
    """Number of ranks; `None`: as many as `choose_ranks` chooses."""
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
    """True to show a bar; `None`: in a terminal or notebook; or a callable of bytes done and bytes in total."""
    name: str | None = None
    """Name of a group that outlives its driver; `None` for a group that does not."""
    preflight: bool = True
    """True if nodes and links are checked before bytes move."""
    max_restarts: int = 0
    """Largest number of times that `fit` restarts a broken group."""
    revision: str | None = None
    """Branch, tag or commit of a hub id; `None` once it is located."""
    random_weights: bool = False
    """True if config.json alone is read."""
    config_overrides: Mapping[str, Any] | None = None
    """Field of config.json → value in its place."""
    base: str | None = None
    """Path, URI or hub id of the base of the adapters in `checkpoint`; `None`: the hub id in their files."""

    token: str = field(default_factory=lambda: secrets.token_hex(3))
    """Tells groups without a name apart; a restart keeps it."""

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> Self:
        """Return the spec of the arguments of `from_checkpoint` or `plan`."""
        unset = {name for name in ("sharding", "loading", "placement", "timeouts") if options.get(name) is None}
        fields = {name: value for name, value in for_fields(cls, options).items() if name not in unset}
        fields["checkpoint"] = os.fspath(options["checkpoint"])
        if options["base"] is not None:
            fields["base"] = os.fspath(options["base"])
        if options["peft_config"] is not None:
            fields["model"] = Adapted.of(options["model"], options["peft_config"])
        return cls(**fields)

    @property
    def title(self) -> str:
        """The group's name in errors, logs and metrics."""
        return f"group {self.token}" if self.name is None else f"group {self.name!r}"

    @property
    def short_name(self) -> str:
        """The last part of the checkpoint's name: that of its directory for a file, of its repository in a cache."""
        parts = [part for part in self.checkpoint.rstrip("/").split("/") if part]
        if len(parts) > 1 and parts[-1].endswith((".safetensors", ".json", ".bin")):
            del parts[-1]
        if len(parts) > 2 and parts[-2] == "snapshots":
            return parts[-3].rpartition("--")[2]
        return parts[-1].partition("@")[0] if parts else "model"

    def check(self) -> None:
        """Refuse arguments that are wrong for any checkpoint and cluster.

        Raises:
            ValueError: A field has a wrong type or value; the error says what to give.
            TypeError: The model or the optimizer's factory cannot be pickled.
        """
        kinds = {"sharding": Sharding, "loading": Loading, "placement": Placement, "timeouts": Timeouts}
        for name, wanted in kinds.items():
            value = getattr(self, name)
            if not isinstance(value, wanted):
                kind = type(value).__name__
                raise ValueError(f"{name}={value!r}: give {wanted.__name__}(...) from raysharding, not a {kind}")
        check_int("max_output_bytes", self.max_output_bytes)
        if self.world_size is not None:
            check_int("world_size", self.world_size)
        check_model(self.model)
        if self.optimizer is not None:
            check_optimizer(self.optimizer)
        check_name(self.name)
        check_int("max_restarts", self.max_restarts, least=0)
        self._check_random()
        if self.name is not None and self.placement.placement_group is not None:
            raise ValueError(
                f"name={self.name!r} with a placement group of your own: it may end before the group does; omit one"
            )

    def _check_random(self) -> None:
        if type(self.random_weights) is not bool:
            raise ValueError(f"random_weights={self.random_weights!r}: give True or False")
        if not isinstance(self.config_overrides, Mapping | None):
            raise ValueError(f"config_overrides={self.config_overrides!r}: give a mapping, {{'num_hidden_layers': 2}}")
        if self.config_overrides is not None and not is_by_config(self.model):
            raise ValueError("config_overrides with a callable model, which does not read config.json: leave one out")

    def located(self) -> Self:
        """Return the spec with hub ids resolved, so that later loads read the same commits; needs no cluster.

        Raises:
            ValueError: A revision for what is no hub id.
            CheckpointError: As `locate`.
        """
        where = locate(self.checkpoint, self.revision, weights=not self.random_weights)
        base = None if self.base is None else locate(self.base)
        return replace(self, checkpoint=where, revision=None, base=base)

    def of_files(self, source: str) -> Self:
        """Return the spec for a reload from other files than the group was made from: those hold weights.

        A save of the group has the overrides in its config.json; to override them once more changes nothing.
        """
        overrides = None if self.random_weights else self.config_overrides
        changed: dict[str, Any] = {"random_weights": False, "config_overrides": overrides, "base": None}
        return replace(self, checkpoint=source, revision=None, **changed)

    def seen_at(self, base: str, directory: str) -> Self:
        """Return the spec with the base's files in another directory or URI."""
        if isinstance(self.model, Adapted) and self.model.base == normal_path(base):
            model = replace(self.model, base=directory)
            return replace(self, model=model, checkpoint=directory if self.checkpoint == base else self.checkpoint)
        return replace(self, checkpoint=directory)

    def hub_access(self) -> HubAccess | None:
        """Return this process's access to the hub, for the ranks; `None` if they read nothing there."""
        return access_to(self.checkpoint, self.model.base if isinstance(self.model, Adapted) else None)


Opener = Callable[[str], Checkpoint]
"""`open_checkpoint`, or `open_config` for random weights."""


def open_here(checkpoint: str, opener: Opener) -> Checkpoint | None:
    """Open a checkpoint in this process; return `None` if this machine does not see the path.

    Raises:
        CheckpointError: The checkpoint is not valid, or of an unsupported kind.
    """
    return opener(checkpoint) if is_remote(checkpoint) or _is_there(normal_path(checkpoint)) else None


def _is_there(path: str) -> bool:
    """Return True if a path exists and is not an empty directory, as a mount point without its mount is."""
    try:
        return bool(os.listdir(path))
    except NotADirectoryError:
        return True
    except OSError:
        return os.path.exists(path)  # an unreadable directory: opening it raises the error


def open_on_a_node(checkpoint: str, opener: Opener, start_s: float) -> Checkpoint:
    """Open a checkpoint on the first node of the cluster that sees its path.

    Args:
        checkpoint: A local path or `file://` URI.
        opener: Opens it there.
        start_s: Deadline for the nodes' answers.

    Raises:
        CheckpointError: No node sees the path, or the checkpoint is not valid.
    """
    path = normal_path(checkpoint)
    nodes = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]}
    silent: dict[str, str] = {}
    for node_id, answer in ask_nodes(_open_if_there, dict.fromkeys(nodes, (opener, path)), start_s):
        if isinstance(answer, ray.exceptions.GetTimeoutError):
            silent[nodes[node_id]] = f"none within {start_s:g} s"
        elif isinstance(answer, ray.exceptions.RayError):
            text = str(answer).strip() or type(answer).__name__
            silent[nodes[node_id]] = text.splitlines()[-1]  # of a remote traceback, this line is the error itself
        elif isinstance(answer, RayshardingError):
            raise answer
        elif answer is not None:
            return Checkpoint.from_json(answer)
    answered = ", ".join(address for address in nodes.values() if address not in silent) or "none"
    unanswered = "".join(f"; no answer from {address}: {why}" for address, why in silent.items())
    raise CheckpointError(
        f"no such file or directory, or an empty one, on the driver and on the nodes that answered ({answered})"
        f"{unanswered}: check the spelling, and that a node of the cluster sees it",
        path=checkpoint,
    )


def _open_if_there(wanted: tuple[Opener, str]) -> bytes | RayshardingError | None:
    """Return the opened checkpoint, the error in it, or `None` if the node does not see it; runs on a node."""
    opener, path = wanted
    try:
        opened = open_here(path, opener)
    except RayshardingError as error:
        return error
    return None if opened is None else opened.to_json()


@dataclass(frozen=True)
class Opened:
    """An opened checkpoint and its model."""

    model: Any
    """The model that the ranks build: the user's `model` argument, or an `Adapted`."""
    base: Checkpoint
    """The checkpoint that the model is built for."""
    adapters: Checkpoint | None
    """The adapters that are loaded after the base; `None` without adapters."""


def open_spec(spec: GroupSpec, *, alone: bool = False) -> tuple[GroupSpec, Opened, bool]:
    """Check a spec and open its checkpoint: in this process, or on the first node of the cluster that sees its path.

    Starts no cluster: what is wrong with the arguments or the files is found without Ray where this machine sees them.

    Args:
        spec: The group's spec.
        alone: True to join no cluster that is announced.

    Returns:
        The spec with its checkpoint located, the opened checkpoint, and whether a cluster was joined.

    Raises:
        CheckpointError: The checkpoint is not valid, or adapters name no base that can be opened.
        ValueError: An argument is wrong, or the adapters in the files differ from `peft_config`.
    """
    spec.check()
    spec = spec.located()
    opener: Opener = open_config if spec.random_weights else open_checkpoint

    def open_anywhere(path: str) -> Checkpoint:
        checkpoint = open_here(path, opener)
        if checkpoint is None and not alone and join_announced():
            checkpoint = open_on_a_node(path, opener, spec.timeouts.start_s)
        if checkpoint is None:
            checkpoint = opener(path)  # it raises: a cluster of this machine alone would see no more than this process
        if checkpoint.adapter is not None or spec.config_overrides is None:
            return checkpoint
        return override_config(checkpoint, spec.config_overrides)

    opened = _opened(spec, open_anywhere)
    return spec, opened, not alone and join_announced()


def _opened(spec: GroupSpec, open_one: Callable[[str], Checkpoint]) -> Opened:
    checkpoint = open_one(spec.checkpoint)
    if checkpoint.adapter is None:
        if spec.base is not None:
            raise ValueError(f"base={spec.base!r}, but {checkpoint.path} holds no LoRA adapters alone: leave base out")
        model = spec.model
        if isinstance(model, Adapted):
            model = replace(model, base=normal_path(spec.checkpoint))
        return Opened(model, checkpoint, None)
    adapted = Adapted.of_files(spec.model, checkpoint)
    base = adapted.base or spec.base or _named_base(checkpoint)
    opened = open_one(base)
    if opened.adapter is not None:
        what = f"their base model, {base}, holds adapters as well: give base=, the path of a whole model"
        raise CheckpointError(what, path=checkpoint.path)
    return Opened(replace(adapted, base=normal_path(base)), opened, checkpoint)


def _named_base(adapters: Checkpoint) -> str:
    """Return the located hub id that adapter_config.json names.

    Raises:
        CheckpointError: It names nothing, or what a file must not choose for the caller: a path or a URI.
    """
    assert adapters.adapter is not None, "a checkpoint of adapters"
    name, revision = (adapters.adapter.get(key) for key in ("base_model_name_or_path", "revision"))
    what = f"adapter_config.json names the base model {name!r}, which is no hub id (org/name), or is a path here, too"
    if isinstance(name, str) and HubPath.of(name) and not is_remote(name) and not os.path.lexists(name):
        try:
            return locate(name, revision)
        except CheckpointError as error:
            error.add_note(f"raysharding: {adapters.path} names this as its base model; base= names another")
            raise
    how = "give base=, the path, URI or hub id of the model that the adapters were made for"
    raise CheckpointError(f"{what}. Paths and URIs in a file are opened only on your word: {how}", path=adapters.path)


def check_fit(opened: Opened, sharding: Sharding, loading: Loading) -> None:
    """Build a transformers model on meta, and compare it with the headers of the checkpoint and of its adapters.

    The ranks check a callable's model instead, before data moves, because the callable may need resources that only
    the ranks have. The ranks also check the model if this process lacks a package that the model needs.

    Raises:
        PlanError: There is no such model, or it does not fit the checkpoint; the error lists every mismatch.
    """
    model, adapters = opened.model, opened.adapters
    if not is_by_config(model):
        return
    try:
        module = fitted_module(model, opened.base, loading)
    except PlanError as error:
        if isinstance(error.__cause__, ImportError):
            return
        raise
    if adapters is not None:
        names = AdapterNames.of(module)
        assert names is not None, "the model is built with adapters"
        names.check(adapters)
        keys = map_keys(module, adapters.tensors, None)
        problems = [*keys.problems, *(f"unexpected in the checkpoint: {name}" for name in keys.unexpected)]
        # Parameters of the base are not missing: the base is loaded before the adapters.
        problems += [f"missing from the checkpoint: {name}" for name in keys.missing if name in names.files]
        if problems:
            raise misfit(adapters.path, problems)
    if not callable(sharding.wrap) and not callable(sharding.ignored_modules):
        wrap_groups(module, sharding)


def fitted_module(model: Any, checkpoint: Checkpoint, loading: Loading) -> nn.Module:
    """Build the module on meta, check that it fits the checkpoint's headers, and return it.

    Raises:
        PlanError: As `check_fit`.
    """
    module = build_module(model, checkpoint, loading.dtype)
    if checkpoint.is_random:
        return module
    keys = map_keys(module, checkpoint.tensors, loading.key_mapping, checkpoint.config)
    if problems := keys.mismatches(strict=loading.strict):
        raise misfit(checkpoint.path, problems, keys.cure)
    return module
