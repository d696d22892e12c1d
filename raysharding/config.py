"""Sharding, loading, placement and timeouts of a group: four frozen dataclasses that validate their fields."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from math import inf, isfinite
from typing import TYPE_CHECKING, Any, Literal, TypeGuard, get_args

from raysharding.arguments import check_summon_full_params, fields_with_hints

if TYPE_CHECKING:  # imported where it is needed: a group's controller reads its placement and timeouts without torch
    import torch
    from torch import nn

Transport = Literal["auto", "broadcast", "scatter", "local"]
Verify = Literal["header", "finite", "full"]
Strategy = Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"]

_DTYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "float64": "fp64"}
"""torch's name → short name."""


def floating_dtype(given: object, what: str = "dtype") -> torch.dtype:
    """Return the floating dtype that a user named; every argument that takes a dtype takes these names.

    Args:
        given: `"bfloat16"`, `"bf16"`, `"torch.bfloat16"` or `torch.bfloat16`; so for float32, float16 and float64, and
            as a `torch.dtype` for any other floating dtype.
        what: Name of the argument in the error.

    Raises:
        ValueError: `given` is none of these.
    """
    import torch

    if isinstance(given, torch.dtype) and given.is_floating_point:
        return given
    text = given.removeprefix("torch.") if isinstance(given, str) else ""
    for name, short in _DTYPES.items():
        if text in (name, short):
            dtype: torch.dtype = getattr(torch, name)
            return dtype
    names = ", ".join(f"{short!r} or {name!r}" for name, short in _DTYPES.items())
    raise ValueError(f"{what}={given!r}: give a floating dtype such as torch.bfloat16, or its name: {names}")


def _require(config: object, cure: str, **are_valid: bool) -> None:
    for name, is_valid in are_valid.items():
        if not is_valid:
            raise ValueError(f"{name}={getattr(config, name)!r}: {cure}")


def _require_bools(config: object, *names: str) -> None:
    _require(config, "give True or False", **{name: isinstance(getattr(config, name), bool) for name in names})


def _require_choice(config: object, name: str, choices: Sequence[str]) -> None:
    _require(config, f"use one of {', '.join(map(repr, choices))}", **{name: getattr(config, name) in choices})


def _is_at_least(lowest: float, value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and isfinite(value) and value >= lowest


def _is_positive(value: object) -> bool:
    return _is_at_least(0, value) and value != 0


def _is_int(value: object, lowest: float = 1) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value >= lowest


def _is_text_map(value: object) -> bool:
    return isinstance(value, Mapping) and all(isinstance(text, str) for pair in value.items() for text in pair)


@fields_with_hints
@dataclass(frozen=True)
class Sharding:
    """Sharding of a module over the ranks."""

    wrap: str | Sequence[str] | Callable[[nn.Module], bool] = "auto"
    """Modules that become FSDP groups of their own: `"auto"` (transformers' FSDP plan, else `_no_split_modules`
    innermost first, else the elements of each `ModuleList`), `"size"` (see `min_num_params`), `"none"` (one group),
    a list of module class names, or a predicate over modules. Default `"auto"`."""
    min_num_params: int = 100_000_000
    """Number of parameters from which a module is its own group under `wrap="size"`. Default 1e8, as in FSDP1."""
    reshard_after_forward: bool | int | None = None
    """As in `fully_shard`: free the full parameters after forward (`True`), keep them (`False`), reshard to a smaller
    world size (an int), or, with `None` (the default), free all but the root's and, under `wrap="auto"`, all but those
    that transformers' plan keeps: the final norm's and the head's, which backward uses first. After a forward without
    a backward, kept parameters stay on each rank until the next call other than a forward."""
    summon_full_params: bool | None = None
    """For `generate`, `predict` and `evaluate`: gather all parameters once, in the dtype that they are computed in, and
    keep them on every rank until the call ends, so that forwards are those of an unsharded module. `None` (default):
    where every rank has the memory; `True`: in any case, and for `forward`, too, until the next call that is no
    inference; `False`: by groups, anew in each forward. As FSDP1's `summon_full_params` around an inference."""
    replicate_size: int = 1
    """HSDP: number of replicas; each is sharded over `world_size / replicate_size` ranks. Default 1."""
    mixed_precision: str | torch.dtype | torch.distributed.fsdp.MixedPrecisionPolicy | None = None
    """`"bf16"`, `"fp16"` or another dtype, as in `Loading.dtype`, or a policy: dtype of the parameters in forward and
    backward; with a dtype, gradients are reduced in float32. Default: the stored dtype. `train_step` and `fit` refuse
    float16, in which small gradients are 0 without loss scaling. What transformers keeps in float32 in a model that is
    loaded in this dtype (Ernie 4.5's routers) computes in its stored dtype.
    As under FSDP1's `mixed_precision`, each BatchNorm keeps its stored dtype: it is a group of its own (one more
    all-gather), its inputs are cast to that dtype and its outputs cast back. Buffers keep their dtype too: FSDP1's
    `buffer_dtype` has no counterpart, because casting a table such as a rotary `inv_freq` loses precision for good."""
    keep_low_precision_grads: bool = False
    """Under `mixed_precision`: keep the shards' gradients in the low dtype after the reduction instead of casting them
    to the stored dtype. Default no. As in FSDP1's `MixedPrecision`; for optimizers that accept such gradients, such as
    `SGD`; torch's `Adam` raises a RuntimeError in its first step."""
    cpu_offload: bool = False
    """Keep shards, gradients and optimizer state in host memory between uses. Default no."""
    ignored_modules: str | nn.Module | Sequence[str | nn.Module] | Callable[[nn.Module], bool] = ()
    """Modules that are not sharded, with everything inside them: regular expressions that match whole module names,
    modules of the tree, or a predicate over modules. Default none. Their parameters stay plain tensors, equal on
    every rank, and are loaded, counted and saved like 0-dim parameters. As `ignored_modules` in FSDP1 and accelerate,
    except that gradients are averaged over all ranks; FSDP1 and accelerate leave each rank its own gradients, so the
    copies diverge. Under `mixed_precision` ignored modules keep their stored dtype and do not cast their inputs, as in
    FSDP1: cast the inputs yourself. A name or module that is not in the tree is a `PlanError`."""
    average_ignored_gradients: bool = True
    """Average the gradients of ignored modules over the ranks. Default yes. If not, each rank keeps its own gradients,
    as in FSDP1 and accelerate, for expert parallelism; such modules may then differ between the ranks.
    `clip_grad_norm_` counts the gradients of all ranks, and `train_step` scales the loss by the number of ranks, for
    FSDP to average. Loads and saves treat such parameters as copies: a save holds rank 0's, so save the other ranks'
    yourself; if names or shapes differ, a load of parameters or of optimizer state is a `PlanError`."""
    activation_checkpointing: bool | Sequence[str] | Callable[[nn.Module], bool] = False
    """Modules that keep only their inputs for backward and recompute their activations: `True` for the FSDP groups
    that contain modules, a list of class names, or a predicate over modules; of nested modules, the outermost. Default
    none. Names and classes of modules do not change. BatchNorm statistics are updated once; such modules use no
    key-value cache in training. As in accelerate, and torch's `apply_activation_checkpointing`."""
    activation_checkpointing_offload: bool = False
    """Move the kept inputs to host memory until backward; pinned if CUDA is available. Default no. As in accelerate."""
    compile: bool | str = False
    """`torch.compile` for each FSDP group that contains modules, separately: `True`, or the name of a backend
    (`"inductor"` is torch's own). The first calls take minutes on a large model. Default no."""
    forward_prefetch: bool | int = False
    """Number of groups gathered ahead of the running group in forward, in the order of the first forward, which later
    forwards must keep; `True` is 1. Default none: on a GPU FSDP2 overlaps the next all-gather by itself, and FSDP1's
    `forward_prefetch` only issues that all-gather earlier from the CPU."""
    backward_prefetch: str | Enum | None = "backward_pre"
    """When the next group's parameters are gathered in backward: `"backward_pre"` (default: before this group's
    gradients are computed) or `None` (when they are needed). `"backward_post"` does not exist in FSDP2 and acts as
    `None`, with a warning. As in FSDP1, whose `BackwardPrefetch` is also accepted."""
    param_init_fn: Callable[[nn.Module], None] | None = None
    """Function called with each module that contains meta tensors, parents first, before the module is sharded, one
    FSDP group at a time. As in FSDP1, the function is called while the tensors are on meta, and gives them memory and
    values: `module.to_empty(device=..., recurse=False)`, `module.reset_parameters()`. If it leaves a module's own
    tensors on meta, these tensors get memory on the mesh's device and the function is called again, so a function that
    only fills values (`torch.nn.init`) suffices. A tensor that then has no value is a `PlanError`. Default none: meta
    tensors stay on meta until a load. Ranks that draw different random numbers need `sync_module_states`."""
    sync_module_states: bool = False
    """Copy rank 0's parameters and buffers to every rank before they are sharded, one FSDP group at a time; the other
    ranks' may be on meta. Default no. As in FSDP1. A load gives all ranks equal values in any case."""

    def __post_init__(self) -> None:
        flags = ("keep_low_precision_grads", "cpu_offload", "average_ignored_gradients", "sync_module_states")
        _require_bools(self, *flags, "activation_checkpointing_offload")
        is_wrap = self.wrap in ("auto", "size", "none") if isinstance(self.wrap, str) else _are_names(self.wrap)
        cure = "use 'auto', 'size', 'none', a list of class names, or a callable"
        _require(self, cure, wrap=is_wrap or callable(self.wrap))
        _require(self, "give a positive whole number", min_num_params=_is_int(self.min_num_params))
        reshard = self.reshard_after_forward
        is_reshard = reshard is None or isinstance(reshard, bool) or _is_int(reshard)
        _require(self, "give True, False, None, or a smaller world size", reshard_after_forward=is_reshard)
        check_summon_full_params(self.summon_full_params)
        _require(self, "give 1 (no replicas) or more", replicate_size=_is_int(self.replicate_size))
        object.__setattr__(self, "mixed_precision", _precision(self.mixed_precision))
        is_low = not self.keep_low_precision_grads or self.mixed_precision is not None
        cure = "without mixed_precision there are no such gradients: set mixed_precision too"
        _require(self, cure, keep_low_precision_grads=is_low)
        is_function = self.param_init_fn is None or callable(self.param_init_fn)
        _require(self, "give a function of one module, or None", param_init_fn=is_function)
        self._check_modules()
        is_number = isinstance(self.forward_prefetch, bool) or _is_int(self.forward_prefetch, 0)
        _require(self, "give True, False, or a number of groups", forward_prefetch=is_number)
        when = self.backward_prefetch
        is_known = when is None or _name_of(when) in ("BACKWARD_PRE", "BACKWARD_POST")
        cure = "use 'backward_pre', 'backward_post', a torch.distributed.fsdp.BackwardPrefetch, or None"
        _require(self, cure, backward_prefetch=is_known)

    def _check_modules(self) -> None:
        ignored = self.ignored_modules
        items = ignored if isinstance(ignored, Sequence) and not isinstance(ignored, str) else [ignored]
        is_choice = callable(ignored) or all(isinstance(item, str) or _is_module(item) for item in items)
        cure = "give regular expressions on module names, modules, or a predicate over modules"
        _require(self, cure, ignored_modules=is_choice)
        _require_patterns("ignored_modules", (item for item in items if isinstance(item, str)))
        chosen = self.activation_checkpointing
        is_choice = isinstance(chosen, bool) or callable(chosen) or _are_names(chosen)
        cure = "give True, False, a list of class names, or a predicate over modules"
        _require(self, cure, activation_checkpointing=is_choice)
        is_used = not self.activation_checkpointing_offload or chosen is not False
        cure = "moves the inputs that activation_checkpointing keeps: set activation_checkpointing too"
        _require(self, cure, activation_checkpointing_offload=is_used)
        is_backend = self.compile != "" and isinstance(self.compile, bool | str)
        _require(self, "give True, False, or the name of a backend of torch.compile", compile=is_backend)

    @classmethod
    def from_strategy(
        cls, strategy: str | Enum, world_size: int, ranks_per_node: int | None = None, **fields: Any
    ) -> Sharding:
        """Translate FSDP1's `sharding_strategy`.

        `FULL_SHARD` frees the full parameters after forward, `SHARD_GRAD_OP` keeps them until the end of backward;
        `HYBRID_SHARD` and `_HYBRID_SHARD_ZERO2` do the same within a node, with a replica on each node. `NO_SHARD` is
        one replica on each rank; during forward and backward FSDP2 computes with a copy of the running group.

        Args:
            strategy: A `torch.distributed.fsdp.ShardingStrategy`, or the name of one in upper or lower case.
            world_size: Number of ranks.
            ranks_per_node: Ranks on each node; under a hybrid strategy they hold one replica.
            fields: Other fields of `Sharding`.

        Raises:
            ValueError: The strategy is unknown, or a hybrid strategy lacks `ranks_per_node`, or `ranks_per_node` does
                not divide `world_size`.
        """
        name = _name_of(strategy)
        if name not in _STRATEGIES:
            raise ValueError(f"strategy={strategy!r}: use one of {', '.join(_STRATEGIES)}")
        if not _is_int(world_size):
            raise ValueError(f"world_size={world_size!r}: give the number of ranks")
        replicate_size = world_size if name == "NO_SHARD" else 1
        if "HYBRID" in name:
            if not _is_int(ranks_per_node) or world_size % ranks_per_node:
                raise ValueError(
                    f"ranks_per_node={ranks_per_node!r}: {name} needs the number of ranks on each node, a divisor of "
                    f"world_size={world_size}"
                )
            replicate_size = world_size // ranks_per_node
        fields = {"reshard_after_forward": _STRATEGIES[name], "replicate_size": replicate_size} | fields
        return cls(**fields)


_STRATEGIES = {
    "FULL_SHARD": None,  # FSDP1 also keeps the root's parameters, which backward uses first
    "SHARD_GRAD_OP": False,
    "NO_SHARD": True,  # only a local copy is freed: restoring the copy needs no communication
    "HYBRID_SHARD": None,
    "_HYBRID_SHARD_ZERO2": False,
}
"""Strategy → `reshard_after_forward`."""


def _name_of(value: object) -> str:
    """Return the name of a member of one of torch's enums, given as the member or in upper or lower case."""
    return (value.name if isinstance(value, Enum) else str(value)).upper()


def _are_names(value: object) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str) and all(isinstance(name, str) for name in value)


def _is_module(value: object) -> bool:
    torch = sys.modules.get("torch")  # if not imported, `value` is not a module
    return torch is not None and isinstance(value, torch.nn.Module)


def _precision(given: Any) -> Any:
    """Return the dtype of `Sharding.mixed_precision`, or the policy with dtypes for names in its fields."""
    if given is None:
        return None
    import torch

    if not isinstance(given, str | torch.dtype):
        from torch.distributed.fsdp import MixedPrecisionPolicy  # takes a second to import, and few callers pass one

        if isinstance(given, MixedPrecisionPolicy):
            fields = {name: getattr(given, name) for name in ("param_dtype", "reduce_dtype", "output_dtype")}
            named: dict[str, Any] = {
                name: floating_dtype(value, name) for name, value in fields.items() if isinstance(value, str)
            }
            return replace(given, **named) if named else given
    try:
        return floating_dtype(given, "mixed_precision")
    except ValueError as error:
        raise ValueError(f"{error}; or a torch.distributed.fsdp.MixedPrecisionPolicy, or None") from None


@fields_with_hints
@dataclass(frozen=True)
class Loading:
    """Options of a load of checkpoint bytes into the shards."""

    transport: Transport = "auto"
    """`"local"`: each rank reads its own part of the files; `"scatter"`: readers send every other rank its own part;
    `"broadcast"`: readers send everything to every rank, which keeps its part; `"auto"` (default): `local` if every
    rank sees the same files, else `scatter` from the ranks that do."""
    bucket_bytes: int | None = None
    """Bytes of one bucket, all ranks' parts together; under `local`, of each rank's part. Two buckets form the ring:
    one is read while the other is sent. Default: 32 MiB, or 64 MiB if each rank reads directly into its shard, without
    a ring."""
    dtype: torch.dtype | str | None = None
    """Floating dtype of the loaded parameters: `torch.bfloat16`, `"bfloat16"` and `"bf16"` mean the same. Default:
    config.json's, else the one floating dtype of the files; for a callable's model, the dtypes of its parameters."""
    strict: bool = True
    """Treat missing or unexpected keys as a `PlanError`; otherwise report both, and initialise the missing ones."""
    verify: Verify = "header"
    """`"header"` (default): check everything that headers and index show; `"finite"`: also check that every loaded
    floating value is finite; `"full"`: also check every byte against the checksums in the manifest that raysharding's
    saves hold."""
    key_mapping: Mapping[str, str] | None = None
    """Regular expression on checkpoint keys → replacement, applied before the model's own mapping."""
    seed: int = 0
    """Seed, together with the FQN, of tensors that the checkpoint lacks. Default 0."""
    shared_memory: bool = True
    """On CPUs: ranks on a reader's host read their parts from the reader's buckets in shared memory instead of
    receiving them through a socket. Ranks that cannot map the buckets still use the socket. Default yes."""
    num_readers: int | None = None
    """Most ranks that read the files and send to the others, spread over the nodes that see the files. Default:
    rank 0 alone under `scatter` and `broadcast`; under `auto` all ranks that see the files, but fewer for small tensors
    in a store, of which a rank that read only its own parts would request each part."""
    mmap: bool = False
    """On CPUs where every rank sees the files: map the shards to pages of the files, which are read at first use and
    copied on write. Tensors of another dtype, in several pieces, or with rows that the ranks do not divide are read as
    usual. A later change to a file changes the weights, and truncation of a file ends the process; so mmap is never
    the default, and `auto` never chooses it."""
    digest: bool = False
    """After the load, compare the ranks' values, and put a digest of all values into the report. Default no."""

    def __post_init__(self) -> None:
        _require_bools(self, "mmap", "digest", "strict", "shared_memory")
        _require_choice(self, "transport", get_args(Transport))
        _require_choice(self, "verify", get_args(Verify))
        _require(self, "give None, or 1 or more", num_readers=self.num_readers is None or _is_int(self.num_readers))
        is_mixed = self.num_readers is not None and self.transport == "local"
        _require(self, "leave it out under transport='local': every rank reads", num_readers=not is_mixed)
        is_size = self.bucket_bytes is None or _is_int(self.bucket_bytes, 4096)
        _require(self, "give None, or at least 4096 bytes, such as 32 << 20", bucket_bytes=is_size)
        is_mapped = not self.mmap or self.transport in ("auto", "local")
        _require(self, "mmap=True takes 'auto' or 'local': every rank maps its own part", transport=is_mapped)
        if self.dtype is not None:
            object.__setattr__(self, "dtype", floating_dtype(self.dtype))
        _require(self, "give a whole number", seed=_is_int(self.seed, -inf))
        is_map = self.key_mapping is None or _is_text_map(self.key_mapping)
        cure = "give a dict of regular expressions on checkpoint keys and their replacements"
        _require(self, cure, key_mapping=is_map)
        _require_patterns("key_mapping", self.key_mapping or ())


def _require_patterns(name: str, patterns: Iterable[str]) -> None:
    for pattern in patterns:
        try:
            re.compile(pattern)
        except re.error as error:
            message = f"{name}={pattern!r}: not a regular expression ({error}); escape a literal part with re.escape"
            raise ValueError(message) from error


@fields_with_hints
@dataclass(frozen=True)
class Placement:
    """Placement of the ranks on nodes."""

    strategy: Strategy = "PACK"
    """Ray's placement-group strategy. Default `"PACK"`: as few nodes as can hold the group."""
    cpus_per_rank: float = 1.0
    """CPUs reserved for each rank; also the number of torch threads in a CPU rank, unless the runtime environment's
    `env_vars` set OMP_NUM_THREADS. Default 1."""
    gpus_per_rank: float = 1.0
    """Part of a GPU that Ray reserves for each rank, at most 1. With 0.5, two ranks share a GPU: two of one group, for
    which NCCL must be 2.30 or newer, or one each of two groups. Ray fills one GPU before the next: for two groups with
    one rank on each GPU, make the group with more than half first, such as 0.6, then the one with 0.4, and give
    `world_size` to both. Memory is not divided: what a rank takes, the others of its GPU lack. No effect where ranks
    run on CPUs because the cluster has no GPU. Default 1."""
    labels: Mapping[str, str] | None = None
    """Labels that every rank's node must have. Default: any node."""
    runtime_env: Mapping[str, Any] | None = None
    """Ray runtime environment of the rank actors. Default: the job's."""
    placement_group: Any = None
    """An existing Ray placement group with one bundle for each rank, owned by the caller. Default: the group creates
    and removes its own."""
    port_range: tuple[int, int] | None = None
    """First and last TCP port, both included, at which rank 0's store listens as long as the group lives: one for each
    group whose rank 0 is on the node. Links between ranks (gloo, NCCL) take ports that the kernel chooses, as does the
    store by default. All else is Ray's connections, whose ports `ray start` sets."""

    def __post_init__(self) -> None:
        _require_choice(self, "strategy", get_args(Strategy))
        _require(self, "give 0 or more", cpus_per_rank=_is_at_least(0, self.cpus_per_rank))
        is_part = _is_at_least(1e-4, self.gpus_per_rank) and self.gpus_per_rank <= 1
        _require(self, "give 1, or a part of a GPU down to Ray's 0.0001, such as 0.5", gpus_per_rank=is_part)
        is_labels = self.labels is None or _is_text_map(self.labels)
        _require(self, "give a dict of label names and values, both str", labels=is_labels)
        is_environment = self.runtime_env is None or isinstance(self.runtime_env, Mapping)
        _require(self, "give a dict, as Ray's runtime_env", runtime_env=is_environment)
        ports: Any = self.port_range
        is_pair = isinstance(ports, tuple) and len(ports) == 2 and all(map(_is_int, ports))
        is_range = ports is None or (is_pair and ports[0] <= ports[1] <= 65535)
        _require(self, "give None, or (first, last) out of 1 to 65535", port_range=is_range)


@fields_with_hints
@dataclass(frozen=True)
class Timeouts:
    """Deadlines in seconds. Every wait has a deadline."""

    place_s: float | None = None
    """Time for Ray to reserve every rank's resources. Default 120, and 900 where an autoscaler may add nodes, unless
    autoscaler v2 reports that none of them makes room. Too few accelerators, used or not, are an error at once, unless
    an autoscaler may add nodes, or a node has died, which may come back."""
    start_s: float = 180.0
    """Time for every actor process to start and finish its imports. Default 180."""
    rendezvous_s: float = 120.0
    """Time for all ranks to join the process group. Default 120."""
    load_stall_s: float = 120.0
    """Longest time without a byte of progress in a load or save. Default 120."""
    call_s: float = 1800.0
    """Longest time of one call, measured from when the ranks begin it. Default 1800."""
    drain_s: float = 5.0
    """Time for ranks to finish after another rank failed; then they are stopped. Default 5."""
    lease_s: float | None = None
    """Time for which a group outlives drivers that do not run: frozen ones (SIGSTOP, a paused machine), or the dead
    drivers of a named group. Each driver renews the lease three times in that period; when it expires, the controller
    ends the group and releases its resources. At least 1. Default `None`: no lease; a frozen driver then holds its
    ranks."""

    def __post_init__(self) -> None:
        cure = "give a positive number of seconds; a deadline is finite"
        for name in ("start_s", "rendezvous_s", "load_stall_s", "call_s", "drain_s"):
            _require(self, cure, **{name: _is_positive(getattr(self, name))})
        _require(self, cure, place_s=self.place_s is None or _is_positive(self.place_s))
        is_lease = self.lease_s is None or _is_at_least(1, self.lease_s)
        _require(self, "give None, or 1 second or more, such as 60", lease_s=is_lease)
